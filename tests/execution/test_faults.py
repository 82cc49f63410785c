"""Runs whose runners, store or network fail in the middle: every rollout ends exactly once, none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import StoreError
from leyden.execution import ExecutionStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.inter_process import InterProcessExecutionStrategy
from leyden.store import SqliteLightningStore
from leyden.testing import audit_store
from tests.execution import agents
from tests.execution.family import runners
from tests.store.network import Network
from tests.store.ports import free_port
from tests.store.serving import StoreProcess

pytestmark = pytest.mark.faults

RETRIED = ly.RolloutConfig(max_attempts=100, retry_condition=["failed"])


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
        """Wait for so many more rounds that begin and end from now on."""
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("make_strategy", "seconds"), [(InterProcessExecutionStrategy, 60), (ClientServerExecutionStrategy, 20)]
)
async def test_a_runner_is_killed_every_second_while_two_hundred_rollouts_run(
    make_strategy: type[ExecutionStrategy], seconds: int
) -> None:
    stream, kills = Stream(200, RETRIED), 0
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(200):
        trainer = ly.Trainer(algorithm=stream.algorithm(), strategy=make_strategy(4), store=store)
        run = asyncio.create_task(trainer.afit(agents.wait_a_second, list(range(200))))
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            if alive := runners():
                random.choice(alive).kill()
                kills += 1
        stream.end()
        await run
        assert kills > seconds / 2
        assert runners() == []
        tries = [len(await store.query_attempts(rollout_id)) for rollout_id in stream.asked]
        assert max(tries) > 1, "none was hit"
        await check_each_succeeded_once(store, stream.asked)


@pytest.mark.timeout(180)
async def test_a_store_elsewhere_is_killed_and_started_again_in_the_middle_of_a_run(tmp_path: Path) -> None:
    stream = Stream(40)
    with StoreProcess(tmp_path / "store.db") as server:
        strategy = ClientServerExecutionStrategy(2, managed_store=False)
        trainer = ly.Trainer(algorithm=stream.algorithm(), strategy=strategy, store=server.url)
        async with asyncio.timeout(150):
            run = asyncio.create_task(trainer.afit(agents.nap, list(range(40))))
            for _ in range(3):
                await stream.more(2)
                await asyncio.sleep(random.random() * 0.1)  # somewhere in the work
                await asyncio.to_thread(server.kill)
                server.start()
            await stream.more(2)
            stream.end()
            await run
        assert await asyncio.to_thread(server.stop) == 0
    assert runners() == []
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        await check_each_succeeded_once(store, stream.asked, attempts=1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["broken", "silent"])
async def test_the_network_between_runners_and_store_is_away_for_ten_seconds(how: str) -> None:
    stream, port = Stream(40), free_port()
    options: dict[str, Any] = {"token": "secret"}
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(150):
        algorithm = ClientServerExecutionStrategy(role="algorithm", server_port=port, **options)
        run = asyncio.create_task(
            ly.Trainer(algorithm=stream.algorithm(), strategy=algorithm, store=store).afit(agents.nap, list(range(40)))
        )
        network = Network(port)
        async with network.opened():
            elsewhere = ClientServerExecutionStrategy(2, role="runner", server_port=network.port, **options)
            working = asyncio.create_task(ly.Trainer(strategy=elsewhere).afit(agents.nap))
            await stream.more(2)
            if how == "broken":
                await network.cut()
            else:
                network.hold()
            await asyncio.sleep(10.0)
            rounds = stream.rounds
            network.mend()
            await stream.more(2)
            assert stream.rounds > rounds
            stream.end()
            await run
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                await working
        assert runners() == []
        await check_each_succeeded_once(store, stream.asked, attempts=1)
