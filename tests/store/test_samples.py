"""Time series bound themselves by their number too; by their age, see the contract."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from leyden.store import InMemoryLightningStore
from leyden.store.sql.body import samples
from leyden.types import Sample


async def test_of_too_many_samples_the_oldest_go_as_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_KEPT", 50)
    now = time.time()
    async with InMemoryLightningStore() as store:
        for k in range(30):
            await store.add_many_samples([Sample(name="x", time=now + 10 * k + i, value=k) for i in range(10)])
            assert (await store.query_samples(limit=1)).total <= 50
        kept = [sample.time - now for sample in await store.query_samples()]
    assert kept == pytest.approx(list(range(250, 300)))


async def test_what_comes_at_once_is_brought_down_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    async with InMemoryLightningStore() as store:
        await store.add_many_samples([Sample(name="x", time=now + i, value=0.0) for i in range(1000)])
        monkeypatch.setattr(samples, "_KEPT", 100)
        totals: list[int] = []
        for k in range(20):
            await store.add_many_samples([Sample(name="x", time=now + 2000 + k, value=0.0)])
            totals.append((await store.query_samples(limit=1)).total)
    steps = [before - after for before, after in pairwise(totals)]
    assert max(steps) <= 66  # no call pays for all
    assert totals[-1] == 100
