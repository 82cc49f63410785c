"""A monitor and real workers: processes that stop, a network that is slow, a runner that is asked to pause."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.errors import ConfigError
from leyden.monitor import DEFAULT_RULES, AlertRule, Monitor, PauseClaiming, RestartWorker, health_of
from leyden.monitor.monitor import Watch
from leyden.monitor.system import SystemProbe
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreClient, LightningStoreServer
from leyden.types import Rollout, RolloutConfig
from tests.execution.agents import double
from tests.monitor.agents import stop_once
from tests.monitor.hearing import SOON, Heard

ROOT = Path(__file__).parent.parent.parent
RULES = {rule.name: rule for rule in DEFAULT_RULES}
RUNNER = """
import asyncio, sys
import leyden as ly
from tests.execution.agents import double

async def main():
    async with ly.LightningStoreClient(sys.argv[1]) as store:
        runner = ly.LitAgentRunner(heartbeat_interval=0.3)
        runner.init(double)
        runner.init_worker(0, store, worker_name="far")
        await runner.iter()

asyncio.run(main())
"""


async def heartbeats(store: LightningStore, worker_id: str, count: int) -> None:
    """Return when a worker has sent `count` more heartbeats."""
    async with asyncio.timeout(SOON):
        last = (await store.get_worker_by_id(worker_id)).last_heartbeat_time
        while count:
            await asyncio.sleep(0.01)
            heard = (await store.get_worker_by_id(worker_id)).last_heartbeat_time
            if heard != last:
                last, count = heard, count - 1


async def finished(store: LightningStore, rollout: Rollout) -> str:
    (found,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON)
    return found.status


@asynccontextmanager
async def working(store: LightningStore, worker_id: str = "w") -> AsyncIterator[ly.Runner]:
    """A runner at work in this process."""
    runner, stop = ly.LitAgentRunner(heartbeat_interval=0.05), Latch()
    runner.init(double)
    runner.init_worker(0, store, worker_name=worker_id)
    work = asyncio.create_task(runner.iter(event=stop))
    try:
        yield runner
    finally:
        stop.set()
        await work
        runner.teardown_worker(0)
        runner.teardown()


async def test_a_process_that_stands_still_is_seen_and_so_is_that_it_goes_on() -> None:
    heard = Heard()
    monitor = Monitor(rules=[RULES["worker_lost"]], sinks=[heard], interval_seconds=0.1)
    async with InMemoryLightningStore() as store, LightningStoreServer(store) as server:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", RUNNER, server.endpoint, cwd=ROOT)
        try:
            assert await finished(store, await store.enqueue_rollout(1)) == "succeeded"
            await heartbeats(store, "far", 2)
            async with monitor.watch(store):
                process.send_signal(signal.SIGSTOP)
                raised = await heard.raised("worker_lost", "far")
                assert raised.value > raised.limit == 3.0
                worker = await store.get_worker_by_id("far")
                assert worker.last_heartbeat_time is not None
                assert health_of(worker, worker.last_heartbeat_time + 1.0) == "unhealthy"
                assert health_of(worker, worker.last_heartbeat_time + 0.8) == "healthy"
                process.send_signal(signal.SIGCONT)
                resolved = await heard.resolved("worker_lost", "far")
                assert resolved.until is not None
                process.kill()  # and one that is gone says no farewell
                await heard.raised("worker_lost", "far")
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class SlowWay:
    """A way to a server on which every piece of data takes `seconds`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.seconds = 0.0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """The URL at which clients reach the server."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, to_server), (there, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(self.seconds)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


async def test_a_network_that_is_slow_is_seen_as_latency_until_it_is_quick_again() -> None:
    heard = Heard()
    rule = RULES["latency"]
    assert isinstance(rule, AlertRule)
    monitor = Monitor(rules=[replace(rule, window_seconds=5.0)], sinks=[heard], interval_seconds=0.1)
    async with InMemoryLightningStore() as store, LightningStoreServer(store) as server:
        way = SlowWay(int(server.endpoint.rpartition(":")[2]))
        way.seconds = 0.55
        async with way.opened() as url, LightningStoreClient(url) as client, monitor.watch(store), working(client):
            raised = await heard.raised("latency", "w")
            assert 1.0 == raised.limit < raised.value
            way.seconds = 0.0
            await heard.resolved("latency", "w")
            assert {alert.worker_id for alert in heard.alerts} == {"w"}  # never of the store itself
            series = [s.value for s in await store.query_samples(name="store_latency_seconds", worker_id="w")]
            assert max(series) > 1.0 > min(series)


async def test_a_runner_that_was_paused_before_it_began_says_why_it_claims_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A monitor that was killed left it so, and no other one watches the run that resumes."""

    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    async with InMemoryLightningStore() as store, asyncio.timeout(SOON):
        rollout = await store.enqueue_rollout(1)
        await store.update_worker("Worker-0", {})
        await store.pause_worker("Worker-0")
        stop = Latch()
        async with ly.LitAgentRunner(heartbeat_interval=0.05).run_context(agent=agent, store=store) as runner:
            work = asyncio.create_task(runner.iter(event=stop))
            while "Worker-0 was asked to pause: it claims nothing" not in caplog.text:  # noqa: ASYNC110 -- it is in a log
                await asyncio.sleep(0.02)
            await store.pause_worker("Worker-0", paused=False)
            while "Worker-0 claims again" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])
            stop.set()
            await work


