"""What a runner that died leaves in the store: attempts that nobody goes on with.

It knows the store. Whether another attempt follows is the policy of each rollout (`RolloutConfig.retry_condition`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeGuard

from leyden.errors import IllegalTransition, UnknownRollout
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout, Rollout

__all__ = ["fail_attempts"]


async def fail_attempts(store: LightningStore, worker_name: str, reason: str) -> None:
    """End, as failed, every attempt that this worker has begun and not ended."""
    rollouts = await store.query_rollouts(status_in=["preparing", "running"])
    metadata = {"reason_kind": "runner_died", "reason": reason}

    async def fail(rollout: AttemptedRollout) -> None:
        with contextlib.suppress(IllegalTransition, UnknownRollout):  # somebody else has ended it meanwhile
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="failed", metadata=metadata
            )

    await asyncio.gather(*(fail(rollout) for rollout in rollouts if _is_left_by(rollout, worker_name)))


def _is_left_by(rollout: Rollout, worker_name: str) -> TypeGuard[AttemptedRollout]:
    return (
        isinstance(rollout, AttemptedRollout)
        and rollout.attempt.worker_id == worker_name
        and not rollout.attempt.finished
    )
