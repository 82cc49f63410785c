"""End the attempts that a dead runner left in the store.

Usually one attempt ended the process. The others are interrupted, which does not count against
`max_attempts`. This module knows the store. The rollout decides whether another attempt follows a
failed one (`RolloutConfig.retry_condition`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeGuard

from leyden.errors import IllegalTransition, UnknownAttempt, UnknownRollout
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout, Rollout

_MOST_DEATHS = 10
"""An attempt of a rollout that has shared so many deaths is blamed for the next, even if not alone.

The strategy halves the attempts in a process after each such death, so of 64 attempts the culprit
is alone after six. Runners that take each other's rollouts could repeat this for ever; the limit
ends it.
"""
_SHARED_DEATH = "shared_runner_died"


async def end_attempts(
    store: LightningStore, worker_name: str, reason: str, *, culprit: str | None, one_is_to_blame: bool
) -> int:
    """End every attempt that this worker has begun and not ended.

    culprit: the attempt that ended the process; None if unknown.
    one_is_to_blame: the culprit is among the attempts that were in flight, so a single one is the culprit.
    Returns how many attempts were interrupted because any of them may be the culprit; 0 when the culprit is known.
    """
    rollouts = await store.query_rollouts(status_in=["preparing", "running"])
    left = [rollout for rollout in rollouts if _is_left_by(rollout, worker_name)]
    if culprit is not None:
        blamed = [rollout for rollout in left if rollout.attempt.attempt_id == culprit]
    elif len(left) == 1 and one_is_to_blame:
        blamed = left
    else:
        deaths = await asyncio.gather(*(_shared_deaths(store, rollout) for rollout in left))
        blamed = [rollout for rollout, count in zip(left, deaths, strict=True) if count >= _MOST_DEATHS]
    blamed_ids = {rollout.rollout_id for rollout in blamed}
    is_known = culprit is not None or bool(blamed)
    interrupted = {"reason_kind": "interrupted", "reason": reason, _SHARED_DEATH: not is_known}

    async def end(rollout: AttemptedRollout) -> None:
        metadata = {"reason_kind": "runner_died", "reason": reason} if rollout.rollout_id in blamed_ids else interrupted
        # Another process may have ended the attempt meanwhile, or the store has undone the claim of a client that is gone.
        with contextlib.suppress(IllegalTransition, UnknownAttempt, UnknownRollout):
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="failed", metadata=metadata
            )

    await asyncio.gather(*(end(rollout) for rollout in left))
    return 0 if is_known else len(left)


async def _shared_deaths(store: LightningStore, rollout: AttemptedRollout) -> int:
    """Return how many attempts of the rollout ended with a process whose culprit is unknown."""
    if rollout.attempt.sequence_id <= _MOST_DEATHS:
        return 0
    attempts = await store.query_attempts(rollout.rollout_id)
    return sum(bool(attempt.metadata.get(_SHARED_DEATH)) for attempt in attempts)


def _is_left_by(rollout: Rollout, worker_name: str) -> TypeGuard[AttemptedRollout]:
    return (
        isinstance(rollout, AttemptedRollout)
        and rollout.attempt.worker_id == worker_name
        and not rollout.attempt.finished
    )
