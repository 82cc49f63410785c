"""Damaged requests on every route of store and gateway: no 5xx, no slow answer, a store whose records agree."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import aiohttp
import yarl

from leyden.store import LightningStoreClient, SqliteLightningStore
from leyden.testing import audit_store
from leyden.types import LLM, Span
from tests.attack.fuzzing import Fuzzer, Request, sound_model
from tests.attack.harness import Attack, sizes
from tests.attack.served import Served, served

AT_ONCE = 8
SLOW_SECONDS = 10.0
"""On a machine with other work; on a quiet one the slowest answer takes a tenth of a second."""
HEAD_BYTES = 60_000
"""The server refuses a longer head."""
WAITING = ("/waits/", "/dequeue", "/sweep/next", "/spans/next", "/spans/new")
"""Routes that may wait for something to happen, however damaged their request is."""


@sizes("n_requests", faults=(2_000,), long=(40_000,))
async def test_damaged_requests_break_nothing(tmp_path: Path, attack: Attack, n_requests: int) -> None:
    async with sound_model() as upstream, served(tmp_path, upstream.endpoint) as place:
        await furnish(place)
        connector = aiohttp.TCPConnector(limit=AT_ONCE)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            await asyncio.gather(
                *(fuzz(session, place, attack, attack.seed + n, n_requests // AT_ONCE) for n in range(AT_ONCE))
            )
        async with LightningStoreClient(place.store) as store:
            assert (await store.start_rollout("after")).status == "preparing"
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        assert await audit_store(store) == []


async def furnish(place: Served) -> None:
    """Put something under each id that the fuzzer knows."""
    async with LightningStoreClient(place.store) as store:
        await store.add_resources({"llm": LLM(endpoint="http://x", model="m")}, resources_id="rs")
        await store.start_rollout("task", worker_id="w", rollout_id="ro", attempt_id="at")
        await store.add_span(
            Span(rollout_id="ro", attempt_id="at", sequence_id=0, trace_id="t", span_id="s", name="step")
        )


async def fuzz(session: aiohttp.ClientSession, place: Served, attack: Attack, seed: int, n: int) -> None:
    chance = random.Random(seed)
    fuzzer = Fuzzer(chance)
    for _ in range(n):
        url = chance.choice([place.store, place.store, place.gateway])
        if chance.random() < 0.05:
            await send_raw(url, fuzzer.raw())
        else:
            request = fuzzer.for_gateway() if url == place.gateway else fuzzer.for_store()
            status = await send(session, url, request, attack)
            attack.count(**{f"answers_{status // 100}xx": 1})
        attack.count(requests=1)


async def send(session: aiohttp.ClientSession, url: str, request: Request, attack: Attack) -> int:
    """Send a request and return its status; 0 where a wait was cut short."""
    started = time.monotonic()
    waits = any(part in request.path for part in WAITING)
    target = yarl.URL(url + request.path, encoded=True)
    try:
        async with (
            asyncio.timeout(0.5 if waits else SLOW_SECONDS),
            session.request(request.verb, target, headers=request.headers, data=request.body) as response,
        ):
            said = await response.read()
    except TimeoutError:
        assert waits, f"no answer within {SLOW_SECONDS} s: {request}"
        return 0
    except aiohttp.ClientError as error:
        if (
            len(request.path) > HEAD_BYTES
        ):  # refused before the server knows what is asked, and the connection is closed
            return 400
        raise AssertionError(f"no answer to {request}") from error
    milliseconds = round((time.monotonic() - started) * 1000)
    if not waits:
        attack.figures["slowest_ms"] = max(attack.figures["slowest_ms"], milliseconds)
    assert response.status < 500, f"{response.status} {said[:500]!r} for {request}"
    assert b"Traceback" not in said
    return response.status


async def send_raw(url: str, data: bytes) -> None:
    """Send bytes that are hardly HTTP, and end; the server answers or closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(SLOW_SECONDS):
            said = await reader.read()
        assert not said.startswith(b"HTTP/1.1 5"), f"{said[:500]!r} for {data!r}"
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
