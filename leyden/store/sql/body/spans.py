"""Spans: added with a heartbeat, numbered by their attempt's counter, read in the order of those numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal

from leyden.store.sql.body.lookup import rollout_key, unknown_attempt, unknown_rollout
from leyden.store.sql.pages import Filters, order_and_limit
from leyden.store.sql.rows import span_from, span_values
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import (
    ATTEMPT_FINISHED,
    FilterLogic,
    PaginatedResult,
    RolloutConfig,
    SortOrder,
    Span,
    attempt_after_span,
    rollout_after_attempt,
)

__all__ = ["add_many_spans", "get_many_span_sequence_ids", "query_spans", "query_spans_of"]

_OWNER = attrgetter("rollout_id", "attempt_id")
_SORTABLE = {
    name: f"s.{name}"
    for name in ("sequence_id", "start_time", "end_time", "name", "trace_id", "span_id", "parent_id", "status_code")
}


def add_many_spans(tx: Transaction, spans: Sequence[Span]) -> Sequence[Span]:
    tx.expect(len(spans))
    added: list[Span] = []
    for (rollout_id, attempt_id), group in groupby(spans, key=_OWNER):
        added += _add_to_attempt(tx, _target(tx, rollout_id, attempt_id), group)
    return added


def get_many_span_sequence_ids(tx: Transaction, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
    tx.expect(len(rollout_attempt_ids))
    drawn: list[int] = []
    for rollout_id, attempt_id in rollout_attempt_ids:
        target = _target(tx, rollout_id, attempt_id)
        drawn.append(target[5] + 1)
        tx.run("draw_span_sequence", rollout=target[0], sequence_id=target[3], last_span=drawn[-1])
    return drawn


def query_spans(
    tx: Transaction,
    rollout_id: str,
    attempt_id: str | Literal["latest"] | None = None,
    *,
    trace_id: str | None = None,
    trace_id_contains: str | None = None,
    span_id: str | None = None,
    span_id_contains: str | None = None,
    parent_id: str | None = None,
    parent_id_contains: str | None = None,
    name: str | None = None,
    name_contains: str | None = None,
    filter_logic: FilterLogic = "and",
    limit: int = -1,
    offset: int = 0,
    sort_by: str | None = "sequence_id",
    sort_order: SortOrder = "asc",
) -> PaginatedResult[Span]:
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["s.key"])
    filters = Filters(filter_logic)
    filters.equal("s.trace_id", trace_id)
    filters.contains("s.trace_id", trace_id_contains)
    filters.equal("s.span_id", span_id)
    filters.contains("s.span_id", span_id_contains)
    filters.equal("s.parent_id", parent_id)
    filters.contains("s.parent_id", parent_id_contains)
    filters.equal("s.name", name)
    filters.contains("s.name", name_contains)
    counters = tx.all("get_span_counters", rollout_id=rollout_id)
    if not counters:
        raise unknown_rollout(tx, rollout_id)
    seq, latest = counters[0][:2]
    always, parameters = ["s.rollout = :seq"], filters.parameters | {"seq": seq}
    if attempt_id is not None:
        column, wanted = (2, latest) if attempt_id == "latest" else (3, attempt_id)
        counters = [row for row in counters if row[2] is not None and row[column] == wanted]
        if not counters:
            raise unknown_attempt(tx, rollout_id, attempt_id)
        always.append("s.attempt = :attempt")
        parameters["attempt"] = counters[0][2]
    tx.expect(sum(row[4] for row in counters if row[2] is not None))
    where = filters.sql(*always)
    attempt_ids = {row[2]: row[3] for row in counters}
    items = [span_from(rollout_id, attempt_ids, row) for row in tx.page("select_spans", where + page, parameters)]
    whole = limit == -1 and offset == 0
    total = len(items) if whole else tx.page("count_spans_of", where, parameters)[0][0]
    return PaginatedResult(items, limit, offset, total)


def query_spans_of(tx: Transaction, rollout_ids: Sequence[str]) -> dict[str, list[Span]]:
    tx.expect(None)
    answer: dict[str, list[Span]] = {}
    for rollout_id in rollout_ids:
        attempts = rollout_key(tx, rollout_id)[1]
        answer[rollout_id] = list(query_spans(tx, rollout_id, "latest")) if attempts else []
    return answer


def _target(tx: Transaction, rollout_id: str, attempt_id: str) -> Row:
    """The row of `get_span_target`. Raises UnknownRollout, UnknownAttempt."""
    target = tx.one("get_span_target", rollout_id=rollout_id, attempt_id=attempt_id)
    if target is None:
        raise unknown_rollout(tx, rollout_id)
    if target[3] is None:
        raise unknown_attempt(tx, rollout_id, attempt_id)
    return target


def _add_to_attempt(tx: Transaction, target: Row, spans: Iterable[Span]) -> list[Span]:
    """Add spans of one attempt and answer the new ones; if there are any, the attempt is alive."""
    rollout, _, _, attempt, _, last_span, _ = target
    added: list[Span] = []
    for span in spans:
        sequence_id = span.sequence_id or last_span + 1
        if not tx.put("insert_span", span_values(rollout, attempt, sequence_id, span)):
            continue
        last_span = max(last_span, sequence_id)
        added.append(span if span.sequence_id else span.model_copy(update={"sequence_id": sequence_id}))
    if added:
        _beat(tx, target, added[0], last_span)
    return added


def _beat(tx: Transaction, target: Row, span: Span, last_span: int) -> None:
    """The counter moves on; an unfinished attempt is alive, and its rollout and its worker follow."""
    rollout, rollout_status, attempts, attempt, status, _, worker_id = target
    after = attempt_after_span(status)
    if after in ATTEMPT_FINISHED:
        tx.run("draw_span_sequence", rollout=rollout, sequence_id=attempt, last_span=last_span)
    elif after == status:
        tx.run("beat_heart", rollout=rollout, sequence_id=attempt, last_span=last_span, now=tx.now)
    else:
        tx.run("run_attempt", rollout=rollout, sequence_id=attempt, last_span=last_span, now=tx.now, status=after)
        followed = rollout_after_attempt(
            rollout_status,
            after,
            attempt_sequence=attempt,
            is_latest=attempt == attempts,
            config=RolloutConfig(),  # read only when an attempt ends
        )
        if followed != rollout_status:
            tx.run("set_rollout_status", seq=rollout, status=followed, end_time=None)
        if status == "unresponsive" and worker_id is not None:
            ids = {"rollout_id": span.rollout_id, "attempt_id": span.attempt_id}
            tx.run("worker_revived", worker_id=worker_id, now=tx.now, **ids)
