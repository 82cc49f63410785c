"""A server says that its run has ended, and lets nobody claim before it has begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from leyden._lib.aio import Latch
from leyden.errors import ConfigError, StoreError
from leyden.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer, client
from leyden.store.ending import End


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def test_those_who_wait_for_the_end_hear_of_it_before_the_announcement_returns(
    store: InMemoryLightningStore,
) -> None:
    async with LightningStoreServer(store) as server, server.client() as one, server.client() as other:
        waiting = [asyncio.create_task(client.wait_for_end()) for client in (one, other)]
        await one.statistics()
        assert not any(each.done() for each in waiting)
        async with asyncio.timeout(20):
            await server.announce_end(within_seconds=60)
            await asyncio.gather(*waiting)
            await other.wait_for_end()  # whoever comes later is told at once


async def test_an_announcement_does_not_wait_for_ever_for_who_has_gone() -> None:
    end = End()
    waiting = asyncio.create_task(end.answer(b'{"watcher": "gone", "timeout_seconds": 60}'))
    await asyncio.sleep(0)
    waiting.cancel()
    began = time.monotonic()
    await end.announce(within_seconds=0.1)
    assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("seconds", [b"1e9", b"true", b'"1"'])
async def test_a_question_that_is_none_is_refused(seconds: bytes) -> None:
    with pytest.raises(ConfigError, match="waits/end"):
        await End().answer(b'{"watcher": "w", "timeout_seconds": ' + seconds + b"}")


async def test_a_server_that_stops_unannounced_has_not_ended_its_run(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_WATCH_SECONDS", 0.2)
    async with LightningStoreServer(store) as server, LightningStoreClient(server.endpoint, retry_seconds=0.0) as other:
        waiting = asyncio.create_task(other.wait_for_end())
        await other.statistics()
        async with asyncio.timeout(20):
            await server.stop()
            with pytest.raises(StoreError):
                await waiting


async def test_claims_wait_until_they_may_be_made(store: InMemoryLightningStore) -> None:
    begun = Latch()
    await store.enqueue_rollout("early")
    async with LightningStoreServer(store, claims_from=begun) as server, server.client() as other:
        assert await other.dequeue_rollout() is None
        assert await other.dequeue_rollout(timeout_seconds=0.05) is None
        claiming = asyncio.create_task(other.dequeue_rollout(timeout_seconds=20))
        await other.statistics()
        begun.set()
        claimed = await claiming
        assert claimed is not None
        assert claimed.input == "early"
