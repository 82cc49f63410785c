"""Workers and the attempts that they run; a worker's current attempt is the last it was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from leyden.errors import UnknownWorker
from leyden.store.sql.pages import Filters, order_and_limit
from leyden.store.sql.rows import worker_from
from leyden.store.sql.transaction import Transaction
from leyden.types import UNSET, Attempt, FilterLogic, PaginatedResult, SortOrder, Unset, Worker, WorkerStatus
from leyden.types.checks import check_id, json_text

_SORTABLE = {
    name: f"w.{name}"
    for name in (
        "worker_id",
        "status",
        "last_heartbeat_time",
        "last_dequeue_time",
        "last_busy_time",
        "last_idle_time",
    )
}


def update_worker(tx: Transaction, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET) -> Worker:
    check_id("worker_id", worker_id)
    keep = isinstance(heartbeat_stats, Unset)
    stats = None if keep else json_text(heartbeat_stats, "the statistics of a worker")
    tx.run("beat_worker", worker_id=worker_id, now=tx.now, heartbeat_stats=stats, keep=int(keep))
    return get_worker_by_id(tx, worker_id)


def pause_worker(tx: Transaction, worker_id: str, paused: bool = True) -> Worker:
    if not tx.change("set_worker_paused", worker_id=worker_id, paused=int(paused)):
        raise _unknown_worker(tx, worker_id)
    return get_worker_by_id(tx, worker_id)


def get_worker_by_id(tx: Transaction, worker_id: str) -> Worker:
    row = tx.one("get_worker", worker_id=worker_id)
    if row is None:
        raise _unknown_worker(tx, worker_id)
    return worker_from(row)


def query_workers(
    tx: Transaction,
    *,
    status_in: Sequence[WorkerStatus] | None = None,
    worker_id_contains: str | None = None,
    filter_logic: FilterLogic = "and",
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Worker]:
    """Return a page of workers. `filter_logic` joins the filters."""
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["w.worker_id"])
    filters = Filters(filter_logic)
    filters.among("w.status", status_in, get_args(WorkerStatus))
    filters.contains("w.worker_id", worker_id_contains)
    where = filters.sql()
    tx.expect(None)  # perhaps many rows
    items = [worker_from(row) for row in tx.page("select_workers", where + page, filters.parameters)]
    total = tx.page("count_workers", where, filters.parameters)[0][0]
    return PaginatedResult(items, limit, offset, total)


def follow_attempt(tx: Transaction, before: Attempt, after: Attempt) -> None:
    """Update the workers of an attempt whose status or worker changed."""
    ids = {"rollout_id": after.rollout_id, "attempt_id": after.attempt_id, "now": tx.now}
    if before.worker_id is not None and before.worker_id != after.worker_id:
        tx.run("worker_freed", worker_id=before.worker_id, status="idle", **ids)
    if after.worker_id is None:
        return
    if after.finished and after.status != "timeout":
        tx.run("worker_freed", worker_id=after.worker_id, status="idle", **ids)
    elif after.status in ("timeout", "unresponsive"):
        tx.run("worker_freed", worker_id=after.worker_id, status="unknown", **ids)
    elif before.worker_id != after.worker_id:
        tx.run("worker_busy", worker_id=after.worker_id, **ids)
    elif before.status == "unresponsive":
        tx.run("worker_revived", worker_id=after.worker_id, **ids)


def _unknown_worker(tx: Transaction, worker_id: str) -> UnknownWorker:
    return UnknownWorker(f"worker {worker_id!r} has never claimed from, or reported to, {tx.store_url}")
