"""Two processes' stores on one PostgreSQL forget while others pin and record: nothing that was acknowledged is lost to it."""

from __future__ import annotations

import asyncio
import random

import pytest

from leyden.errors import UnknownRollout
from leyden.store import PostgresLightningStore
from leyden.types import EnqueueRolloutRequest, Retention
from tests.contracts.store.support import span_of

pytestmark = pytest.mark.merge

FORGET_ALL = Retention(max_rollouts=0)


async def test_a_pin_that_was_acknowledged_holds_and_a_late_span_leaves_no_orphan(postgres_url: str) -> None:
    chance = random.Random(0)

    async def prune(store: PostgresLightningStore) -> None:
        for _ in range(4):
            await store.prune(FORGET_ALL)
            await asyncio.sleep(0.003)

    pinned = refused = late = 0
    async with PostgresLightningStore(postgres_url) as here, PostgresLightningStore(postgres_url) as there:
        for _ in range(15):
            await here.enqueue_many_rollouts([EnqueueRolloutRequest(input=index) for index in range(30)])
            rollouts = await here.dequeue_many_rollouts(limit=30)
            for rollout in rollouts:
                await here.update_rollout(rollout.rollout_id, status="cancelled")

            async def pin(rollout_id: str) -> bool:
                await asyncio.sleep(chance.uniform(0, 0.02))
                try:
                    await there.pin(rollout_id, [rollout_id])
                except UnknownRollout:
                    return False
                return True

            async def add_span(rollout: object) -> bool:
                await asyncio.sleep(chance.uniform(0, 0.02))
                try:
                    return await there.add_span(span_of(rollout)) is not None  # type: ignore[arg-type]
                except UnknownRollout:
                    return False

            *answers, _, _ = await asyncio.gather(
                *(pin(rollout.rollout_id) for rollout in rollouts[:15]),
                *(add_span(rollout) for rollout in rollouts[15:]),
                prune(here),
                prune(there),
            )
            left = {rollout.rollout_id for rollout in await here.query_rollouts()}
            for rollout, acknowledged in zip(rollouts[:15], answers[:15], strict=True):
                assert not acknowledged or rollout.rollout_id in left
                if rollout.rollout_id in left:
                    await here.pin(rollout.rollout_id, [])
            pinned += sum(map(bool, answers[:15]))
            refused += sum(not answer for answer in answers[:15])
            late += sum(map(bool, answers[15:]))
        while await here.prune(FORGET_ALL):
            pass
        statistics = await here.statistics()
    assert min(pinned, refused, late) > 0  # each side won some of the races
    totals = [statistics[f"total_{noun}"] for noun in ("rollouts", "attempts", "spans")]  # type: ignore[literal-required]
    assert max(totals) <= 2  # the newest rollout and the one with the newest span
