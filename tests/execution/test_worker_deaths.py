"""What becomes of the attempts of a process that died."""

from __future__ import annotations

from typing import Any

import leyden as ly
from leyden.execution.worker_deaths import end_attempts


class UndoesAClaim(ly.InMemoryLightningStore):
    """A store that undoes a claim behind a query, as a server does when it finds that the client of the claim is gone."""

    async def query_rollouts(self, **filters: Any) -> Any:
        found = await super().query_rollouts(**filters)
        await self.undo_claim("claim")
        return found


async def lose(store: ly.LightningStore, worker: str, *, one_is_to_blame: bool = True) -> int:
    return await end_attempts(store, worker, "it died", culprit=None, one_is_to_blame=one_is_to_blame)


async def test_attempts_that_died_together_are_interrupted_however_often() -> None:
    async with ly.InMemoryLightningStore() as store:
        rollouts = [await store.enqueue_rollout(task) for task in ("poison", "beside")]
        for death in range(20):
            await store.dequeue_many_rollouts(limit=2, worker_id=f"worker-{death % 3}")
            assert await lose(store, f"worker-{death % 3}") == 2
        for rollout in rollouts:
            assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"
            assert all(attempt.interrupted for attempt in await store.query_attempts(rollout.rollout_id))


async def test_a_single_attempt_is_the_culprit_unless_the_culprit_may_have_ended_before() -> None:
    async with ly.InMemoryLightningStore() as store:
        rollout = await store.enqueue_rollout("task")
        await store.dequeue_rollout("worker")
        assert await lose(store, "worker", one_is_to_blame=False) == 1
        (attempt,) = await store.query_attempts(rollout.rollout_id)
        assert attempt.interrupted
        await store.dequeue_rollout("worker")
        assert await lose(store, "worker") == 0
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "failed"


async def test_an_attempt_whose_claim_is_undone_meanwhile_does_not_end_the_run() -> None:
    async with UndoesAClaim() as store:
        rollout = await store.enqueue_rollout("task")
        assert await store.dequeue_rollout("worker", claim_id="claim")
        await lose(store, "worker")
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "queuing"
