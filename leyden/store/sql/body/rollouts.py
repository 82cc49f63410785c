"""Rollouts: into the queue, out of it, and what is asked about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyden.errors import ConfigError
from leyden.store.sql.body.attempts import move_rollout, new_attempt
from leyden.store.sql.body.lookup import known_resources_id, rollout_key, rollout_row
from leyden.store.sql.pages import Filters, order_and_limit
from leyden.store.sql.rows import (
    INPUT,
    METADATA,
    MODE,
    RESOURCES_ID,
    SEQ,
    STATUS,
    config_of,
    rollout_alone,
    rollout_from,
    text_of,
)
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import (
    ROLLOUT_FINISHED,
    UNSET,
    AttemptedRollout,
    EnqueueRolloutRequest,
    FilterLogic,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    TaskInput,
    Unset,
    check_rollout_transition,
)
from leyden.utils import ids

__all__ = [
    "enqueue_many_rollouts",
    "finished_rollouts",
    "get_rollout_by_id",
    "query_rollouts",
    "start_rollout",
    "update_rollout",
]

_SORTABLE = {name: f"r.{name}" for name in ("rollout_id", "start_time", "end_time", "status", "mode", "resources_id")}


def start_rollout(
    tx: Transaction,
    input: TaskInput,
    mode: RolloutMode | None = None,
    resources_id: str | None = None,
    config: RolloutConfig | None = None,
    metadata: dict[str, Any] | None = None,
    worker_id: str | None = None,
    *,
    rollout_id: str | None = None,
) -> AttemptedRollout:
    if rollout_id is not None and tx.one("get_rollout_key", rollout_id=rollout_id) is not None:
        raise ConfigError(f"rollout {rollout_id!r} is already in {tx.store_url}; leave the id out, or choose another")
    request = EnqueueRolloutRequest.model_construct(
        input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata, rollout_id=rollout_id
    )
    row = _insert(tx, request, known_resources_id(tx, resources_id), status="preparing")
    return new_attempt(tx, row, sequence_id=1, worker_id=worker_id)


def enqueue_many_rollouts(tx: Transaction, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
    tx.expect(len(rollouts))
    answer: list[Rollout] = []
    for request in rollouts:
        if request.rollout_id is not None:
            present = tx.one("get_rollout", rollout_id=request.rollout_id)
            if present is not None:
                answer.append(rollout_from(present))
                continue
        answer.append(
            rollout_alone(_insert(tx, request, known_resources_id(tx, request.resources_id), status="queuing"))
        )
        tx.claimable += 1
    return answer


def get_rollout_by_id(tx: Transaction, rollout_id: str) -> Rollout:
    return rollout_from(rollout_row(tx, rollout_id))


def query_rollouts(
    tx: Transaction,
    *,
    status_in: Sequence[RolloutStatus] | None = None,
    rollout_id_in: Sequence[str] | None = None,
    rollout_id_contains: str | None = None,
    mode_in: Sequence[RolloutMode] | None = None,
    filter_logic: FilterLogic = "and",
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Rollout]:
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["r.seq"])
    filters = Filters(filter_logic)
    filters.among("r.status", status_in)
    filters.among("r.rollout_id", rollout_id_in)
    filters.contains("r.rollout_id", rollout_id_contains)
    filters.among("r.mode", mode_in)
    where = filters.sql()
    tx.expect(None)
    items = [rollout_from(row) for row in tx.page("select_rollouts", where + page, filters.parameters)]
    all_there = limit == -1 and offset == 0
    total = len(items) if all_there else tx.page("count_rollouts", where, filters.parameters)[0][0]
    return PaginatedResult(items, limit, offset, total)


def update_rollout(
    tx: Transaction,
    rollout_id: str,
    input: TaskInput | Unset = UNSET,
    mode: RolloutMode | Unset | None = UNSET,
    resources_id: str | Unset | None = UNSET,
    status: RolloutStatus | Unset = UNSET,
    config: RolloutConfig | Unset = UNSET,
    metadata: dict[str, Any] | Unset = UNSET,
) -> Rollout:
    row = rollout_row(tx, rollout_id)
    if not isinstance(status, Unset):
        check_rollout_transition(rollout_id, row[STATUS], status)
        move_rollout(tx, row, status)
    if not isinstance(resources_id, Unset) and resources_id is not None:
        known_resources_id(tx, resources_id)
    given = (input, mode, resources_id, config, metadata)
    if not all(isinstance(value, Unset) for value in given):
        tx.run(
            "set_rollout",
            seq=row[SEQ],
            input=row[INPUT] if isinstance(input, Unset) else text_of(input, "the input of a rollout"),
            mode=row[MODE] if isinstance(mode, Unset) else mode,
            resources_id=row[RESOURCES_ID] if isinstance(resources_id, Unset) else resources_id,
            metadata=row[METADATA] if isinstance(metadata, Unset) else text_of(metadata, "the metadata of a rollout"),
            **_config_columns(config_of(row) if isinstance(config, Unset) else config),
        )
    return get_rollout_by_id(tx, rollout_id)


def finished_rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Those of the rollouts that are finished, in the order given. Raises UnknownRollout, naming the first."""
    tx.expect(len(rollout_ids))
    answer: list[Rollout] = []
    for rollout_id in dict.fromkeys(rollout_ids):
        if rollout_key(tx, rollout_id)[2] in ROLLOUT_FINISHED:
            answer.append(get_rollout_by_id(tx, rollout_id))
    return answer


def _insert(tx: Transaction, request: EnqueueRolloutRequest, resources_id: str | None, *, status: RolloutStatus) -> Row:
    """A new rollout, as a row of `select_rollouts` without an attempt."""
    rollout_id = request.rollout_id or ids.rollout_id()
    task = text_of(request.input, "the input of a rollout")
    metadata = text_of(request.metadata, "the metadata of a rollout") if request.metadata else ""
    config = _config_columns(request.config)
    attempts = 0 if status == "queuing" else 1
    seq = tx.insert(
        "insert_rollout",
        rollout_id=rollout_id,
        status=status,
        mode=request.mode,
        resources_id=resources_id,
        input=task,
        metadata=metadata,
        start_time=tx.now,
        attempts=attempts,
        **config,
    )
    return (
        *(seq, rollout_id, status, request.mode, resources_id, task, config["config"], metadata, tx.now, None),
        *(attempts, 0),
    )


def _config_columns(config: RolloutConfig | None) -> dict[str, Any]:
    if config is None:
        return {"config": "", "timeout_seconds": None, "unresponsive_seconds": None}
    return {
        "config": config.model_dump_json(exclude_defaults=True),
        "timeout_seconds": config.timeout_seconds,
        "unresponsive_seconds": config.unresponsive_seconds,
    }
