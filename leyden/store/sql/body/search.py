"""Search the spans of one attempt or rollout, or all spans by time, name and indexed attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from leyden.errors import ConfigError
from leyden.store.sql.body.lookup import unknown_attempt, unknown_rollout
from leyden.store.sql.body.span_index import attribute_digest, indexed_attribute, matches
from leyden.store.sql.body.statistics import count_spans
from leyden.store.sql.body.token_columns import read_tokens
from leyden.store.sql.pages import Filters, check_page, order_and_limit, total_of
from leyden.store.sql.rows import (
    ATTEMPT_NUMBER,
    ATTRIBUTES,
    KEY,
    OF_ATTEMPT,
    OF_ROLLOUT,
    SEQUENCE_ID,
    FoundSpan,
    from_text,
)
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import AttributeValue, FilterLogic, PaginatedResult, SortOrder, SpanKind

_SORTABLE = {
    name: f"s.{name}"
    for name in ("sequence_id", "start_time", "end_time", "name", "trace_id", "span_id", "parent_id", "status_code")
}
_ROLLOUTS_AT_ONCE = 100
"""Rollouts in one statement of `query_spans_of`. For more, PostgreSQL without statistics reads the whole table."""
_HAS_ATTRIBUTE = "s.key IN (SELECT span FROM attribute_values WHERE attribute = {} AND value = {})"
_UNINDEXED_NAME = "s.name || ''"
"""The span's name, in a form that no index serves, for queries with a more selective condition."""
_ANY_NAME = "s.name IN (SELECT name FROM span_names)"
"""A condition that holds for every span. With it, the index of names and times serves a search by time alone."""


def query_spans(
    tx: Transaction,
    rollout_id: str | None = None,
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
    kind: SpanKind | None = None,
    started_from: float | None = None,
    started_before: float | None = None,
    attributes: Mapping[str, str | bool | int | float] | None = None,
    filter_logic: FilterLogic = "and",
    limit: int = -1,
    offset: int = 0,
    sort_by: str | None = "sequence_id",
    sort_order: SortOrder = "asc",
) -> PaginatedResult[FoundSpan]:
    """Search spans of one rollout by its index, or of all rollouts by time, name and indexed attributes.

    `filter_logic` joins the filters from `trace_id` to `kind`; times and attributes must hold in any case. Raise
    ConfigError for an `attempt_id` without its rollout.
    """
    check_page(limit, offset)
    page = _Page(sort_by, sort_order, limit, offset)
    either = Filters(filter_logic)
    either.equal("s.trace_id", trace_id)
    either.contains("s.trace_id", trace_id_contains)
    either.equal("s.span_id", span_id)
    either.contains("s.span_id", span_id_contains)
    either.equal("s.parent_id", parent_id)
    either.contains("s.parent_id", parent_id_contains)
    either.equal("s.name" if rollout_id is None and not attributes else _UNINDEXED_NAME, name)
    either.contains("s.name", name_contains)
    either.equal("s.kind", kind)
    always = Filters("and", parameters=either.parameters)
    always.between("s.start_time", started_from, started_before)
    asked = {key: _digest(key, value) for key, value in (attributes or {}).items()}
    if rollout_id is not None:
        return _of_rollout(tx, rollout_id, attempt_id, always, either, asked, page)
    if attempt_id is not None:
        raise ConfigError(f"attempt_id={attempt_id!r} is an attempt of one rollout; give its rollout_id too")
    by_name = name is not None and filter_logic == "and"
    if always.conditions and not asked and not by_name:
        always.condition(_ANY_NAME)
    if sort_by == "sequence_id":  # numbers of different attempts do not compare; arrival does
        page = replace(page, sort_by=None)
    if not (always.conditions or asked or by_name):
        page = replace(page, arrival="s.key")
    return _of_all(tx, always, either, asked, page)


def query_spans_of(tx: Transaction, rollout_ids: Sequence[str]) -> dict[str, list[FoundSpan]]:
    tx.expect(None)  # perhaps many rows
    answer: dict[str, list[FoundSpan]] = {rollout_id: [] for rollout_id in rollout_ids}
    wanted = list(answer)
    for start in range(0, len(wanted), _ROLLOUTS_AT_ONCE):
        part = wanted[start : start + _ROLLOUTS_AT_ONCE]
        filters = Filters("and")
        filters.among("r.rollout_id", part)
        rows = tx.page("select_spans_of_latest", filters.sql(), filters.parameters)
        if unknown := dict.fromkeys(part).keys() - {row[OF_ROLLOUT] for row in rows}:
            raise unknown_rollout(tx, min(unknown, key=part.index))
        for found in _found(tx, _as_numbered([row for row in rows if row[KEY] is not None])):
            answer[found[0]].append(found)
    return answer


def spans_at(tx: Transaction, keys: Sequence[int]) -> list[FoundSpan]:
    """Return the spans with these keys, of any rollout, in the order of the keys."""
    rows = {row[KEY]: row for row in tx.all("select_spans_at", keys=json.dumps(keys))} if keys else {}
    return _found(tx, [rows[key] for key in keys])


def _found(tx: Transaction, rows: Sequence[Row]) -> list[FoundSpan]:
    tokens = read_tokens(tx, rows)
    return [(row[OF_ROLLOUT], row[OF_ATTEMPT], row, record) for row, record in zip(rows, tokens, strict=True)]


