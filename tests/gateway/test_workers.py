"""The gateway in several processes, with real clients, a real store server and workers that are really killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
import yarl

from leyden._lib.attempt_key import attempt_key
from leyden.errors import ConfigError, GatewayError
from leyden.gateway import RemoteGateway
from leyden.gateway.gateway_workers import GatewayWorkers
from leyden.store import LightningStore, LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types.semconv import CALL_INDEX
from tests.gateway.caller import say, until

TOKEN, N_WORKERS, N_ATTEMPTS = "sesame", 3, 12
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LightningStore]:
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        yield store


@pytest.fixture
async def server(store: LightningStore) -> AsyncIterator[LightningStoreServer]:
    async with LightningStoreServer(store, token=TOKEN) as server:
        yield server


@asynccontextmanager
async def command(
    server: LightningStoreServer, upstream: FakeUpstream, *, log: Any = asyncio.subprocess.DEVNULL
) -> AsyncIterator[tuple[Any, str]]:
    """The process of `leyden gateway`, and its endpoint."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from leyden.cli import main; main()", "gateway", "--port", "0"),
        *("--store", server.endpoint, "--model", f"fake={upstream.endpoint}", "--num-workers", str(N_WORKERS)),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env=os.environ | {"LEYDEN_GATEWAY_TOKEN": TOKEN, "LEYDEN_STORE_TOKEN": TOKEN},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(rf"serving fake at (http://\S+/v1), with the token, by {N_WORKERS} processes", line)
        assert found, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def workers_of(process: Any) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


async def attempts(store: LightningStore) -> list[tuple[str, str]]:
    started = [await store.start_rollout({}) for _ in range(N_ATTEMPTS)]
    return [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in started]


async def refused(endpoint: str, key: tuple[str, str]) -> None:
    """A page of another site calls with the key of an attempt, whichever worker that belongs to."""
    with pytest.raises(openai.PermissionDeniedError, match="web page of"):
        async with openai.AsyncOpenAI(
            base_url=endpoint,
            api_key=attempt_key(TOKEN, *key),
            max_retries=0,
            default_headers={"Origin": "https://evil.example"},
        ) as client:
            await client.chat.completions.create(model="fake", messages=say("never asked"))


async def test_each_attempt_is_one_workers_whoever_takes_its_calls(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream
) -> None:
    ids = await attempts(store)
    async with command(server, upstream) as (process, endpoint):

        async def call(index: int, turn: int) -> None:
            key = ids[index]
            by_url = turn % 2 == 0
            base = endpoint.replace("/v1", f"/rollout/{key[0]}/attempt/{key[1]}/v1") if by_url else endpoint
            # a client of its own for each call, so that the kernel gives each to any of the workers
            async with openai.AsyncOpenAI(
                base_url=base,
                api_key=TOKEN if by_url else attempt_key(TOKEN, *key),
                default_headers={"Origin": endpoint.removesuffix("/v1")},  # a page of the gateway's own
            ) as client:
                text = f"{index}: {turn}"
                if turn % 3:
                    await client.chat.completions.create(model="fake", messages=say(text))
                else:
                    async for _ in await client.chat.completions.create(model="fake", messages=say(text), stream=True):
                        pass

        await asyncio.gather(*(call(index, turn) for index in range(N_ATTEMPTS) for turn in range(6)))
        await asyncio.gather(*(refused(endpoint, key) for key in ids))
        workers = workers_of(process)
        assert len(workers) == N_WORKERS
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert not any(worker.is_running() for worker in workers)
    for index, key in enumerate(ids):
        spans = await store.query_spans(*key)
        assert sorted(span.attributes[CALL_INDEX] for span in spans) == list(range(6))
        assert all(f'"{index}: ' in str(span.attributes["gen_ai.input.messages"]) for span in spans)
        assert all(span.tokens is not None for span in spans)


async def test_ids_in_headers_are_the_same_for_all_workers(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream
) -> None:
    made = [await store.start_rollout({}, rollout_id=f"Größe-{index}") for index in range(6)]
    async with command(server, upstream) as (_, endpoint), aiohttp.ClientSession() as session:
        for one in made:
            ids = {"x-leyden-rollout": one.rollout_id, "x-leyden-attempt": one.attempt.attempt_id}
            headers = {"authorization": f"Bearer {TOKEN}", **ids}
            body = {"model": "fake", "messages": say("hi")}
            async with session.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    for one in made:
        assert len(await store.query_spans(one.rollout_id)) == 1


@pytest.mark.slow
@pytest.mark.merge
async def test_a_retry_that_comes_to_another_worker_is_the_same_call(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream
) -> None:
    ids = await attempts(store)
    async with command(server, upstream) as (_, endpoint):
        for key in ids:
            upstream.misbehave(Misbehaviour(status=500))
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=attempt_key(TOKEN, *key)) as client:
                await client.chat.completions.create(model="fake", messages=say("hi"))
    for key in ids:
        failed, again = await store.query_spans(*key)
        assert (failed.attributes[CALL_INDEX], again.attributes[CALL_INDEX]) == (0, 0)
        assert again.attributes["leyden.retry_of"] == failed.span_id


@pytest.mark.parametrize("anthropic", [False, True])
async def test_what_is_refused_is_refused_by_any_worker(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream, anthropic: bool
) -> None:
    headers = (
        {"anthropic-version": "2023-06-01", "x-api-key": "wrong"} if anthropic else {"authorization": "Bearer wrong"}
    )
    async with command(server, upstream) as (_, endpoint), aiohttp.ClientSession() as session:
        answers: Counter[int] = Counter()
        for index in range(8):
            url = endpoint.replace("/v1", f"/rollout/{index}/attempt/a/v1/models")
            async with session.get(url, headers=headers) as response:
                answers[response.status] += 1
                assert ("type" in await response.json()) == anthropic
        assert answers == {401: 8}
        async with session.get(f"{endpoint}/models", headers={"authorization": f"Bearer {TOKEN}"}) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["fake"]


