"""Slow and endless clients, and pages of other sites: the real clients are served meanwhile, and the attackers are closed."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from leyden.store import LightningStoreClient, SqliteLightningStore
from leyden.store.openapi import openapi
from leyden.testing import FakeUpstream, Misbehaviour, audit_store
from tests.attack.harness import Attack, sizes
from tests.attack.served import MODEL, served
from tests.gateway.caller import say

DESCRIPTORS = 256
PATIENCE_SECONDS = 20.0
"""How long a real client's call may take on a busy machine. Without the limits it takes as long as the attack."""
EVERY_SECONDS = 0.2
"""Between two bytes of a slow client."""
LARGE = json.dumps({"choices": [{"message": {"role": "assistant", "content": "x" * 2**23}}]}).encode()


class Connection:
    """One attacker's connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read_to_end(self) -> None:
        """Read until the server closes the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(2**16):
                pass

    async def dribble(self) -> None:
        """Send one byte at a time until the server closes the connection."""
        closed = asyncio.create_task(self.read_to_end())
        while not closed.done():
            self._writer.write(b"x")
            await asyncio.wait([closed], timeout=EVERY_SECONDS)

    async def wait_until_broken(self) -> None:
        """Read nothing until the server breaks the connection."""
        with suppress(ConnectionError):
            while not self._writer.transport.is_closing():
                await asyncio.sleep(EVERY_SECONDS)
                self._writer.write(b"x")
                await self._writer.drain()

    def close(self) -> None:
        self._writer.transport.abort()


async def connected(url: str, *, reads: bool = True) -> Connection:
    host, port = url.removeprefix("http://").split(":")
    limit = 2**16 if reads else 1024
    return Connection(*await asyncio.open_connection(host, int(port), limit=limit))


HEAD = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
Behaviour = Callable[[Connection, bytes], Awaitable[None]]


async def says_nothing(connection: Connection, path: bytes) -> None:
    await connection.read_to_end()


async def never_ends_its_head(connection: Connection, path: bytes) -> None:
    connection.send(HEAD % path)
    await connection.read_to_end()


async def sends_its_head_byte_by_byte(connection: Connection, path: bytes) -> None:
    connection.send(HEAD % path + b"X-Long: ")
    await connection.dribble()


async def announces_a_body_and_sends_none(connection: Connection, path: bytes) -> None:
    connection.send(HEAD % path + b"Content-Length: 1000000\r\n\r\n")
    await connection.read_to_end()


async def sends_its_body_byte_by_byte(connection: Connection, path: bytes) -> None:
    connection.send(HEAD % path + b"Content-Length: 1000000\r\n\r\n")
    await connection.dribble()


ATTACKS: list[Behaviour] = [
    says_nothing,
    never_ends_its_head,
    sends_its_head_byte_by_byte,
    announces_a_body_and_sends_none,
    sends_its_body_byte_by_byte,
]


