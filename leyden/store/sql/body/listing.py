"""Read pages of rollouts from the indexes that hold them in the requested order.

The cost of a page of all rollouts or of some statuses, in the order of arrival or by `start_time`, `end_time` or
`rollout_id`, grows with its size and its `offset`, not with the store. An index holds the rollouts of one status in
order, so a page of several statuses merges one short slice of each. A page of one run, of one group or of the forks of
one rollout, in the order of arrival, is read from an index too; with other filters and orders its cost grows with the
run, the group or the forks. Any other page scans rollouts until it is full, or all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any

from leyden.store.sql.body.lookup import run_key
from leyden.store.sql.body.rollout_filter import MEASURES, RolloutFilter
from leyden.store.sql.body.statistics import FINAL_STATUSES, count_by_status, count_rollouts
from leyden.store.sql.pages import Filters, order_and_limit, total_of, within_reach
from leyden.store.sql.rows import SEQ, rollout_from
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import PaginatedResult, Rollout, SortOrder

_NEVER_NULL = {name: f"r.{name}" for name in ("rollout_id", "start_time", "status")}
_SORTABLE = _NEVER_NULL | {name: f"r.{name}" for name in ("end_time", "mode", "resources_id", "failure", *MEASURES)}


def query_rollouts(
    tx: Transaction,
    matching: RolloutFilter,
    *,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Rollout]:
    """Return a page of rollouts, read in the cheapest way: from the index of finished rollouts by measure, from the
    index of a run, group or replay, from a slice of an index for each status, or else by a scan. The total is exact if
    the kept counts give it.
    """
    order = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["r.seq"], never_null=_NEVER_NULL)
    others, filters = matching.conditions()
    tx.expect(None)  # perhaps many rows
    in_part = matching.group_id is not None or matching.replay_from is not None
    by_outcome = (matching.failure_in or matching.between) and matching.filter_logic == "and"
    if not in_part and (sort_by in MEASURES or by_outcome):
        return _page_of_finished(tx, matching.run_id, filters, sort_by, sort_order, limit, offset)
    if in_part or matching.run_id is not None:
        return _page_of_part(tx, matching, filters, order, limit, offset)
    status_in = matching.status_in
    where, parameters = filters.sql(), filters.parameters
    by_index = matching.rollout_id_in is None and sort_by in (None, "start_time", "end_time")
    if limit == -1:
        rows = tx.page("select_rollouts", where + order, parameters)
    elif by_index and (status_in is None or matching.filter_logic == "and" or not others.conditions):
        statuses = None if status_in is None else list(dict.fromkeys(status_in))
        rows = _at(tx, _Slices(tx, others, sort_order, offset + limit).in_order(sort_by, statuses)[offset:])
    else:
        rows = _at(tx, [row[0] for row in tx.page("select_rollout_seqs", where + order, parameters)])
    items = [rollout_from(row) for row in rows]
    if not filters.conditions:
        total, exact = count_rollouts(tx), True
    elif status_in is not None and not others.conditions:
        counted = count_by_status(tx)
        total, exact = sum(counted.get(status, 0) for status in set(status_in)), True
    else:
        n_found = len(items)
        total, exact = total_of(tx, "select_rollout_seqs", where, parameters, found=n_found, limit=limit, offset=offset)
    return PaginatedResult(items, limit, offset, total, exact)


def _page_of_part(
    tx: Transaction, matching: RolloutFilter, filters: Filters, order: str, limit: int, offset: int
) -> PaginatedResult[Rollout]:
    """Return a page of the rollouts of a run, of a group, or that repeat one rollout, as far as these are given."""
    group_id, replay_from = matching.group_id, matching.replay_from
    run = None if matching.run_id is None else run_key(tx, matching.run_id)
    parameters = filters.parameters | {"run": run, "group_id": group_id, "replay_from": replay_from}
    of_run = [] if run is None else ["r.run = :run"]
    of_group = [] if group_id is None else ["r.group_id = :group_id"]
    if replay_from is not None:
        query, where = "select_rollout_seqs_of_replay", filters.sql(*of_run, *of_group, begins="AND")
    elif group_id is not None:
        query, where = "select_rollout_seqs_of_group", filters.sql(*of_run, begins="AND")
    else:
        query, where = "select_rollout_seqs_of_run", filters.sql(begins="AND")
    items = [rollout_from(row) for row in _at(tx, [row[0] for row in tx.page(query, where + order, parameters)])]
    total, exact = total_of(tx, query, where, parameters, found=len(items), limit=limit, offset=offset)
    return PaginatedResult(items, limit, offset, total, exact)


def _page_of_finished(
    tx: Transaction,
    run_id: str | None,
    filters: Filters,
    sort_by: str | None,
    sort_order: SortOrder,
    limit: int,
    offset: int,
) -> PaginatedResult[Rollout]:
    """Return a page of rollouts that is filtered or sorted by failure or by a measure, from the index of finished
    rollouts.

    In a page that is sorted by a measure, rollouts without a value come last, in the order of arrival. They are not in
    that index, so they are read by a second query if the page reaches them.
    """
    always = [] if run_id is None else ["r.run = :run"]
    parameters = filters.parameters if run_id is None else {**filters.parameters, "run": run_key(tx, run_id)}
    reach = within_reach(-1 if limit == -1 else offset + limit)
    by_measure = sort_by in MEASURES
    order = order_and_limit(_SORTABLE, sort_by, sort_order, -1, 0, tie=["r.seq"], never_null=_SORTABLE)
    have = [f"r.{sort_by} IS NOT NULL"] if by_measure else []
    where = filters.sql(*always, *have, begins="AND")
    seqs = [row[0] for row in tx.page("select_finished_seqs", f"{where}{order} LIMIT {reach}", parameters)]
    if by_measure and len(seqs) < reach:
        lack = f"(r.end_time IS NULL OR r.{sort_by} IS NULL)"
        rest = f"{filters.sql(*always, lack)} ORDER BY r.seq {sort_order} LIMIT {reach - len(seqs)}"
        seqs += [row[0] for row in tx.page("select_rollout_seqs", rest, parameters)]
    items = [rollout_from(row) for row in _at(tx, seqs[offset:])]
    query, matching = ("select_rollout_seqs", filters.sql(*always)) if by_measure else ("select_finished_seqs", where)
    total, exact = total_of(tx, query, matching, parameters, found=len(items), limit=limit, offset=offset)
    return PaginatedResult(items, limit, offset, total, exact)


def _at(tx: Transaction, seqs: Sequence[int]) -> list[Row]:
    """Return the rows of `select_rollouts` with these values of `seq`, in this order."""
    rows = {row[SEQ]: row for row in tx.all("select_rollouts_at", seqs=json.dumps(seqs))} if seqs else {}
    return [rows[seq] for seq in seqs]


_WORKED_ON = "r.seq IN (SELECT rollout FROM attempts WHERE end_time IS NULL)"
_HOLDS = {
    "queuing": "r.status = 'queuing'",
    "requeuing": "r.status = 'requeuing'",
    "preparing": _WORKED_ON,
    "running": _WORKED_ON,
    **dict.fromkeys(FINAL_STATUSES, "r.end_time IS NOT NULL"),
}
"""The condition of the index that holds the rollouts of each status. A database uses such a partial index only if the
query states the condition."""


@dataclass(frozen=True, slots=True)
class _Slices:
    """Reads slices of indexes that hold rollouts in the order of a page, and merges them."""

    tx: Transaction
    filters: Filters
    """The filters without the status, which each slice adds."""
    sort_order: SortOrder
    reach: int
    """The position of the last rollout that the page needs."""

    def in_order(self, sort_by: str | None, statuses: Sequence[str] | None) -> list[int]:
        """Return the numbers of the first rollouts of these statuses (None: of all)."""
        each_status = [None] if statuses is None else statuses
        if sort_by is None:
            return self._merged([self._slice("select_rollout_seqs", status=status) for status in each_status])
        if sort_by == "start_time":
            return self._merged(
                [self._slice("select_rollout_starts", "r.start_time", status) for status in each_status]
            )
        final = [status for status in FINAL_STATUSES if statuses is None or status in statuses]
        seqs = self._merged([self._slice("select_rollout_ends", "r.end_time", status) for status in final])
        if len(seqs) < self.reach:  # unfinished rollouts come last, in the order of arrival
            unfinished = [status for status in each_status if status not in FINAL_STATUSES]
            seqs += self._merged(
                [self._slice("select_rollout_seqs", None, status, ended=False) for status in unfinished]
            )
        return seqs[: self.reach]

    def _slice(self, query: str, column: str | None = None, status: str | None = None, ended: bool = True) -> list[Row]:
        """Read the first rollouts of one status (None: of all), sorted by a column, then by `seq`.

        ended: whether to include rollouts that have ended.
        """
        always = Filters("and", parameters=self.filters.parameters)
        always.equal("r.status", status)
        if not ended and status is None:
            always.condition("r.end_time IS NULL")
        elif status is not None and (holds := _HOLDS.get(status)):
            always.condition(holds)
        order = ", ".join(f"{each} {self.sort_order}" for each in (column, "r.seq") if each is not None)
        part = f" ORDER BY {order} LIMIT {within_reach(self.reach)}"
        return self.tx.page(query, self.filters.sql(*always.conditions) + part, always.parameters)

    def _merged(self, slices: Sequence[list[Row]]) -> list[int]:
        rows = slices[0] if len(slices) == 1 else merge(*slices, key=_sort_key, reverse=self.sort_order == "desc")
        return [row[0] for row in islice(rows, within_reach(self.reach))]


def _sort_key(row: Row) -> tuple[Any, ...]:
    """Return the sort key of a row of a slice, which is `seq` and perhaps a time: the time first."""
    return tuple(row[::-1])
