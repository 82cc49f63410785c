"""Two `leyden store` servers on one PostgreSQL, each with the runners of its machine: one store, whatever dies."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from leyden.store import LightningStoreClient, PostgresLightningStore
from leyden.testing import audit_store
from leyden.types import EnqueueRolloutRequest
from tests.store.postgres_server import PostgresServer
from tests.store.test_http_restart import Done, StoreProcess, work

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(180)]

ROLLOUTS = 400


async def work_until(store: LightningStoreClient, worker_id: str, done: Done) -> None:
    while len(done.ids) < ROLLOUTS:
        await work(store, worker_id, done)


async def test_runners_of_two_machines_finish_a_run_whose_servers_and_database_are_restarted(
    own_server: PostgresServer,
) -> None:
    done = Done()
    ids = [f"ro-{index}" for index in range(ROLLOUTS)]
    requests = [EnqueueRolloutRequest(input=rollout_id, rollout_id=rollout_id) for rollout_id in ids]
    with StoreProcess(own_server.url) as one, StoreProcess(own_server.url) as two:
        async with LightningStoreClient(one.url) as here, LightningStoreClient(two.url) as there:
            await here.enqueue_many_rollouts(requests[: ROLLOUTS // 2])
            waiting = asyncio.create_task(there.wait_for_rollouts(rollout_ids=ids[: ROLLOUTS // 2], timeout=120.0))
            workers = [
                asyncio.create_task(work_until(store, f"{name}-{k}", done))
                for name, store in (("here", here), ("there", there))
                for k in range(3)
            ]
            await done.reach(ROLLOUTS // 5)
            await asyncio.to_thread(one.kill)
            one.start()
            await done.reach(2 * ROLLOUTS // 5)
            await asyncio.to_thread(own_server.stop, "immediate")
            await asyncio.to_thread(own_server.start)
            await there.enqueue_many_rollouts(requests[ROLLOUTS // 2 :])
            await done.reach(3 * ROLLOUTS // 5)
            await asyncio.to_thread(two.kill)
            two.start()
            await asyncio.gather(*workers)
            assert [rollout.rollout_id for rollout in await waiting] == ids[: ROLLOUTS // 2]
            assert await asyncio.to_thread(one.stop) == 0
            assert await asyncio.to_thread(two.stop) == 0
    assert Counter(done.ids) == Counter(ids), "each rollout is done once"
    async with PostgresLightningStore(own_server.url) as store:
        assert (await store.statistics())["total_attempts"] == ROLLOUTS
        for spans in (await store.query_spans_of(ids)).values():
            assert [span.sequence_id for span in spans] == [1, 2, 3]
        assert await audit_store(store) == []
