"""Add spans. Each span is a heartbeat of its attempt, and is numbered by the attempt's counter. `search.py` and
`span_stream.py` read spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from leyden.store.sql.body.lookup import unknown_attempt, unknown_rollout
from leyden.store.sql.body.outcomes import add_to_outcome
from leyden.store.sql.body.span_index import index_values
from leyden.store.sql.body.token_columns import TokenWriter
from leyden.store.sql.pages import Filters
from leyden.store.sql.rows import DEFAULT_CONFIG, bytes_of, numbered, span_values
from leyden.store.sql.transaction import SpanTarget, Transaction
from leyden.types import (
    ATTEMPT_FINISHED,
    ROLLOUT_FINISHED,
    Span,
    attempt_after_span,
    get_known_prefix,
    rollout_after_attempt,
)
from leyden.types.checks import check_span

_ATTEMPT = 3
"""The column of `get_span_target` where the attempt begins, as in `SpanTarget`."""
_IDS_AT_ONCE = 500
"""The most ids in one statement."""
_OWNER = attrgetter("rollout_id", "attempt_id")


def add_span(tx: Transaction, span: Span) -> Span | None:
    added = _add_to_attempt(tx, _target(tx, span.rollout_id, span.attempt_id), (span,))
    tx.keep_targets()
    return added[0] if added else None


def add_many_spans(tx: Transaction, spans: Sequence[Span]) -> Sequence[Span]:
    """Number and store spans, and return those that were new, as stored. One transaction: all or none.

    Consecutive spans of one attempt are added together, and all attempts are read in one round trip.
    """
    tx.expect(len(spans))
    tx.lock(span.rollout_id for span in spans)
    owners = dict.fromkeys(map(_OWNER, spans))
    tx.ahead(
        "get_span_target", [{"rollout_id": rollout_id, "attempt_id": attempt_id} for rollout_id, attempt_id in owners]
    )
    added: list[Span] = []
    for (rollout_id, attempt_id), group in groupby(spans, key=_OWNER):
        added += _add_to_attempt(tx, _target(tx, rollout_id, attempt_id), list(group))
    tx.keep_targets()
    return added


def get_many_span_sequence_ids(tx: Transaction, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
    tx.expect(len(rollout_attempt_ids))
    tx.lock(rollout_id for rollout_id, _ in rollout_attempt_ids)
    drawn: list[int] = []
    for rollout_id, attempt_id in rollout_attempt_ids:
        target = _target(tx, rollout_id, attempt_id)
        target.last_span += 1
        tx.run("draw_span_sequence", rollout=target.rollout, sequence_id=target.attempt, last_span=target.last_span)
        drawn.append(target.last_span)
    tx.keep_targets()
    return drawn


def _target(tx: Transaction, rollout_id: str, attempt_id: str) -> SpanTarget:
    """Return the numbers and statuses that adding spans to an attempt needs. Raise UnknownRollout or UnknownAttempt."""
    known = tx.known_target(rollout_id, attempt_id)
    if known is not None:
        return known
    row = tx.one("get_span_target", rollout_id=rollout_id, attempt_id=attempt_id)
    if row is None:
        raise unknown_rollout(tx, rollout_id)
    if row[_ATTEMPT] is None:
        raise unknown_attempt(tx, rollout_id, attempt_id)
    target = tx.targets[rollout_id, attempt_id] = SpanTarget(*row)
    return target


def _add_to_attempt(tx: Transaction, target: SpanTarget, spans: Sequence[Span]) -> list[Span]:
    """Add spans of one attempt, and return the new ones. If there are any, they are a heartbeat of the attempt."""
    for span in spans:
        check_span(span)
    if len(spans) > 1:
        spans = _not_there(tx, target, spans)
    rollout, attempt, last_span = target.rollout, target.attempt, target.last_span
    writer: TokenWriter | None = None
    rows: list[tuple[Any, ...]] = []
    unwritten: set[str] = set()
    """The ids of spans with tokens among `rows`, which are not in the database yet."""
    added: list[Span] = []
    taken = 0
    for span in spans:
        sequence_id = span.sequence_id
        if not sequence_id:
            sequence_id = last_span + 1
            span = numbered(span, sequence_id)
        if sequence_id > last_span:
            last_span = sequence_id
        tokens: tuple[int | None, bytes | None] = None, None
        if span.tokens is not None:
            writer = writer or TokenWriter(tx, rollout, attempt)
            known_prefix = get_known_prefix(span)
            if known_prefix is not None and known_prefix[0] in unwritten:  # `pack` reads it from the database
                tx.put_many("insert_span", rows)
                rows.clear()
                unwritten.clear()
            tokens = writer.pack(span.tokens, known_prefix)
            unwritten.add(span.span_id)
        row = span_values(rollout, attempt, sequence_id, span, tokens)
        taken += bytes_of(row)
        rows.append(row)
        added.append(span)
    if not tx.put_new("insert_span", rows):
        return []  # it was a single span, which was stored already
    tx.spans = True
    if target.may_have_indexes:
        index_values(tx, rollout, attempt, added)
    target.last_span = last_span
    if target.status == "running" and target.rollout_status not in ROLLOUT_FINISHED:  # the common case
        tx.put("beat_heart", (last_span, taken, len(added), tx.clock, rollout, attempt))
    else:
        _write_progress(tx, target, added[0], taken, len(added))
    add_to_outcome(tx, target, added)
    return added


def _not_there(tx: Transaction, target: SpanTarget, spans: Sequence[Span]) -> Sequence[Span]:
    """Return those of the spans that the attempt does not have, each once."""
    missing: dict[str, Span] = {}
    for span in spans:
        missing.setdefault(span.span_id, span)
    if not target.last_span:  # the attempt has no spans
        return list(missing.values())
    span_ids = list(missing)
    for start in range(0, len(span_ids), _IDS_AT_ONCE):
        filters = Filters("and")
        filters.equal("s.rollout", target.rollout)
        filters.equal("s.attempt", target.attempt)
        filters.among("s.span_id", span_ids[start : start + _IDS_AT_ONCE])
        for row in tx.page("select_span_ids", filters.sql(), filters.parameters):
            del missing[row[0]]
    return list(missing.values())


def _write_progress(tx: Transaction, target: SpanTarget, span: Span, taken: int, n_added: int) -> None:
    """Write the attempt's counters, and the statuses that a heartbeat changes: an unfinished attempt becomes `running`,
    and so may its rollout and its worker.

    span: one of the new spans.
    taken: their bytes.
    n_added: their number.
    """
    rollout, attempt, last_span = target.rollout, target.attempt, target.last_span
    before, after = target.status, attempt_after_span(target.status)
    if target.rollout_status in ROLLOUT_FINISHED:
        tx.run("grow_rollout", seq=rollout, bytes=taken)
        tx.tally({"bytes": taken, "spans": n_added})
    counted = {
        "rollout": rollout,
        "sequence_id": attempt,
        "last_span": last_span,
        "bytes": taken,
        "spans": n_added,
    }
    if after in ATTEMPT_FINISHED:
        tx.run("count_late_spans", **counted)
        return
    if after == before:
        tx.put("beat_heart", (last_span, taken, n_added, tx.clock, rollout, attempt))
        return
    tx.run("run_attempt", **counted, now=tx.clock, status=after)
    target.status = after
    followed = rollout_after_attempt(
        target.rollout_status,
        after,
        attempt_sequence=attempt,
        is_latest=attempt == target.attempts,
        config=DEFAULT_CONFIG,  # any will do, because the config matters only when an attempt ends
    )
    if followed != target.rollout_status:
        tx.run("set_rollout_status", seq=rollout, status=followed)
        target.rollout_status = followed
        tx.targets.clear()  # targets of the rollout's other attempts hold its old status
        tx.targets[span.rollout_id, span.attempt_id] = target
    if before == "unresponsive" and target.worker_id is not None:
        ids = {"rollout_id": span.rollout_id, "attempt_id": span.attempt_id}
        tx.run("worker_revived", worker_id=target.worker_id, now=tx.now, **ids)