async def test_a_runner_that_is_asked_to_pause_claims_nothing_until_it_is_asked_to_go_on() -> None:
    heard = Heard()
    rule = AlertRule(name="low", metric="disk_free_percent", comparison="<", threshold=200.0)
    monitor = Monitor(rules=[rule], sinks=[heard], actions={"low": [PauseClaiming()]}, interval_seconds=0.05)
    async with InMemoryLightningStore() as store, working(store):
        assert await finished(store, await store.enqueue_rollout(1)) == "succeeded"
        async with monitor.watch(store):
            await heard.raised("low", None)
            await heartbeats(store, "w", 3)
            mine = await store.enqueue_rollout(2)
            await heartbeats(store, "w", 3)
            assert (await store.get_rollout_by_id(mine.rollout_id)).status == "queuing"
            others = await store.dequeue_rollout("another")  # the news of it is not lost on a worker that pauses
            assert others is not None
            await store.update_attempt(others.rollout_id, "latest", status="succeeded")
            waiting = await store.enqueue_rollout(3)
        assert await finished(store, waiting) == "succeeded"  # the monitor has ended, and holds nobody any more


async def test_a_run_keeps_its_series_and_says_farewell(tmp_path: Path) -> None:
    heard = Heard()
    async with InMemoryLightningStore() as store:
        monitor = Monitor(sinks=[heard], interval_seconds=0.05)
        await ly.Trainer(algorithm="baseline", store=store, n_runners=2, monitor=monitor).afit(double, list(range(50)))
        workers = await store.query_workers()
        ended = [(worker.heartbeat_stats or {}).get("attempts_ended") for worker in workers]
        assert sum(n for n in ended if n is not None) == 50
        assert {health_of(worker, 1e12) for worker in workers} == {"ended"}
        assert await store.query_samples(name="memory_percent")
        assert not any(alert.rule == "worker_lost" for alert in heard.alerts)


async def test_a_run_is_watched_only_when_it_is_asked_for() -> None:
    for option, watched in ((False, False), (True, True), ("leyden.monitor.Monitor", True)):
        async with InMemoryLightningStore() as store:
            await ly.Trainer(algorithm="baseline", store=store, monitor=option).afit(double, [1])
            assert bool(await store.query_samples()) is watched
    wrong: Any = 7
    with pytest.raises(ConfigError, match="monitor=7 is no component"):
        ly.Trainer(monitor=wrong)


@pytest.mark.faults
@pytest.mark.merge
async def test_a_runners_process_that_stands_still_is_replaced_and_its_work_is_done_again(tmp_path: Path) -> None:
    monitor = Monitor(rules=[RULES["worker_lost"]], actions={"worker_lost": [RestartWorker()]}, interval_seconds=0.1)
    marker = tmp_path / "marker"

    @ly.algo
    async def ask(*, store: LightningStore, train_dataset: list[str]) -> None:
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        rollout = await store.enqueue_rollout(train_dataset[0], config=config)
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    async with InMemoryLightningStore() as store:
        trainer = ly.Trainer(
            algorithm=ask,
            strategy="ipc",
            store=store,
            monitor=monitor,
            runner=ly.LitAgentRunner(heartbeat_interval=0.3),
        )
        async with asyncio.timeout(50):
            await trainer.afit(stop_once, [str(marker)])
        (rollout,) = await store.query_rollouts()
        first, *_, last = await store.query_attempts(rollout.rollout_id)
        assert (rollout.status, first.status, last.status) == ("succeeded", "failed", "succeeded")
        assert "SIGKILL" in first.metadata["reason"]
    pid = int(marker.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_is_not_ours_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    rule = AlertRule(name="hot", metric="process_cpu_percent", comparison=">", threshold=0.0, window_seconds=0.0)
    monitor = Monitor(rules=[rule], sinks=(), actions={"hot": [RestartWorker()]}, interval_seconds=1e6)
    async with InMemoryLightningStore() as store:
        mine = SystemProbe().read() | {"process_cpu_percent": 50.0}
        await store.update_worker("this-process", mine)
        await store.update_worker("first-process", mine | {"pid": 1})
        await store.update_worker("elsewhere", mine | {"host": "elsewhere"})
        await store.update_worker("says-little", {"process_cpu_percent": 50.0})
        await Watch(monitor, store).check()
        for worker in await store.query_workers():
            assert f"{worker.worker_id} cannot be restarted from here" in caplog.text
