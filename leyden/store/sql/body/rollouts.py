"""Rollouts: enqueuing, updating and reading them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from leyden._lib import ids
from leyden._lib.logs import Preview
from leyden.errors import ConfigError, IllegalTransition
from leyden.store.sql.body.attempts import move_rollout, new_attempt, started
from leyden.store.sql.body.lookup import known_version, rollout_key, rollout_row, run_key
from leyden.store.sql.rows import (
    ATTEMPT,
    INPUT,
    METADATA,
    MODE,
    PRIORITY,
    RESOURCES_ID,
    RESOURCES_VERSION,
    ROLLOUT_ID,
    SEQ,
    STATUS,
    attempt_from,
    config_of,
    rollout_alone,
    rollout_from,
)
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import (
    ROLLOUT_FINISHED,
    UNSET,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Unset,
    check_rollout_transition,
    read_replay_from,
)
from leyden.types.checks import check_id, check_metadata, json_text

logger = logging.getLogger(__name__)


def start_rollout(
    tx: Transaction,
    input: TaskInput,
    mode: RolloutMode | None = None,
    resources_id: str | None = None,
    config: RolloutConfig | None = None,
    metadata: dict[str, Any] | None = None,
    worker_id: str | None = None,
    *,
    priority: int = 0,
    rollout_id: str | None = None,
    attempt_id: str | None = None,
    run_id: str | Unset | None = UNSET,
    group_id: str | None = None,
    arm: str | None = None,
) -> AttemptedRollout:
    """Insert a rollout with its first attempt, which the caller runs. It is never in the queue.

    If both ids are given and stored, return the stored rollout. Raise ConfigError if the rollout is stored without the
    attempt.
    """
    if rollout_id is not None and tx.one("get_rollout_key", rollout_id=rollout_id) is not None:
        if attempt_id is not None and (again := started(tx, rollout_id, attempt_id)):
            return again
        raise ConfigError(f"rollout {rollout_id!r} is already in {tx.store_url}; leave the id out, or choose another")
    request = EnqueueRolloutRequest.model_construct(
        input=input,
        mode=mode,
        resources_id=resources_id,
        config=config,
        metadata=metadata,
        priority=priority,
        rollout_id=rollout_id,
        run_id=None if isinstance(run_id, Unset) else run_id,
        group_id=group_id,
        arm=arm,
    )
    used = known_version(tx, resources_id)
    run = None if request.run_id is None else run_key(tx, request.run_id)
    row = insert_rollout(tx, request, used, run, status="preparing")
    return new_attempt(tx, row, sequence_id=1, worker_id=worker_id, attempt_id=attempt_id)


def enqueue_many_rollouts(tx: Transaction, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
    """Enqueue rollouts and return them in the order given. A rollout that is stored already is returned as it is.

    Each id of resources and of a run is looked up once, because most batches have one of each.
    """
    tx.expect(len(rollouts))
    given_ids = [request.rollout_id for request in rollouts if request.rollout_id is not None]
    tx.lock(given_ids)
    tx.ahead("get_rollout", [{"rollout_id": rollout_id} for rollout_id in given_ids])
    answer: list[Rollout] = []
    resources: dict[str | None, tuple[str | None, int | None]] = {}
    runs: dict[str, int] = {}
    for request in rollouts:
        stored = None if request.rollout_id is None else tx.one("get_rollout", rollout_id=request.rollout_id)
        if stored is not None:
            rollout = rollout_from(stored)
        else:
            given = request.resources_id
            if given not in resources:
                resources[given] = known_version(tx, given)
            run_id = request.run_id
            if run_id is not None and run_id not in runs:
                runs[run_id] = run_key(tx, run_id)
            run = None if run_id is None else runs[run_id]
            row = insert_rollout(tx, request, resources[given], run, status="queuing")
            rollout = rollout_alone(row)
            tx.date(rollout)
            tx.claimable += 1
        if request.pin is not None:
            tx.run("pin_rollout", name=request.pin, rollout_id=rollout.rollout_id)
        answer.append(rollout)
    if logger.isEnabledFor(logging.DEBUG):
        for one in answer:
            logger.debug(
                "rollout %s: enqueued, %s, %s, task %s", one.rollout_id, one.mode, one.resources_id, Preview(one.input)
            )
    return answer


def get_rollout_by_id(tx: Transaction, rollout_id: str) -> Rollout:
    return rollout_from(rollout_row(tx, rollout_id))


def update_rollout(
    tx: Transaction,
    rollout_id: str,
    input: TaskInput | Unset = UNSET,
    mode: RolloutMode | Unset | None = UNSET,
    resources_id: str | Unset | None = UNSET,
    status: RolloutStatus | Unset = UNSET,
    config: RolloutConfig | Unset = UNSET,
    metadata: dict[str, Any] | Unset = UNSET,
    *,
    priority: int | Unset = UNSET,
) -> Rollout:
    row = rollout_row(tx, rollout_id)
    if not isinstance(priority, Unset):
        _check_priority(priority)
    if not isinstance(status, Unset):
        check_rollout_transition(rollout_id, row[STATUS], status)
        _check_worked_on(row, status)
        move_rollout(tx, row, status)
    if not isinstance(metadata, Unset):
        check_metadata(metadata or {})
    version = row[RESOURCES_VERSION]
    if not isinstance(resources_id, Unset):
        version = None if resources_id is None else known_version(tx, resources_id)[1]
    given = (input, mode, resources_id, config, metadata, priority)
    if not all(isinstance(value, Unset) for value in given):
        tx.run(
            "set_rollout",
            seq=row[SEQ],
            input=row[INPUT] if isinstance(input, Unset) else json_text(input, "the input of a rollout"),
            mode=row[MODE] if isinstance(mode, Unset) else mode,
            priority=row[PRIORITY] if isinstance(priority, Unset) else priority,
            resources_id=row[RESOURCES_ID] if isinstance(resources_id, Unset) else resources_id,
            resources_version=version,
            metadata=row[METADATA] if isinstance(metadata, Unset) else json_text(metadata, "the metadata of a rollout"),
            **_config_columns(config_of(row) if isinstance(config, Unset) else config),
        )
    if not isinstance(metadata, Unset):
        tx.run("set_replay_from", seq=row[SEQ], replay_from=_replayed_rollout(metadata))
    return get_rollout_by_id(tx, rollout_id)


def finished_rollouts(tx: Transaction, rollout_ids: Sequence[str]) -> list[Rollout]:
    """Return the finished rollouts, in the order given, each once. Raise UnknownRollout for the first unknown id."""
    tx.expect(len(rollout_ids))
    answer: list[Rollout] = []
    tx.ahead("get_rollout_key", [{"rollout_id": rollout_id} for rollout_id in dict.fromkeys(rollout_ids)])
    for rollout_id in dict.fromkeys(rollout_ids):
        if rollout_key(tx, rollout_id)[2] in ROLLOUT_FINISHED:
            answer.append(get_rollout_by_id(tx, rollout_id))
    return answer


def _check_worked_on(row: Row, status: RolloutStatus) -> None:
    """Refuse `preparing` and `running` without an attempt under way, because nothing would end such a rollout."""
    if status in ("preparing", "running") and status != row[STATUS]:
        latest = None if row[ATTEMPT] is None else attempt_from(row[ROLLOUT_ID], row[ATTEMPT:])
        if latest is None or latest.finished:
            raise IllegalTransition(
                f"rollout {row[ROLLOUT_ID]!r} is {row[STATUS]!r} and has no attempt under way, so it cannot become {status!r}; "
                "claim it, or call start_attempt"
            )


def insert_rollout(
    tx: Transaction,
    request: EnqueueRolloutRequest,
    resources: tuple[str | None, int | None],
    run: int | None,
    *,
    status: RolloutStatus,
) -> Row:
    """Insert a new rollout and return it as a row of `select_rollouts` without an attempt.

    The row of a queued rollout has no SEQ and perhaps no START (`tx.date`), because reading them would cost a round
    trip to the database.

    resources: the id and the version of its resources; two None for none.
    run: the key of `request.run_id`; None for no run.
    """
    _check_priority(request.priority)
    check_id("rollout_id", request.rollout_id)
    check_id("group_id", request.group_id)
    check_id("arm", request.arm)
    check_metadata(request.metadata or {})
    resources_id, version = resources
    rollout_id = request.rollout_id or ids.rollout_id()
    task = json_text(request.input, "the input of a rollout")
    metadata = json_text(request.metadata, "the metadata of a rollout") if request.metadata else ""
    config = _config_columns(request.config)
    attempts = 0 if status == "queuing" else 1
    insert, start_time = (tx.insert, tx.now) if attempts else (tx.run, tx.clock)
    seq = insert(
        "insert_rollout",
        rollout_id=rollout_id,
        status=status,
        mode=request.mode,
        priority=request.priority,
        resources_id=resources_id,
        input=task,
        metadata=metadata,
        start_time=start_time,
        attempts=attempts,
        run=run,
        group_id=request.group_id,
        arm=request.arm,
        resources_version=version,
        replay_from=_replayed_rollout(request.metadata),
        **config,
    )
    tx.tally({"enqueued": 1})
    return (
        *(seq, rollout_id, status, request.mode, resources_id, task, config["config"], metadata, start_time, None),
        *(attempts, 0, request.priority, request.run_id, request.group_id, request.arm, version),
    )


def _replayed_rollout(metadata: Mapping[str, Any] | None) -> str | None:
    """Return the id of the rollout that a rollout with this metadata repeats; None without a possible id."""
    if not metadata:
        return None
    with contextlib.suppress(ConfigError):
        source = read_replay_from(metadata)
        if source is not None:
            check_id("rollout_id", source.rollout_id)
            return source.rollout_id
    return None


def _check_priority(priority: int) -> None:
    if abs(priority) > 1000:
        raise ConfigError(f"priority must be from -1000 to 1000, got {priority}; 0 is the usual one")


def _config_columns(config: RolloutConfig | None) -> dict[str, Any]:
    if config is None:
        return {"config": "", "timeout_seconds": None, "unresponsive_seconds": None}
    return {
        "config": config.model_dump_json(exclude_defaults=True),
        "timeout_seconds": config.timeout_seconds,
        "unresponsive_seconds": config.unresponsive_seconds,
    }
