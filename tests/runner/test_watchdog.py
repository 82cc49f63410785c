"""An agent that blocks the event loop is named while it does, and its siblings do not pay for it."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

import leyden as ly
from leyden.runner.watchdog import InFlight, LagWatchdog
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreServer, Sweeper
from leyden.types import Attempt, RolloutConfig
from leyden.utils.latch import Latch


@pytest.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        if request.param == "memory":
            yield opened
            return
        async with LightningStoreServer(opened) as server, server.client() as client:
            yield client


RELEASED = threading.Event()
"""What the agent that blocks waits for."""


@ly.rollout
async def agent(task: str) -> float:
    """A `blocker` blocks until it is released; a `helper` of its own does so in a task; a `sibling` needs a moment."""
    if task == "blocker":
        hold()
    elif task == "helper":
        await asyncio.create_task(hold_later())
    else:
        await asyncio.sleep(1.0 if task == "brief sibling" else 0.01 if RELEASED.is_set() else 30.0)
    return 1.0


def hold() -> None:
    RELEASED.wait(20)


async def hold_later() -> None:
    hold()


@pytest.fixture(autouse=True)
def nothing_is_released() -> None:
    RELEASED.clear()


async def run(store: LightningStore, tasks: Sequence[str], config: RolloutConfig, *, until: Any) -> list[list[Attempt]]:
    """The attempts of each task. Runners on a loop of their own; what `until(rollout_ids)` waits for happens while it is blocked."""
    rollout_ids = [(await store.enqueue_rollout(task, config=config)).rollout_id for task in tasks]
    stop = Latch()

    async def work() -> None:
        async with ly.LitAgentRunner(concurrency=8).run_context(agent=agent, store=store) as runner:
            await runner.iter(event=stop)

    async with Sweeper(store), asyncio.timeout(30):
        working = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
        try:
            await until(rollout_ids)
        finally:
            RELEASED.set()
        await store.wait_for_rollouts(rollout_ids=rollout_ids)
        stop.set()
        await working
    return [list(await store.query_attempts(rollout_id)) for rollout_id in rollout_ids]


async def until_true(look: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again."""
    while not await look():  # noqa: ASYNC110 -- what is waited for is in a store
        await asyncio.sleep(0.02)


async def until_written(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait for a line of the log, by event."""
    loop, written = asyncio.get_running_loop(), asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                loop.call_soon_threadsafe(written.set)

    listener = Listener()
    logging.getLogger("leyden.runner.watchdog").addHandler(listener)
    try:
        if text not in caplog.text:
            await written.wait()
    finally:
        logging.getLogger("leyden.runner.watchdog").removeHandler(listener)


@pytest.mark.parametrize(("store", "task"), [("http", "blocker"), ("memory", "helper")], indirect=["store"])
async def test_who_blocks_is_named_with_the_stack_while_it_does(
    store: LightningStore, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    async def named(rollout_ids: list[str]) -> None:
        await until_written(caplog, "blocks the event loop")

        async def recorded() -> bool:
            found = await store.get_latest_attempt(rollout_ids[0])
            assert found is not None
            assert not found.finished
            return "blocked_event_loop" in found.metadata

        await until_true(recorded)

    ((attempt,),) = await run(store, [task], RolloutConfig(), until=named)
    assert f"agent 'agent' (rollout {attempt.rollout_id}, attempt {attempt.attempt_id}) blocks" in caplog.text
    assert "RELEASED.wait(20)" in caplog.text
    assert attempt.status == "succeeded"
    assert attempt.metadata["blocked_event_loop"]["seconds"] > 0
    assert "RELEASED.wait(20)" in attempt.metadata["blocked_event_loop"]["stack"]
    assert "the event loop goes on" in caplog.text


@pytest.mark.parametrize(
    ("store", "config"),
    [
        pytest.param("memory", RolloutConfig(timeout_seconds=3.0), id="timeout"),
        pytest.param("http", RolloutConfig(timeout_seconds=3.0), id="timeout, from elsewhere"),
        pytest.param("memory", RolloutConfig(unresponsive_seconds=3.0, retry_condition=["unresponsive"]), id="silence"),
    ],
    indirect=["store"],
)
async def test_siblings_whose_time_runs_out_meanwhile_are_queued_again_and_it_does_not_count(
    store: LightningStore, config: RolloutConfig
) -> None:
    async def both_requeued(rollout_ids: list[str]) -> None:
        async def all_are_over() -> bool:
            *siblings, culprit = [(await store.get_rollout_by_id(each)).status for each in rollout_ids]
            return siblings == ["requeuing", "requeuing"] and culprit == "failed"  # its time is over by its own fault

        await until_true(all_are_over)

    *siblings, culprit = await run(store, ["sibling", "sibling", "blocker"], config, until=both_requeued)
    for attempts in siblings:
        *interrupted, last = attempts
        assert [attempt.status for attempt in interrupted] == ["failed"]
        assert [attempt.interrupted for attempt in interrupted] == [True]
        assert f"attempt {culprit[0].attempt_id}) has blocked the event loop" in interrupted[0].metadata["reason"]
        assert last.status == "succeeded"  # though max_attempts is 1
    assert not culprit[0].interrupted
    assert "blocked_event_loop" in culprit[0].metadata


@pytest.mark.parametrize("store", ["http"], indirect=True)
async def test_a_sibling_that_has_time_goes_on_where_it_was(
    store: LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def named(rollout_ids: list[str]) -> None:
        await until_written(caplog, "blocks the event loop")

    config = RolloutConfig(timeout_seconds=60, unresponsive_seconds=60)
    attempts = await run(store, ["brief sibling", "blocker"], config, until=named)
    assert [[attempt.status for attempt in each] for each in attempts] == [["succeeded"], ["succeeded"]]


async def test_a_loop_that_is_only_busy_is_not_blocked_by_anybody(caplog: pytest.LogCaptureFixture) -> None:
    async def turn() -> None:
        deadline = time.monotonic() + 0.02
        while time.monotonic() < deadline:
            pass

    async def churn() -> None:
        async with InMemoryLightningStore() as store:
            with LagWatchdog.beside_this_loop() as watchdog:
                task = watchdog.start(asyncio.sleep(1.0), InFlight("busy", await store.start_rollout("busy"), store))
                while not task.done():
                    await asyncio.gather(*(turn() for _ in range(40)))

    await asyncio.to_thread(asyncio.run, churn())
    assert "blocks the event loop" not in caplog.text


async def test_an_attempt_that_has_ended_takes_no_room() -> None:
    async with InMemoryLightningStore() as store:
        with LagWatchdog.beside_this_loop() as watchdog:
            in_flight = InFlight("agent", await store.start_rollout("task"), store)
            kept = weakref.ref(in_flight)
            await watchdog.start(asyncio.sleep(0), in_flight)
            del in_flight
            await asyncio.sleep(0)  # until it is forgotten
            gc.collect()
            assert kept() is None


async def test_nothing_is_left_when_the_runners_have_ended() -> None:
    factory = asyncio.get_running_loop().get_task_factory()
    with LagWatchdog.beside_this_loop() as first, LagWatchdog.beside_this_loop() as second:
        assert first is second
        (thread,) = [each for each in threading.enumerate() if each.name == "leyden-watchdog"]
    assert asyncio.get_running_loop().get_task_factory() is factory
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
