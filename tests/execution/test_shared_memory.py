"""The strategy's two bundles: whichever ends or fails, the other side is told, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.execution import SharedMemoryExecutionStrategy
from leyden.execution.agent_loop import AgentLoop
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.utils.latch import Latch


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


def left_running() -> list[str]:
    """What runs on the loop of the agents."""
    return [task.get_name() for task in asyncio.all_tasks(AgentLoop.of_this_process().loop)]


async def until_told(store: LightningStore, worker_id: int, event: Latch) -> None:
    await event.wait_async()


async def test_runners_are_told_to_stop_when_the_algorithm_is_done(store: InMemoryLightningStore) -> None:
    workers: list[int] = []

    async def algorithm(store: LightningStore, event: Latch) -> None:
        await asyncio.sleep(0.05)

    async def runner(store: LightningStore, worker_id: int, event: Latch) -> None:
        workers.append(worker_id)
        await event.wait_async()

    await SharedMemoryExecutionStrategy(n_runners=3).execute(algorithm, runner, store)
    assert sorted(workers) == [0, 1, 2]
    assert left_running() == []


async def test_all_runners_share_one_loop_that_is_not_the_algorithms(store: InMemoryLightningStore) -> None:
    loops: set[int] = set()

    async def algorithm(store: LightningStore, event: Latch) -> None:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.05)

    async def runner(store: LightningStore, worker_id: int, event: Latch) -> None:
        loops.add(id(asyncio.get_running_loop()))
        await event.wait_async()

    await SharedMemoryExecutionStrategy(n_runners=4).execute(algorithm, runner, store)
    assert len(loops) == 2


async def test_an_algorithm_that_fails_stops_the_runners_and_its_error_is_raised(store: InMemoryLightningStore) -> None:
    async def algorithm(store: LightningStore, event: Latch) -> None:
        raise ZeroDivisionError("the algorithm's own")

    with pytest.raises(ZeroDivisionError, match="the algorithm's own"):
        await SharedMemoryExecutionStrategy().execute(algorithm, until_told, store)
    assert left_running() == []


async def test_a_runner_that_fails_stops_the_algorithm_and_the_other_runners(store: InMemoryLightningStore) -> None:
    cancelled = False

    async def algorithm(store: LightningStore, event: Latch) -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def runner(store: LightningStore, worker_id: int, event: Latch) -> None:
        if worker_id == 1:
            raise OSError("the store is gone")
        await event.wait_async()

    with pytest.raises(OSError, match="the store is gone"):
        await asyncio.wait_for(SharedMemoryExecutionStrategy(n_runners=2).execute(algorithm, runner, store), 20)
    assert cancelled
    assert left_running() == []


async def test_cancelling_gives_runners_time_to_drain_and_then_cancels_them(store: InMemoryLightningStore) -> None:
    drained: list[int] = []
    started = threading.Event()

    async def algorithm(store: LightningStore, event: Latch) -> None:
        await asyncio.sleep(60)

    async def runner(store: LightningStore, worker_id: int, event: Latch) -> None:
        started.set()
        await event.wait_async()
        await asyncio.sleep(0.05 if worker_id == 0 else 60)
        drained.append(worker_id)

    strategy = SharedMemoryExecutionStrategy(n_runners=2, drain_seconds=0.5)
    work = asyncio.create_task(strategy.execute(algorithm, runner, store))
    await asyncio.to_thread(started.wait)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 20)
    assert drained == [0]
    assert left_running() == []


async def test_an_agent_that_blocks_the_loop_of_all_runners_is_named_and_the_others_go_on(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    reported = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.set()

    @ly.rollout
    async def careless(task: int) -> float:
        async def work() -> None:
            reported.wait(20)  # what a careless agent does: it waits without `await`

        await (asyncio.create_task(work()) if task == 0 else asyncio.sleep(0.1))
        return 1.0

    listener = Listener()
    logging.getLogger("leyden.runner.watchdog").addHandler(listener)
    try:
        trainer = ly.Trainer(algorithm="baseline", strategy=SharedMemoryExecutionStrategy(2), store=store)
        summary = await asyncio.wait_for(trainer.afit(careless, list(range(8))), 40)
    finally:
        logging.getLogger("leyden.runner.watchdog").removeHandler(listener)
    assert summary.rollouts["succeeded"] == 8
    (culprit,) = [rollout for rollout in await store.query_rollouts() if rollout.input == 0]
    assert f"careless' (rollout {culprit.rollout_id}" in caplog.text
    assert "reported.wait(20)" in caplog.text


def test_wrong_options_are_refused_with_their_value() -> None:
    with pytest.raises(ConfigError, match="n_runners is 0"):
        SharedMemoryExecutionStrategy(0)
    with pytest.raises(ConfigError, match="drain_seconds is -1"):
        SharedMemoryExecutionStrategy(drain_seconds=-1)
