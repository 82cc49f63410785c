"""A rollout that is cancelled in the store ends its agent within a second, whatever the agent is."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.errors import StoreError
from leyden.gateway import UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream

openai = pytest.importorskip("openai")

SOON = 15.0
"""Seconds, of the sixty that an agent sleeps; less than one on an idle machine."""


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


@contextlib.asynccontextmanager
async def running(store: ly.LightningStore, agent: Any, **options: Any) -> AsyncIterator[None]:
    """Run an agent on the store's queue during the block."""
    runner, stop = ly.LitAgentRunner[Any](), Latch()
    with runner.run_context(agent=agent, store=store, **options):
        work = asyncio.create_task(runner.iter(stop))
        try:
            yield
        finally:
            stop.set()
            await work


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition`, which may be async, returns something true."""
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.005)


class Scene:
    """What an agent did, and when, as seen from the test."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.ended_at = 0.0

    def end(self) -> None:
        self.ended_at = time.monotonic()
        self.ended.set()


async def cancel(store: ly.LightningStore, rollout_id: str) -> tuple[ly.Attempt, float]:
    """Cancel a rollout; return its attempt once it has ended, and after how many seconds that was."""
    started = time.monotonic()
    await store.update_rollout(rollout_id, status="cancelled")

    async def has_ended() -> bool:
        return (await store.query_attempts(rollout_id))[-1].finished

    await until(has_ended)
    seconds = time.monotonic() - started
    return (await store.query_attempts(rollout_id))[-1], seconds


def check(attempt: ly.Attempt, seconds: float) -> None:
    assert (attempt.status, attempt.metadata["reason_kind"]) == ("cancelled", "cancelled")
    assert attempt.metadata["reason"] == "its rollout was cancelled"
    assert seconds < SOON


async def test_an_async_agent_is_cancelled_and_its_siblings_go_on(store: InMemoryLightningStore) -> None:
    scene = Scene()

    @ly.rollout
    async def agent(task: str) -> float:
        if task == "sibling":
            scene.begun.set()
            await asyncio.sleep(1.5)
            return 1.0
        try:
            await asyncio.sleep(60)
            return 0.0
        finally:
            scene.end()

    rollout, sibling = await store.enqueue_rollout("slow"), await store.enqueue_rollout("sibling")
    async with running(store, agent):
        await asyncio.to_thread(scene.begun.wait, 10)
        attempt, seconds = await cancel(store, rollout.rollout_id)
        assert scene.ended.is_set()
        (done,) = await store.wait_for_rollouts(rollout_ids=[sibling.rollout_id], timeout=10)
    check(attempt, seconds)
    assert done.status == "succeeded"
    workers = await store.query_workers()
    assert [worker.status for worker in workers] == ["idle"]


async def test_a_sync_agent_is_left_to_itself_and_its_next_model_call_is_refused(
    store: InMemoryLightningStore,
) -> None:
    scene = Scene()
    statuses: list[int] = []

    @ly.llm_rollout
    def agent(task: str, llm: ly.LLM) -> float:
        client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0)
        try:
            while True:
                client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "go on"}])
                scene.begun.set()
                time.sleep(0.05)
        except openai.APIStatusError as error:
            statuses.append(error.status_code)
            raise
        finally:
            scene.end()

    async with FakeUpstream() as upstream:
        proxy = ly.LLMProxy(model_list=[UpstreamModel("fake", upstream.endpoint)], store=store)
        await proxy.start()
        try:
            resources = await store.add_resources({"main_llm": proxy.as_resource()})
            rollout = await store.enqueue_rollout("slow", resources_id=resources.resources_id)
            async with running(store, agent, recorders=[proxy]):
                await asyncio.to_thread(scene.begun.wait, 20)
                started = time.monotonic()
                attempt, seconds = await cancel(store, rollout.rollout_id)
                assert await asyncio.to_thread(scene.ended.wait, 10)
        finally:
            await proxy.stop()
    check(attempt, seconds)
    assert statuses == [410], "which is no failure of the agent"
    assert scene.ended_at - started < SOON


async def test_a_program_is_ended_with_what_it_started(store: InMemoryLightningStore, tmp_path: Path) -> None:
    program = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
def stop(*_):
    open({str(tmp_path / "stopped")!r}, "w").close()
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
with open({str(tmp_path / "pids.part")!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(tmp_path / "pids.part")!r}, {str(tmp_path / "pids")!r})
time.sleep(60)
"""
    rollout = await store.enqueue_rollout("slow")
    async with running(store, ly.ProcessAgent([sys.executable, "-c", program])):
        await until((tmp_path / "pids").exists)
        attempt, seconds = await cancel(store, rollout.rollout_id)
    check(attempt, seconds)
    assert (tmp_path / "stopped").exists(), "it could clean up"
    assert not any(psutil.pid_exists(int(pid)) for pid in (tmp_path / "pids").read_text().split())


async def test_step_ends_too(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: str, rollout: ly.Rollout) -> float:
        await store.update_rollout(rollout.rollout_id, status="cancelled")
        await asyncio.sleep(60)
        return 0.0

    async with ly.LitAgentRunner[Any]().run_context(agent=agent, store=store) as runner:
        async with asyncio.timeout(SOON):
            assert (await runner.step("slow")).status == "cancelled"


async def test_a_rollout_that_is_cancelled_before_its_agent_begins_ends_it_too() -> None:
    class Cancelling(InMemoryLightningStore):
        async def dequeue_many_rollouts(self, **options: Any) -> Any:
            claimed = await super().dequeue_many_rollouts(**options)
            for rollout in claimed:
                await self.update_rollout(rollout.rollout_id, status="cancelled")
            return claimed

    @ly.rollout
    async def agent(task: str) -> float:
        await asyncio.sleep(60)
        return 0.0

    async with Cancelling() as store:
        rollout = await store.enqueue_rollout("slow")
        async with asyncio.timeout(10), running(store, agent):
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        assert attempt.status == "cancelled"


async def test_one_that_was_forgotten_is_ended_and_hides_no_other(store: InMemoryLightningStore) -> None:
    ended: list[str] = []
    begun = asyncio.Semaphore(0)

    @ly.rollout
    async def agent(task: str) -> float:
        begun.release()
        try:
            await asyncio.sleep(60)
            return 0.0
        finally:
            ended.append(task)

    forgotten, cancelled = await store.enqueue_rollout("forgotten"), await store.enqueue_rollout("cancelled")
    async with running(store, agent):
        for _ in range(2):
            await begun.acquire()
        await store.update_rollout(forgotten.rollout_id, status="cancelled")
        assert await store.prune(ly.Retention(max_rollouts=0)) == 1
        check(*await cancel(store, cancelled.rollout_id))
        await until(lambda: len(ended) == 2)


class Counting(InMemoryLightningStore):
    """Counts the questions about finished rollouts, and can be away."""

    looks = 0
    away = False

    async def wait_for_any_rollout(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Any:
        self.looks += 1
        if self.away:
            raise StoreError("it is away")
        return await super().wait_for_any_rollout(rollout_ids=rollout_ids, timeout=timeout)


async def test_the_store_is_asked_rarely_however_many_agents_run_or_wait() -> None:
    @ly.rollout
    async def agent(task: float) -> float:
        await asyncio.sleep(task)
        return 1.0

    async with Counting() as store, asyncio.timeout(30), running(store, agent):
        for seconds, n_rollouts, most in [(3.0, 64, 6), (0.001, 500, 12)]:
            store.looks, started = 0, time.monotonic()
            rollouts = [await store.enqueue_rollout(seconds) for _ in range(n_rollouts)]
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])
            assert store.looks <= most + 5 * (time.monotonic() - started - seconds)


async def test_a_store_that_was_away_is_asked_again() -> None:
    @ly.rollout
    async def agent(task: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    async with Counting() as store, asyncio.timeout(30):
        store.away = True
        rollout = await store.enqueue_rollout("slow")
        async with running(store, agent):
            await until(lambda: store.looks)
            store.away = False
            attempt, _ = await cancel(store, rollout.rollout_id)
    assert attempt.status == "cancelled"
