"""A server that is killed and started again in the middle of a run: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from leyden.errors import StoreError
from leyden.store import LightningStoreClient, SqliteLightningStore
from leyden.types import Span
from tests.attack.harness import sizes
from tests.store.ports import free_port
from tests.store.serving import StoreProcess


class Done:
    """The rollouts that workers have done, and whoever waits for more of them."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._more = asyncio.Condition()

    async def add(self, rollout_id: str) -> None:
        async with self._more:
            self.ids.append(rollout_id)
            self._more.notify_all()

    async def reach(self, count: int) -> None:
        async with self._more:
            await self._more.wait_for(lambda: len(self.ids) >= count)


async def work(store: LightningStoreClient, worker_id: str, done: Done) -> None:
    """One worker: claim, add spans, report, until nothing more comes."""
    while rollout := await store.dequeue_rollout(worker_id, timeout_seconds=0.5):
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        spans = [
            Span(**ids, sequence_id=0, trace_id="t", span_id=f"{ids['attempt_id']}-{k}", name="step") for k in range(3)
        ]
        await store.add_many_spans(spans)
        await store.update_attempt(**ids, status="succeeded")
        await done.add(rollout.rollout_id)


async def run_with_kills(tmp_path: Path, *, rollouts: int, kills: int) -> None:
    chance = random.Random(rollouts)
    done = Done()
    with StoreProcess(tmp_path / "store.db") as server:
        async with LightningStoreClient(server.url) as store:
            ids = [f"ro-{index}" for index in range(rollouts)]
            await store.enqueue_rollout("first", rollout_id=ids[0])
            enqueuing = asyncio.create_task(_enqueue(store, ids))
            workers = [asyncio.create_task(_work_until(store, f"w{k}", done, rollouts)) for k in range(4)]
            waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids[:1], timeout=100.0))
            for number in range(kills):
                await done.reach((number + 1) * rollouts // (kills + 1))
                await asyncio.sleep(chance.random() * 0.05)
                await asyncio.to_thread(server.kill)
                server.start()
            await asyncio.gather(enqueuing, *workers)
            assert [rollout.rollout_id for rollout in await waiting] == ids[:1]
            assert await asyncio.to_thread(server.stop) == 0
    assert Counter(done.ids) == Counter(ids), "each rollout is done once"
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        for rollout in await store.query_rollouts():
            assert rollout.status == "succeeded"
            assert len(await store.query_attempts(rollout.rollout_id)) == 1
            assert [span.sequence_id for span in await store.query_spans(rollout.rollout_id)] == [1, 2, 3]
        assert (await store.statistics())["total_rollouts"] == rollouts


async def _enqueue(store: LightningStoreClient, ids: list[str]) -> None:
    for rollout_id in ids:
        await store.enqueue_rollout({"task": rollout_id}, rollout_id=rollout_id)


async def _work_until(store: LightningStoreClient, worker_id: str, done: Done, total: int) -> None:
    while len(done.ids) < total:
        await work(store, worker_id, done)


@pytest.mark.timeout(120)
async def test_a_run_survives_a_server_that_is_killed(tmp_path: Path) -> None:
    await run_with_kills(tmp_path, rollouts=200, kills=1)


@sizes(("rollouts", "kills"), faults=(1000, 5), long=(5000, 25))
async def test_a_run_survives_a_server_that_is_killed_again_and_again(
    tmp_path: Path, rollouts: int, kills: int
) -> None:
    await run_with_kills(tmp_path, rollouts=rollouts, kills=kills)


async def test_a_server_that_never_comes_back_is_an_error_that_says_so(tmp_path: Path) -> None:
    port = free_port()
    async with LightningStoreClient(f"http://127.0.0.1:{port}", retry_seconds=0.3) as store:
        for call in (store.enqueue_rollout(1), store.dequeue_rollout(timeout_seconds=0.1), store.query_rollouts()):
            with pytest.raises(StoreError, match=f"127.0.0.1:{port} does not answer"):
                await call
