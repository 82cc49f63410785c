"""The store is away for long: serving goes on, what waits stays bounded, and all of it arrives once.

`LEYDEN_STORE_AWAY_SECONDS=3600 pytest -m long tests/serving/test_store_away.py` is the whole hour.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from leyden.errors import StoreError
from leyden.gateway import LLMProxy
from leyden.serving import OnlineSession
from leyden.store import LightningStoreClient, LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream, audit_store
from tests.serving.processes import KEY, Place, call_model, opened_forker, opened_place, resources
from tests.serving.test_faults import n_calls, post, rollouts_in, until
from tests.store.killing import Forker, integrity

AWAY_SECONDS = float(os.environ.get("LEYDEN_STORE_AWAY_SECONDS", "60"))
REQUESTS_PER_SECOND = 4.0
MEMORY_PER_REQUEST = 4096
"""Bytes that session and gateway together may keep in memory for each request whose records wait."""
MEMORY_NOISE = 16 * 2**20
LOG_BYTES = 64 * 2**10


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with opened_forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


@pytest.mark.slow
async def test_what_waits_for_a_store_keeps_to_its_bound_at_the_requests_of_an_hour(
    tmp_path: Path,
) -> None:
    n_requests, spool_bytes = round(3600 * REQUESTS_PER_SECOND), 4 * 2**20
    given: list[str] = []
    async with SqliteLightningStore(tmp_path / "store.db") as file, FakeUpstream() as upstream:
        await file.update_resources("rs", resources("old"))
        await file.set_label("production", "rs", 1)
        server = LightningStoreServer(file)
        await server.start()
        async with (
            LLMProxy(model_list=[upstream.llm()], store=file, live_key=KEY) as gateway,
            LightningStoreClient(server.endpoint, retry_seconds=0.1) as store,
            OnlineSession(
                store,
                gateway=gateway.endpoint,
                live_key=KEY,
                folder=tmp_path / "session",
                spool_bytes=spool_bytes,
                refresh_seconds=0.05,
            ) as session,
        ):
            await server.stop()
            await until(lambda: session.status().store_is_away)
            assert "does not answer" in str(session.status().store_error)
            before = memory()
            for number in range(n_requests):
                with session.serve({"number": number}, user=f"user {number % 100}") as served:
                    pass
                with suppress(StoreError):
                    given.append(session.feedback(served, source="user", reward=1.0).feedback_id)
            grown = memory() - before
            status = session.status()
            assert (tmp_path / "session" / "outbox").stat().st_size <= spool_bytes
            assert grown <= MEMORY_NOISE / 2, f"{grown:,} bytes"
            assert 0 < len(given) < n_requests
            assert status.lost > 0
            assert status.waiting + status.lost == 2 * n_requests + len(given)
            await server.start()
            await until(lambda: not session.status().waiting, 60.0)
            assert [one.feedback_id for one in await file.query_feedback()] == given
            assert session.status().refused == 0
        await server.stop()


def memory() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.long
@pytest.mark.timeout(AWAY_SECONDS + 600)
async def test_the_store_may_be_away_for_an_hour(forker: Forker, tmp_path: Path) -> None:
    given: list[str] = []
    ended: list[str] = []

    async def request(http: aiohttp.ClientSession, place: Place) -> None:
        number = len(given)
        begun = await post(http, place, "begin", {"input": number, "user": f"user {number % 100}"})
        assert await call_model(http, begun["resources"]["llm"]) == 200
        await post(http, place, "end", {"claim": begun["claim"]})
        said = await post(http, place, "feedback", {"rollout": begun["claim"], "source": "user", "value": number})
        ended.append(begun["rollout_id"])
        given.append(said["feedback_id"])

    async with opened_place(forker, tmp_path, "gateway", "serve") as place, aiohttp.ClientSession() as http:
        for _ in range(50):
            await request(http, place)
        await place.kill("store")
        before, began = len(given), time.monotonic()
        first = place.memory("gateway", "serve")
        while (away := time.monotonic() - began) < AWAY_SECONDS:
            await request(http, place)
            await asyncio.sleep(max(0.0, (len(given) - before) / REQUESTS_PER_SECOND - away))
        meanwhile, grown = len(given) - before, place.memory("gateway", "serve") - first
        sizes = {path.name: path.stat().st_size for path in (place.outbox, place.calls)}
        waiting = (await status(http, place))["waiting"]
        assert waiting >= 3 * meanwhile
        assert grown <= MEMORY_NOISE + MEMORY_PER_REQUEST * meanwhile
        assert forker.log.stat().st_size < LOG_BYTES, "a log line for each request would fill a disk"

        back = time.monotonic()
        await place.start("store")
        await until(lambda: not place.outbox.stat().st_size and not place.calls.stat().st_size, 300.0)
        delivered = time.monotonic() - back
        print(
            f"{meanwhile:,} requests in {away:,.0f} s without the store: {waiting:,} records waited in {sizes} bytes, "
            f"memory of session and gateway grew by {grown / 2**20:.1f} MiB; all delivered {delivered:.1f} s after its return"
        )
        await request(http, place)
        await until(lambda: not place.outbox.stat().st_size)
        now = await status(http, place)
        assert (now["store_is_away"], now["lost"], now["refused"], now["unrecorded"]) == (False, 0, 0, 0)
        async with LightningStoreClient(place.url("store")) as store:
            assert [one.feedback_id for one in await store.query_feedback()] == given
            rollouts = await rollouts_in(store)
            assert {key: each.status for key, each in rollouts.items()} == dict.fromkeys(ended, "succeeded")
            await until(lambda: _all_calls(store, Counter(ended)))
    async with SqliteLightningStore(place.path) as store:
        assert await audit_store(store) == []
    integrity(place.path)


async def status(http: aiohttp.ClientSession, place: Place) -> dict[str, int]:
    async with http.get(f"{place.url('serve')}/v1/serving/status") as response:
        return await response.json()


async def _knows_the_store(http: aiohttp.ClientSession, place: Place) -> bool:
    return not (await status(http, place))["store_is_away"]


async def _all_calls(store: LightningStoreClient, calls: Counter[str]) -> bool:
    return await n_calls(store) == calls
