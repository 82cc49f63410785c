"""A run that always has rollouts in flight, for tests that kill what does them, and how each of its rollouts must end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import leyden as ly
from leyden.testing import audit_store


class Stream:
    """An algorithm that keeps `width` rollouts in flight until it is told to end."""

    def __init__(self, width: int, config: ly.RolloutConfig | None = None) -> None:
        self.asked: list[str] = []
        self.rounds = 0
        self._width, self._config = width, config
        self._ended = False
        self._changed = asyncio.Condition()

    def algorithm(self) -> ly.Algorithm:
        @ly.algo
        async def ask(*, store: ly.LightningStore, train_dataset: Sequence[int]) -> None:
            lanes = [train_dataset[lane :: max(1, self._width // 20)] for lane in range(max(1, self._width // 20))]
            await asyncio.gather(*(self._keep_asking(store, lane) for lane in lanes))

        return ask

    async def more(self, rounds: int) -> None:
        """Wait for `rounds` more rounds that begin and end from now on."""
        goal = self.rounds + rounds + max(1, self._width // 20)  # what is under way has begun before
        async with self._changed:
            await self._changed.wait_for(lambda: self.rounds >= goal)

    def end(self) -> None:
        """Ask for no more."""
        self._ended = True

    async def _keep_asking(self, store: ly.LightningStore, tasks: Sequence[int]) -> None:
        while not self._ended:
            enqueued = [await store.enqueue_rollout(task, config=self._config) for task in tasks]
            ids = [rollout.rollout_id for rollout in enqueued]
            self.asked += ids
            ended = await store.wait_for_rollouts(rollout_ids=ids)
            assert len(ended) == len(ids)
            async with self._changed:
                self.rounds += 1
                self._changed.notify_all()


async def check_each_succeeded_once(store: ly.LightningStore, asked: list[str], *, attempts: int | None = None) -> None:
    """attempts: how many each rollout had; None: whatever there were, exactly one of them succeeded."""
    rollouts = await store.query_rollouts()
    assert Counter(rollout.rollout_id for rollout in rollouts) == Counter(asked)
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    for rollout in rollouts:
        made = await store.query_attempts(rollout.rollout_id)
        assert sum(attempt.status == "succeeded" for attempt in made) == 1, made
        assert attempts is None or len(made) == attempts, made
    assert await audit_store(store) == []
