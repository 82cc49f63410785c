"""The strategy's two bundles: whichever ends or fails, the other side is told, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.errors import ConfigError
from leyden.execution import SharedMemoryExecutionStrategy
from leyden.execution.agent_loop import AgentLoop
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.store.base import StoreCapabilities


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
    logging.getLogger("leyden.execution.runner.watchdog").addHandler(listener)
    try:
        trainer = ly.Trainer(algorithm="baseline", strategy=SharedMemoryExecutionStrategy(2), store=store)
        summary = await asyncio.wait_for(trainer.afit(careless, list(range(8))), 40)
    finally:
        logging.getLogger("leyden.execution.runner.watchdog").removeHandler(listener)
    assert summary.rollouts["succeeded"] == 8
    (culprit,) = [rollout for rollout in await store.query_rollouts() if rollout.input == 0]
    assert f"careless' (rollout {culprit.rollout_id}" in caplog.text
    assert re.search(r"at \S*test_shared_memory\.py:\d+ in work", caplog.text)


def test_wrong_options_are_refused_with_their_value() -> None:
    with pytest.raises(ConfigError, match="n_runners is 0"):
        SharedMemoryExecutionStrategy(0)
    with pytest.raises(ConfigError, match="drain_seconds is -1"):
        SharedMemoryExecutionStrategy(drain_seconds=-1)


# ---- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("main_thread", ["algorithm", "runner"])
async def test_the_option_says_which_of_the_two_runs_on_the_calling_thread(
    store: InMemoryLightningStore, main_thread: Any
) -> None:
    threads: dict[str, threading.Thread] = {}

    @ly.rollout
    async def agent(task: int) -> float:
        threads["runner"] = threading.current_thread()
        return 1.0

    @ly.algo
    async def ask(*, store: LightningStore, train_dataset: list[int]) -> None:
        threads["algorithm"] = threading.current_thread()
        rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])

    strategy = SharedMemoryExecutionStrategy(2, main_thread=main_thread)
    await ly.Trainer(algorithm=ask, strategy=strategy, store=store).afit(agent, [1, 2])
    here = {side for side, thread in threads.items() if thread is threading.current_thread()}
    assert here == {main_thread}


@pytest.mark.parametrize("managed", [True, False])
async def test_a_managed_store_that_is_not_safe_for_threads_is_called_on_one_loop(managed: bool) -> None:
    loops: set[int] = set()

    class OfOneThread(InMemoryLightningStore):
        @property
        def capabilities(self) -> StoreCapabilities:
            return {**super().capabilities, "thread_safe": False}

        async def dequeue_many_rollouts(self, **options: Any) -> Any:
            loops.add(id(asyncio.get_running_loop()))
            return await super().dequeue_many_rollouts(**options)

        async def enqueue_rollout(self, *args: Any, **options: Any) -> Any:
            loops.add(id(asyncio.get_running_loop()))
            return await super().enqueue_rollout(*args, **options)

    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    @ly.algo
    async def ask(*, store: LightningStore) -> None:
        assert isinstance(store, LightningStore)
        rollout = await store.enqueue_rollout(1)
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    strategy = SharedMemoryExecutionStrategy(managed_store=managed)
    async with OfOneThread() as store:
        summary = await ly.Trainer(algorithm=ask, strategy=strategy, store=store).afit(agent)
        assert summary.rollouts["succeeded"] == 1
    assert len(loops) == (1 if managed else 2)


@pytest.mark.parametrize("daemon", [True, False])
async def test_the_trainers_daemon_says_whether_the_program_may_end_before_a_sync_agent(daemon: bool) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        return float(threading.current_thread().daemon)

    trainer = ly.Trainer(algorithm="baseline", daemon=daemon, store="memory")
    await trainer.afit(agent, [1])
    assert trainer.store is not None
    (rollout,) = await trainer.store.query_rollouts()
    assert ly.find_final_reward(await trainer.store.query_spans(rollout.rollout_id)) == float(daemon)


def test_options_that_cannot_be_are_refused_and_the_environment_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"main_thread": "both"}, "main_thread is 'both'; possible: 'algorithm', 'runner'"),
        ({"managed_store": "yes"}, "managed_store is 'yes'"),
        ({"daemon": 1}, "daemon is 1"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            SharedMemoryExecutionStrategy(**options)
    assert SharedMemoryExecutionStrategy().managed_store
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    assert not SharedMemoryExecutionStrategy().managed_store
    assert SharedMemoryExecutionStrategy(managed_store=True).managed_store
