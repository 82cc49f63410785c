"""Runs and their metrics.

A rollout names its run when it is enqueued (`rollouts.py`). A run and its metrics stay when retention deletes its
rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from leyden.errors import ConfigError, IllegalTransition
from leyden.store.sql.body.lookup import run_key, unknown_run
from leyden.store.sql.pages import Filters, order_and_limit, page_of
from leyden.store.sql.rows import metric_from, run_from, utf8_text
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import (
    FINAL_RUN_STATUSES,
    UNSET,
    MetricPoint,
    PaginatedResult,
    RunRecord,
    RunStatus,
    SortOrder,
    Unset,
)
from leyden.types.checks import check_id, check_time, json_text

_NEVER_NULL = {name: f"u.{name}" for name in ("run_id", "name", "kind", "status", "start_time", "last_heartbeat_time")}
_SORTABLE = _NEVER_NULL | {"end_time": "u.end_time"}
_HIGHEST_ITERATION = 2**53


def start_run(tx: Transaction, run: RunRecord) -> RunRecord:
    check_id("run_id", run.run_id)
    check_id("the name of a run", run.name)
    check_id("the kind of a run", run.kind)
    check_time("the start_time of a run", run.start_time)
    columns = {"run_id": run.run_id, "name": run.name, "config": _config(run.config), "now": tx.now}
    row = tx.one("get_run", run_id=run.run_id)
    if row is None:
        tx.run("insert_run", kind=run.kind, start_time=run.start_time, **columns)
    elif (before := run_from(row)).kind != run.kind:
        raise ConfigError(
            f"run {run.run_id!r} in {tx.store_url} is of kind {before.kind!r} and cannot be resumed as {run.kind!r}; "
            "give the new run an id of its own"
        )
    else:
        tx.run("resume_run", **columns)
    return get_run_by_id(tx, run.run_id)


def update_run(
    tx: Transaction,
    run_id: str,
    *,
    status: RunStatus | Unset = UNSET,
    cause: str | Unset | None = UNSET,
    config: dict[str, Any] | Unset = UNSET,
) -> RunRecord:
    row = _run_row(tx, run_id)
    run = run_from(row)
    if not isinstance(status, Unset) and status != run.status:
        if run.status in FINAL_RUN_STATUSES:
            raise IllegalTransition(
                f"run {run.run_id!r} ended as {run.status!r} and cannot become {status!r}; start_run resumes it"
            )
        run.status, run.end_time = status, max(tx.now, run.start_time)
    if not isinstance(cause, Unset):
        run.cause = utf8_text(cause)
    if not isinstance(config, Unset):
        run.config = config
    tx.run(
        "set_run",
        key=row[0],
        status=run.status,
        end_time=run.end_time,
        now=tx.now,
        cause=run.cause,
        config=_config(run.config),
    )
    return get_run_by_id(tx, run_id)


def get_run_by_id(tx: Transaction, run_id: str) -> RunRecord:
    return run_from(_run_row(tx, run_id))


def query_runs(
    tx: Transaction,
    *,
    run_id_in: Sequence[str] | None = None,
    status_in: Sequence[RunStatus] | None = None,
    kind_in: Sequence[str] | None = None,
    limit: int = -1,
    offset: int = 0,
    sort_by: str | None = "start_time",
    sort_order: SortOrder = "desc",
) -> PaginatedResult[RunRecord]:
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["u.key"], never_null=_NEVER_NULL)
    filters = Filters("and")
    filters.among("u.run_id", run_id_in)
    filters.among("u.status", status_in, get_args(RunStatus))
    filters.among("u.kind", kind_in)
    where, parameters = filters.sql(), filters.parameters
    tx.expect(None)  # perhaps many rows
    return page_of(tx, "select_runs", run_from, where, page, parameters, limit, offset)


def add_metrics(tx: Transaction, run_id: str, points: Sequence[MetricPoint]) -> None:
    tx.expect(len(points))
    key = run_key(tx, run_id)
    last: dict[tuple[int, str, str], MetricPoint] = {}
    for point in points:
        _check_point(point)
        last[point.iteration, point.stage, point.name] = point
    if last:  # sorted, so that two operations that write the same metrics do not deadlock
        tx.put_many("put_metric", [(key, *name, last[name].value, last[name].time) for name in sorted(last)])


def query_metrics(
    tx: Transaction,
    run_id: str,
    *,
    names: Sequence[str] | None = None,
    stage: str | None = None,
    iteration_from: int | None = None,
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[MetricPoint]:
    page = order_and_limit({}, None, "asc", limit, offset, tie=["m.iteration", "m.stage", "m.name"])
    filters = Filters("and")
    filters.equal("m.run", run_key(tx, run_id))
    filters.among("m.name", names)
    filters.equal("m.stage", stage)
    filters.between("m.iteration", iteration_from, None)
    where, parameters = filters.sql(), filters.parameters
    tx.expect(None)  # perhaps many rows
    return page_of(tx, "select_metrics", metric_from, where, page, parameters, limit, offset)


def cut_metrics(tx: Transaction, run_id: str, *, after_iteration: int) -> None:
    tx.expect(None)  # perhaps many rows
    tx.run("cut_metrics", run=run_key(tx, run_id), after_iteration=after_iteration)


def _run_row(tx: Transaction, run_id: str) -> Row:
    row = tx.one("get_run", run_id=run_id)
    if row is None:
        raise unknown_run(tx, run_id)
    return row


def _check_point(point: MetricPoint) -> None:
    """Raise ConfigError for a metric that no store takes."""
    check_id("the stage of a metric", point.stage)
    check_id("the name of a metric", point.name)
    check_time("the time of a metric", point.time)
    if not 0 <= point.iteration <= _HIGHEST_ITERATION:
        raise ConfigError(
            f"metric {point.name!r} is of iteration {point.iteration}; iterations are from 0 to {_HIGHEST_ITERATION:,}"
        )
    if point.value is not None and not math.isfinite(point.value):
        raise ConfigError(f"metric {point.name!r} has the value {point.value!r}, which JSON lacks; give None instead")


def _config(config: dict[str, Any]) -> str:
    return json_text(config, "the config of a run") if config else ""
