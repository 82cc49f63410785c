"""Whoever looks after a store does so until the store is closed, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from leyden.errors import StoreClosed, StoreError
from leyden.store import InMemoryLightningStore, Sweeper
from leyden.types import Attempt, RolloutConfig


class Ill(InMemoryLightningStore):
    """Its first sweeps fail."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    async def sweep(self, now: float | None = None) -> Sequence[Attempt]:
        if self.errors:
            raise self.errors.pop(0)
        return await super().sweep(now)


@pytest.mark.parametrize("error", [StoreError("the disk is full"), RuntimeError("nobody foresaw me")])
async def test_a_sweep_that_fails_is_told_and_tried_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with Ill(error, error) as store:
        rollout = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=0.01))
        with caplog.at_level(logging.WARNING, "leyden.store.sweeper"):
            async with Sweeper(store, interval_seconds=0.01), asyncio.timeout(10):
                await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 2
    assert all(str(error) in caplog.text and "tried again in 0.01 s" in record.getMessage() for record in told)


async def test_a_sweeper_ends_quietly_with_its_store(caplog: pytest.LogCaptureFixture) -> None:
    async with Ill(StoreClosed("closed"), RuntimeError("it was asked again")) as store:
        async with Sweeper(store, interval_seconds=0.01):
            await asyncio.sleep(0.05)
        assert len(store.errors) == 1
    assert not caplog.records