@sizes("n_clients", faults=(150,), long=(1500,), merge=False)
async def test_slow_and_endless_clients_are_closed_and_real_ones_are_served(
    tmp_path: Path, attack: Attack, n_clients: int
) -> None:
    enough_descriptors(n_clients + 200)
    chance, over = attack.chance, asyncio.Event()
    async with (
        FakeUpstream() as upstream,
        served(tmp_path, upstream.endpoint, DESCRIPTORS) as place,
        LightningStoreClient(place.store) as store,
    ):
        await store.enqueue_rollout("before", rollout_id="before")  # what the server reads lazily it has read now
        kept = [asyncio.create_task(stay_idle(place.store, over)) for _ in range(n_clients // 3)]
        attackers = [
            asyncio.create_task(strike(behaviour, chance.choice([place.store, place.gateway]), attack))
            for behaviour in chance.choices(ATTACKS, k=n_clients)
        ]
        real = asyncio.create_task(be_a_real_client(store, place.gateway, attack))
        await asyncio.gather(*attackers)
        real.cancel()
        with suppress(asyncio.CancelledError):
            await real
        over.set()
        await asyncio.gather(*kept)
        assert attack.figures["real_calls"] >= 3
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        assert await audit_store(store) == []


async def strike(behaviour: Behaviour, url: str, attack: Attack) -> None:
    """Behave badly until the server closes the connection, which it must within its limits from when it takes it up."""
    connection = await connected(url)
    path = b"/v1/agl/queues/rollouts/enqueue" if "agl" in url else b"/v1/chat/completions"
    try:
        async with asyncio.timeout(180):
            await behaviour(connection, path)
    finally:
        connection.close()
    attack.count(slow_clients=1, **{behaviour.__name__: 1})


async def stay_idle(url: str, over: asyncio.Event) -> None:
    """Ask one thing and keep the connection, as clients do that want to ask again."""
    connection = await connected(url)
    connection.send(b"GET /v1/agl/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await over.wait()
    connection.close()


async def be_a_real_client(store: LightningStoreClient, gateway: str, attack: Attack) -> None:
    """Call both servers again and again, as the library's and OpenAI's clients do by default."""
    while True:
        started = time.monotonic()
        async with asyncio.timeout(PATIENCE_SECONDS):
            rollout = await store.start_rollout({"real": True})
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        url = f"{gateway}/rollout/{ids[0]}/attempt/{ids[1]}/v1"
        async with AsyncOpenAI(base_url=url, api_key="EMPTY") as client, asyncio.timeout(PATIENCE_SECONDS):
            answer = await client.chat.completions.create(model=MODEL, messages=say("Are you there?"))
            assert answer.choices
        async with asyncio.timeout(PATIENCE_SECONDS):
            await store.update_attempt(*ids, status="succeeded")
        milliseconds = round((time.monotonic() - started) * 1000)
        attack.figures["slowest_real_round_ms"] = max(attack.figures["slowest_real_round_ms"], milliseconds)
        attack.count(real_calls=3)
        await asyncio.sleep(0.05)


@sizes("n_clients", faults=(10,), long=(100,))
async def test_clients_that_never_read_their_answers_are_closed(tmp_path: Path, attack: Attack, n_clients: int) -> None:
    async with (
        FakeUpstream(fault=large_if_asked) as upstream,
        served(tmp_path, upstream.endpoint, DESCRIPTORS) as place,
        LightningStoreClient(place.store) as store,
    ):
        rollout = await store.start_rollout({})
        url = f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1/chat/completions"
        body = json.dumps({"model": MODEL, "messages": say("large")}).encode()
        asked = HEAD % url.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        pages = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 90

        async def ask(url: str, request: bytes) -> None:
            connection = await connected(url, reads=False)
            connection.send(request)
            async with asyncio.timeout(120):
                await connection.wait_until_broken()
            attack.count(clients_that_never_read=1)

        real = asyncio.create_task(be_a_real_client(store, place.gateway, attack))
        for _ in range(n_clients // 10):
            await asyncio.gather(*[ask(place.store, pages) for _ in range(5)], *[ask(place.gateway, asked)] * 1)
        assert not real.done()
        real.cancel()
        with suppress(asyncio.CancelledError):
            await real


def large_if_asked(body: dict[str, Any]) -> Misbehaviour | None:
    return Misbehaviour(body=LARGE) if "large" in str(body) else None


def enough_descriptors(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))


# ---- pages of other sites ------------------------------------------------------------------------------------------------

BROWSERS = [
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Origin": "https://evil.example"},  # of a browser that does not send fetch metadata
    {"Origin": "null", "Sec-Fetch-Site": "cross-site"},  # from a sandboxed frame
    {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},  # another server on this machine
]
TYPES = [None, "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
"""Content types that a page may send to another site without asking it first."""


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("origin", BROWSERS, ids=lambda origin: "-".join(origin.values()))
async def test_a_page_of_another_site_changes_nothing_in_a_store_without_a_token(
    tmp_path: Path, origin: dict[str, str]
) -> None:
    async with (
        FakeUpstream() as upstream,
        served(tmp_path, upstream.endpoint) as place,
        LightningStoreClient(place.store) as store,
    ):
        await store.enqueue_rollout("queued", rollout_id="queued")
        await store.start_rollout("task", worker_id="w", rollout_id="ro", attempt_id="at")
        before = await everything(store)
        paths = [path for path, verbs in openapi()["paths"].items() if "post" in verbs]
        for path in paths:
            for kind in TYPES:
                ids = {
                    "rollout_id": "ro",
                    "attempt_id": "at",
                    "resources_id": "rs",
                    "label": "production",
                    "release_id": "release",
                    "worker_id": "w",
                    "run_id": "run",
                    "name": "p",
                }
                known = path.format(**ids)
                status = await post_as_a_browser(place.store, known, origin, kind)
                assert status in (403, 415), f"{path} {kind}: {status}"
        assert await everything(store) == before
        asked = "/rollout/ro/attempt/at/v1/chat/completions"
        body = json.dumps({"model": MODEL, "messages": say("hi")}).encode()
        assert await post_as_a_browser(place.gateway, asked, origin, TYPES[1], body) in (403, 415)
        assert not upstream.requests


async def everything(store: LightningStoreClient) -> list[object]:
    return [
        await store.query_rollouts(),
        await store.query_attempts("ro"),
        await store.query_workers(),
        await store.query_resources(),
    ]


async def post_as_a_browser(url: str, path: str, origin: dict[str, str], kind: str | None, body: bytes = b"") -> int:
    headers = {"Host": url.removeprefix("http://"), **origin, "Content-Length": str(len(body))}
    if kind:
        headers["Content-Type"] = kind
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "Connection: close"]
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])
