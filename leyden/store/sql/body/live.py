"""Live rollouts: recorded after they were served, in any order and any number of times."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from leyden.errors import ConfigError
from leyden.store.sql.body.attempts import new_attempt, started, update_attempt
from leyden.store.sql.body.rollouts import insert_rollout
from leyden.store.sql.transaction import Transaction
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, LiveRollout, RolloutConfig
from leyden.types.checks import check_live_rollout, json_text

logger = logging.getLogger(__name__)


def record_live_rollouts(tx: Transaction, rollouts: Sequence[LiveRollout]) -> None:
    tx.expect(3 * len(rollouts))
    tx.lock(rollout.rollout_id for rollout in rollouts)
    for rollout in rollouts:
        _record(tx, rollout)


def _record(tx: Transaction, live: LiveRollout) -> None:
    """Record one report on a live rollout. The first report adds the rollout.

    A status ends the attempt once; later ones are ignored. Raise ConfigError if the rollout is in the store without
    this attempt.
    """
    check_live_rollout(live)
    if tx.one("get_rollout_key", rollout_id=live.rollout_id) is None:
        present = _begin(tx, live)
    elif (found := started(tx, live.rollout_id, live.attempt_id)) is None:
        raise ConfigError(
            f"rollout {live.rollout_id!r} is already in {tx.store_url} without attempt {live.attempt_id!r}; "
            "give each live rollout an id of its own"
        )
    else:
        present = found
    # The input and the metadata that the first report of the rollout lacked.
    input = live.input if present.input is None else present.input
    request_metadata = {**live.metadata, **present.metadata}
    if input != present.input or request_metadata != present.metadata:
        tx.run(
            "set_live_request",
            rollout_id=live.rollout_id,
            input=json_text(input, "the input of a rollout"),
            metadata=json_text(request_metadata, "the metadata of a rollout"),
        )
    if live.status is not None and not present.attempt.finished:
        metadata: dict[str, Any] = {} if live.seconds is None else {"served_seconds": live.seconds}
        if live.reason is not None:
            metadata["reason"] = live.reason
        update_attempt(tx, live.rollout_id, live.attempt_id, status=live.status, metadata=metadata)


def _begin(tx: Transaction, live: LiveRollout) -> AttemptedRollout:
    """Insert a live rollout with its only attempt. The queue never holds it, because it is running already."""
    request = EnqueueRolloutRequest.model_construct(
        input=live.input,
        mode="live",
        resources_id=live.resources_id,
        config=RolloutConfig(timeout_seconds=live.timeout_seconds),
        metadata={**live.metadata, "served_at": live.start_time},
        priority=0,
        rollout_id=live.rollout_id,
        run_id=None,
        group_id=None,
        arm=live.arm,
    )
    row = insert_rollout(tx, request, (live.resources_id, live.version), None, status="preparing")
    return new_attempt(tx, row, sequence_id=1, worker_id=None, attempt_id=live.attempt_id)
