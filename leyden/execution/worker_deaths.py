"""End the attempts that a dead runner left in the store.

Usually one attempt, the culprit, ended the process. It fails as `runner_died`; the others end as `interrupted`, which
does not count against `max_attempts`. While the culprit is unknown, all are interrupted, and the strategy halves the
number of attempts in that runner's next process. Of 64 attempts the culprit is therefore alone after at most six
deaths. This module knows only the store. The rollout decides whether another attempt follows a failed one
(`RolloutConfig.retry_condition`).
"""

from __future__ import annotations

import asyncio
import contextlib

from leyden.errors import IllegalTransition, UnknownAttempt, UnknownRollout
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout


async def end_attempts(
    store: LightningStore, worker_name: str, reason: str, *, culprit: str | None, one_is_to_blame: bool
) -> int:
    """End every attempt that this worker has begun and not ended.

    reason: recorded with each attempt.
    culprit: the id of the attempt that ended the process; None if unknown.
    one_is_to_blame: whether one of the attempts in flight must have ended the process. If a single one was in flight,
        it is then the culprit.
    Return how many attempts were interrupted because any of them may be the culprit; 0 when the culprit is known.
    """
    rollouts = await store.query_rollouts(status_in=["preparing", "running"])
    begun = [rollout for rollout in rollouts if isinstance(rollout, AttemptedRollout)]
    left = [each for each in begun if each.attempt.worker_id == worker_name and not each.attempt.finished]
    if culprit is None and len(left) == 1 and one_is_to_blame:
        culprit = left[0].attempt.attempt_id

    async def end(rollout: AttemptedRollout) -> None:
        """End one attempt, as `runner_died` if it is the culprit, else as `interrupted`."""
        kind = "runner_died" if rollout.attempt.attempt_id == culprit else "interrupted"
        # The store or another process may have ended the attempt meanwhile, or the store has undone
        # the claim, because its client is gone.
        with contextlib.suppress(IllegalTransition, UnknownAttempt, UnknownRollout):
            await store.update_attempt(
                rollout.rollout_id,
                rollout.attempt.attempt_id,
                status="failed",
                metadata={"reason_kind": kind, "reason": reason},
            )

    await asyncio.gather(*(end(rollout) for rollout in left))
    return 0 if culprit is not None else len(left)