async def test_an_agent_that_leaves_is_gone_for_the_model_too(
    store: LightningStore, server: LightningStoreServer
) -> None:
    async with FakeUpstream(delay_seconds=60) as slow, command(server, slow) as (_, endpoint):
        ids = await attempts(store)
        clients = [
            openai.AsyncOpenAI(base_url=endpoint, api_key=attempt_key(TOKEN, *key), max_retries=0) for key in ids
        ]
        calls = [
            asyncio.create_task(client.chat.completions.create(model="fake", messages=say("hi"))) for client in clients
        ]
        await until(lambda: len(slow.requests) == N_ATTEMPTS)
        for call in calls:
            call.cancel()
        await until(lambda: slow.cancelled == N_ATTEMPTS)
        for client in clients:
            await client.close()


@pytest.mark.faults
@pytest.mark.merge
async def test_a_worker_that_is_killed_is_started_again(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream
) -> None:
    async with command(server, upstream) as (process, endpoint):
        for victim in workers_of(process):
            victim.kill()
            ids = await attempts(store)
            for key in ids:  # those of the dead one wait for the new one
                async with openai.AsyncOpenAI(base_url=endpoint, api_key=attempt_key(TOKEN, *key)) as client:
                    await client.chat.completions.create(model="fake", messages=say("hi"))
        await until(lambda: len(workers_of(process)) == N_WORKERS)


@pytest.mark.faults
@pytest.mark.merge
async def test_an_answer_under_way_breaks_off_when_its_worker_dies(
    store: LightningStore, server: LightningStoreServer, tmp_path: Path
) -> None:
    begun = 0

    async def ask(endpoint: str, key: tuple[str, str]) -> str:
        nonlocal begun
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=attempt_key(TOKEN, *key), max_retries=0) as client:
            stream = await client.chat.completions.create(model="fake", messages=say("hi"), stream=True)
            begun += 1
            try:
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            except openai.APIConnectionError:
                return "broken off"

    with (tmp_path / "log").open("wb") as log:
        async with FakeUpstream(reply=lambda _: "x" * 40) as upstream, command(server, upstream, log=log) as found:
            process, endpoint = found
            upstream.misbehave(*[Misbehaviour(chunk_delay_seconds=0.1)] * N_ATTEMPTS)
            answers = [asyncio.create_task(ask(endpoint, key)) for key in await attempts(store)]
            await until(lambda: begun == N_ATTEMPTS)
            for victim in workers_of(process)[:2]:
                victim.kill()
            told = Counter(await asyncio.gather(*answers))
    assert told["broken off"] > 0
    assert told.keys() <= {"broken off", "x" * 40}
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_nothing_is_left_when_the_parent_is_killed(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream
) -> None:
    async with command(server, upstream) as (process, _):
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= N_WORKERS
        process.kill()
        await until(lambda: not any(one.is_running() and one.status() != "zombie" for one in family))


@pytest.mark.parametrize("url", ["memory://", ".leyden/store.db", "sqlite:////tmp/store.db"])
def test_a_store_that_is_one_processs_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="leyden store"):
        GatewayWorkers(2, store_url=url, control_secret=None, host="127.0.0.1", port=0, model_list=[])


async def test_why_a_worker_cannot_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    url = "http://127.0.0.1:1"
    workers = GatewayWorkers(2, store_url=url, control_secret=None, host="127.0.0.1", port=0, model_list=[])
    with pytest.raises(GatewayError, match=r"worker \d of the gateway cannot start: .*AF_UNIX path too long"):
        await workers.start()
    assert not list(folder.iterdir())


async def test_one_request_controls_all_workers(
    store: LightningStore, server: LightningStoreServer, upstream: FakeUpstream
) -> None:
    ids = await attempts(store)
    async with command(server, upstream) as (_, endpoint):
        gateway = RemoteGateway(endpoint, TOKEN)
        assert [model["model_name"] for model in (await gateway.state())["models"]] == ["fake"]
        assert (await gateway.pause())["paused"]
        clients = [
            openai.AsyncOpenAI(base_url=endpoint, api_key=attempt_key(TOKEN, *key), max_retries=0) for key in ids
        ]
        calls = [
            asyncio.create_task(client.chat.completions.create(model="fake", messages=say("hi"))) for client in clients
        ]

        async def all_wait() -> bool:
            return (await gateway.state())["calls_waiting"] == N_ATTEMPTS

        await until(all_wait)
        assert not upstream.requests
        assert (await gateway.set_policy_version("fake", 5))["models"][0]["policy_version"] == 5
        assert not (await gateway.resume())["paused"]
        await asyncio.gather(*calls)
        for client in clients:
            await client.close()
        with pytest.raises(GatewayError, match="operator"):
            await RemoteGateway(endpoint, "wrong").state()
        reader, writer = await asyncio.open_connection("127.0.0.1", yarl.URL(endpoint).port)
        writer.write(
            b"POST /control/pause HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\nexpect: 100-continue\r\n\r\n"
        )
        assert b" 413 " in await reader.readline()
        writer.close()
    for key in ids:
        (span,) = await store.query_spans(*key)
        assert span.attributes["leyden.policy_version"] == 5