def _as_numbered(rows: list[Row]) -> list[Row]:
    rows.sort(key=itemgetter(KEY))
    rows.sort(key=itemgetter(SEQUENCE_ID))
    return rows


@dataclass(slots=True)
class _Page:
    """The part of the result that a caller requests, and its order."""

    sort_by: str | None
    sort_order: SortOrder
    limit: int
    offset: int
    arrival: str = "s.key + 0"
    """The order of equal rows: by arrival. The sum prevents a scan of the table in that order if an index finds fewer
    spans."""

    @property
    def order(self) -> str:
        """The SQL of the page's order, without its limit."""
        return _order_and_limit(self.sort_by, self.sort_order, -1, 0, self.arrival)

    @property
    def sql(self) -> str:
        """The SQL of the page's order and limit."""
        return _order_and_limit(self.sort_by, self.sort_order, self.limit, self.offset, self.arrival)

    @property
    def whole(self) -> bool:
        return self.limit == -1 and self.offset == 0

    @property
    def part(self) -> slice:
        """The slice that cuts this page out of all items in its order."""
        return slice(self.offset, None if self.limit == -1 else self.offset + self.limit)


_ALL_AS_NUMBERED = _Page("sequence_id", "asc", -1, 0)
"""All spans by sequence id, the most frequent request. Its rows are sorted in Python, because the database would copy
each span to sort them."""


@lru_cache
def _order_and_limit(sort_by: str | None, sort_order: SortOrder, limit: int, offset: int, arrival: str) -> str:
    return order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=[arrival])


def _of_rollout(
    tx: Transaction,
    rollout_id: str,
    attempt_id: str | None,
    always: Filters,
    either: Filters,
    asked: Mapping[str, bytes],
    page: _Page,
) -> PaginatedResult[FoundSpan]:
    """Return a page of the spans of one rollout, or of one of its attempts. It can match any attribute without an
    index, because it may read all of the rollout's spans.

    asked: the digests of requested attribute values by name.
    """
    everything = (
        page == _ALL_AS_NUMBERED and attempt_id is None and not (asked or always.conditions or either.conditions)
    )
    if everything:
        tx.ahead("select_all_spans", [{"rollout_id": rollout_id}])
    # Columns of a row of counters: 0 the rollout's key, 1 its number of attempts, 2 the attempt's
    # number (NULL in the one row of a rollout without attempts), 3 its id, 4 its last span's number
    counters = tx.all("get_span_counters", rollout_id=rollout_id)
    if not counters:
        raise unknown_rollout(tx, rollout_id)
    seq, latest = counters[0][:2]
    always.equal("s.rollout", seq)
    if attempt_id is not None:
        column, wanted = (2, latest) if attempt_id == "latest" else (3, attempt_id)
        counters = [row for row in counters if row[2] is not None and row[column] == wanted]
        if not counters and attempt_id == "latest":
            return PaginatedResult([], page.limit, page.offset, 0)
        if not counters:
            raise unknown_attempt(tx, rollout_id, attempt_id)
        always.equal("s.attempt", counters[0][2])
    tx.expect(sum(row[4] for row in counters if row[2] is not None))
    where, parameters = either.sql(*always.conditions), either.parameters
    if everything:
        rows = _as_numbered(tx.all("select_all_spans", rollout_id=rollout_id))
        total = len(rows)
    elif page == _ALL_AS_NUMBERED and not asked:
        rows = _as_numbered(tx.page("select_spans", where, parameters))
        total = len(rows)
    elif asked:
        rows = tx.page("select_spans", where + page.order, parameters)
        rows = [row for row in rows if matches(from_text(row[ATTRIBUTES]), asked)]
        total = len(rows)
        rows = rows[page.part]
    else:
        rows = tx.page("select_spans", where + page.sql, parameters)
        total = len(rows) if page.whole else tx.page("count_spans_of", where, parameters)[0][0]
    attempt_ids = {row[2]: row[3] for row in counters}
    items: list[FoundSpan] = [
        (rollout_id, attempt_ids[row[ATTEMPT_NUMBER]], row, tokens)
        for row, tokens in zip(rows, read_tokens(tx, rows), strict=True)
    ]
    return PaginatedResult(items, page.limit, page.offset, total)


def _of_all(
    tx: Transaction, always: Filters, either: Filters, asked: Mapping[str, bytes], page: _Page
) -> PaginatedResult[FoundSpan]:
    """Return a page of spans of all rollouts. Read the keys of the page's spans by an index, then their rows.

    asked: the digests of requested attribute values by name.
    """
    tx.expect(None)  # perhaps many rows
    for key, digest in asked.items():
        always.condition(_HAS_ATTRIBUTE, indexed_attribute(tx, key), digest)
    where, parameters = either.sql(*always.conditions), either.parameters
    keys = [row[0] for row in tx.page("select_span_keys", where + page.sql, parameters)]
    if where:
        n_found, limit, offset = len(keys), page.limit, page.offset
        total, exact = total_of(tx, "select_span_keys", where, parameters, found=n_found, limit=limit, offset=offset)
    else:
        total, exact = count_spans(tx), True
    return PaginatedResult(spans_at(tx, keys), page.limit, page.offset, total, exact)


def _digest(key: str, value: AttributeValue) -> bytes:
    """Return the digest by which the index finds this value. Raise ConfigError for a list, which is not indexed."""
    digest = attribute_digest(value)
    if digest is None:
        raise ConfigError(f"attributes[{key!r}] must be a string, a boolean or a number to be found, got {value!r}")
    return digest
