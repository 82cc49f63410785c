"""What a store server says to those who are not our client: precise refusals, and nothing changed by them."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import pickle
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden._lib.host.asgi import ConnectionLimits
from leyden.errors import ConfigError, StoreError
from leyden.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from leyden.store.store_app import StoreApp
from leyden.types import (
    LLM,
    AttemptedRollout,
    EnqueueRolloutRequest,
    RolloutConfig,
    RunRecord,
    Span,
    TokenRecord,
    current_run_id,
)

SOON = 10.0
API = "/v1/agl"
JSON = {"content-type": "application/json"}

Ask = Callable[..., AbstractAsyncContextManager[aiohttp.ClientResponse]]


@pytest.fixture
async def opened() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


@asynccontextmanager
async def asking(server: LightningStoreServer, **headers: str) -> AsyncIterator[Ask]:
    """A function that sends a request to the server, like any HTTP client does."""
    async with aiohttp.ClientSession(server.endpoint, headers=headers) as session:
        yield session.request


@pytest.fixture
async def ask(opened: LightningStore) -> AsyncIterator[Ask]:
    async with LightningStoreServer(opened, max_body_bytes=100_000) as server, asking(server) as ask:
        yield ask


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    told = await response.json()
    assert told.keys() == {"error", "message"}
    return response.status, told["error"], told["message"]


async def claimed(store: LightningStore) -> AttemptedRollout:
    return await store.start_rollout("task")


def span_of(rollout: AttemptedRollout, **fields: Any) -> dict[str, Any]:
    span = {"trace_id": "t", "span_id": "s", "name": "n", "sequence_id": 0} | fields
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id, **span}


# ---- what there is to ask ------------------------------------------------------------------------------------------------


async def test_a_whole_rollout_goes_with_curl(ask: Ask) -> None:
    async with ask("POST", f"{API}/queues/rollouts/enqueue", json={"input": {"q": 1}}) as response:
        assert response.status == 201
        enqueued = await response.json()
    assert enqueued["status"] == "queuing"
    async with ask("POST", f"{API}/queues/rollouts/dequeue") as response:
        (rollout,) = await response.json()
    rollout_id, attempt_id = rollout["rollout_id"], rollout["attempt"]["attempt_id"]
    assert rollout_id == enqueued["rollout_id"]
    span = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": "t", "span_id": "s", "name": "n"}
    async with ask("POST", f"{API}/spans", json=span | {"sequence_id": 0}) as response:
        assert (response.status, (await response.json())["sequence_id"]) == (201, 1)
    async with ask("POST", f"{API}/spans", json=span | {"sequence_id": 0}) as response:
        assert (response.status, await response.json()) == (201, None)
    async with ask("POST", f"{API}/rollouts/{rollout_id}/attempts/latest", json={"status": "succeeded"}) as response:
        assert (await response.json())["status"] == "succeeded"
    async with ask("GET", f"{API}/rollouts?status_in=succeeded") as response:
        page = await response.json()
    assert (page["total"], page["items"][0]["attempt"]["attempt_id"]) == (1, attempt_id)
    async with ask("GET", f"{API}/spans?rollout_id={rollout_id}") as response:
        assert [item["span_id"] for item in (await response.json())["items"]] == ["s"]
    async with ask("POST", f"{API}/waits/rollouts", json={"rollout_ids": [rollout_id], "timeout": 1}) as response:
        assert [item["rollout_id"] for item in await response.json()] == [rollout_id]


async def test_tokens_are_lists_for_everybody_and_packed_for_those_who_ask(ask: Ask, opened: LightningStore) -> None:
    rollout = await claimed(opened)
    tokens = TokenRecord(prompt_ids=[1, 2, 3], response_ids=[4], logprobs=[-0.5])
    span = span_of(rollout, tokens=json.loads(tokens.model_dump_json()))
    async with ask("POST", f"{API}/spans", json=[span]) as response:
        assert (await response.json())[0]["tokens"]["prompt_ids"] == [1, 2, 3]
    (added,) = await opened.query_spans(rollout.rollout_id)
    assert added.tokens == tokens
    async with ask(
        "GET",
        f"{API}/spans?rollout_id={rollout.rollout_id}",
        headers={"Accept": "application/json;dialect=leyden"},
    ) as response:
        packed = (await response.json())["items"][0]
    assert isinstance(packed["tokens"], str)
    assert Span.model_validate(packed).tokens == tokens


@pytest.mark.parametrize(
    "tokens", ["", "AAAA", "????", "AgAAAP9///9/AAAAAAAAAAAAAAAAeJwDAAAAAAE=", 7, {"prompt_ids": "x"}]
)
async def test_tokens_that_are_damaged_are_refused(ask: Ask, opened: LightningStore, tokens: Any) -> None:
    rollout = await claimed(opened)
    async with ask("POST", f"{API}/spans", json=[span_of(rollout, tokens=tokens)]) as response:
        status, kind, message = await error_of(response)
    assert (status, kind) == (400, "ConfigError")
    assert "tokens" in message
    assert len(await opened.query_spans(rollout.rollout_id)) == 0


async def test_the_interface_explains_itself(ask: Ask) -> None:
    async with ask("GET", "/openapi.json") as response:
        document = await response.json()
    assert (response.status, document["openapi"]) == (200, "3.1.0")
    assert f"{API}/rollouts/{{rollout_id}}/attempts/{{attempt_id}}" in document["paths"]
    async with ask("GET", f"{API}/health") as response:
        assert await response.json() == {"status": "ok"}


# ---- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "path", "status", "kind"),
    [
        ("GET", "/nothing", 404, "ConfigError"),
        ("GET", f"{API}/nothing/at/all", 404, "ConfigError"),
        ("GET", f"{API}/rollouts/none", 404, "UnknownRollout"),
        ("GET", f"{API}/rollouts/", 404, "UnknownRollout"),
        ("GET", f"{API}/rollouts/none/attempts/none", 404, "UnknownRollout"),
        ("GET", f"{API}/resources/none", 404, "UnknownResources"),
        ("GET", f"{API}/workers/none", 404, "UnknownWorker"),
        ("DELETE", f"{API}/rollouts/none", 405, "ConfigError"),
        ("PUT", f"{API}/spans", 405, "ConfigError"),
        ("POST", f"{API}/health", 405, "ConfigError"),
        ("GET", f"{API}/rollouts?limit=0", 400, "ConfigError"),
        ("GET", f"{API}/rollouts?sort_by=colour", 400, "ConfigError"),
        ("GET", f"{API}/rollouts?colour=red", 400, "ConfigError"),
        ("GET", f"{API}/spans?rollout_id=x&limit=0", 400, "ConfigError"),
    ],
)
async def test_what_is_not_there_is_refused_in_words(ask: Ask, verb: str, path: str, status: int, kind: str) -> None:
    async with ask(verb, path) as response:
        assert (await error_of(response))[:2] == (status, kind)
        if status == 405:
            assert response.headers["Allow"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_of_another_type_is_refused(ask: Ask, opened: LightningStore, content_type: str) -> None:
    async with ask("POST", f"{API}/rollouts", data=b'{"input": 1}', headers={"Content-Type": content_type}) as response:
        assert (await error_of(response))[0] == 415
    assert len(await opened.query_rollouts()) == 0


async def test_an_illegal_change_is_a_conflict(ask: Ask, opened: LightningStore) -> None:
    rollout = await claimed(opened)
    path = f"{API}/rollouts/{rollout.rollout_id}/attempts/{rollout.attempt.attempt_id}"
    async with ask("POST", path, json={"status": "failed"}) as response:
        assert response.status == 200
    async with ask("POST", path, json={"status": "succeeded"}) as response:
        assert (await error_of(response))[:2] == (409, "IllegalTransition")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused(ask: Ask, opened: LightningStore, chunked: bool) -> None:
    body = b'{"input": "' + b"x" * 300_000 + b'"}'

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    headers = {"Content-Type": "application/json"}
    async with ask("POST", f"{API}/rollouts", data=parts() if chunked else body, headers=headers) as response:
        status, _, message = await error_of(response)
    assert status == 413
    assert "100,000 bytes" in message
    assert len(await opened.query_rollouts()) == 0


async def test_a_hundred_megabytes_are_refused_before_they_are_sent(ask: Ask) -> None:
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100_000_000:
            sent += 1_000_000
            yield b" " * 1_000_000

    headers = {"Content-Type": "application/json", "Content-Length": "100000000"}
    async with ask("POST", f"{API}/spans", data=parts(), headers=headers, expect100=True) as response:
        assert (await error_of(response))[0] == 413
    assert sent == 0


async def test_compressed_bodies_are_read(ask: Ask) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    for body in (gzip.compress(b'{"input": 7}'), gzip.compress(b'{"input":') + gzip.compress(b" 7}")):
        async with ask("POST", f"{API}/rollouts", data=body, headers=headers) as response:
            assert (response.status, (await response.json())["input"]) == (201, 7)


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzip.compress(b'{"input": "' + b"x" * 50_000_000 + b'"}'), "gzip", 413),
        (b"not gzip", "gzip", 400),
        (gzip.compress(b'{"input": 7}')[:-6], "gzip", 400),
        (gzip.compress(b'{"input": 7}') + b"rest", "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(b"") * 2001, "gzip", 413),
        (b"{}", "br", 415),
    ],
    ids=["bomb", "text", "cut", "rest", "empty", "members", "brotli"],
)
async def test_compressed_bodies_that_are_wrong_are_refused(ask: Ask, body: bytes, encoding: str, status: int) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with ask("POST", f"{API}/rollouts", data=body, headers=headers) as response:
        assert (await error_of(response))[0] == status


async def test_large_answers_are_compressed_for_those_who_ask(opened: LightningStore) -> None:
    await opened.enqueue_rollout("x" * 100_000)
    async with LightningStoreServer(opened) as server, LightningStoreClient(server.endpoint, compress=True) as client:
        assert (await client.query_rollouts())[0].input == "x" * 100_000
        async with asking(server) as ask:
            async with ask("GET", f"{API}/rollouts", headers={"Accept-Encoding": "gzip"}) as response:
                assert response.headers["Content-Encoding"] == "gzip"
                assert (await response.json()).keys() == {"items", "limit", "offset", "total", "exact"}
            async with ask("GET", f"{API}/rollouts", headers={"Accept-Encoding": "identity"}) as response:
                assert "Content-Encoding" not in response.headers


async def test_an_error_that_nobody_foresaw_has_a_number_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(InMemoryLightningStore):
        async def statistics(self) -> Any:
            raise ZeroDivisionError("secret detail")

    async with Broken() as opened, LightningStoreServer(opened) as server:
        async with asking(server) as ask, ask("GET", f"{API}/statistics") as response:
            status, kind, message = await error_of(response)
        async with LightningStoreClient(server.endpoint) as client:
            with pytest.raises(StoreError, match="failed unexpectedly"):
                await client.statistics()
    assert (status, kind) == (500, "StoreError")
    assert "secret" not in message
    incident = message.rpartition(" ")[2]
    assert incident in caplog.text
    assert "secret detail" in caplog.text


# ---- who may ask -----------------------------------------------------------------------------------------------------------


async def test_only_those_with_the_token_are_served(opened: LightningStore) -> None:
    async with LightningStoreServer(opened, token="sésame") as server:
        async with asking(server) as ask:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}):
                async with ask("GET", f"{API}/statistics", headers=headers) as response:
                    assert (await error_of(response))[0] == 401
                    assert response.headers["WWW-Authenticate"] == "Bearer"
            for path in (f"{API}/health", "/openapi.json"):
                async with ask("GET", path) as response:
                    assert response.status == 200
        async with LightningStoreClient(server.endpoint, token="wrong") as client:
            with pytest.raises(ConfigError, match="token"):
                await client.statistics()
        async with LightningStoreClient(server.endpoint, token="sésame") as client:
            assert (await client.statistics())["total_rollouts"] == 0


async def test_the_environment_may_hold_the_token(opened: LightningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_STORE_TOKEN", "from-outside")
    async with LightningStoreServer(opened, token="from-outside") as server:
        client = LightningStoreClient(server.endpoint)
        assert await client.release_claims() == []
        await client.close()


async def test_a_web_page_that_calls_itself_this_machine_is_refused(ask: Ask, opened: LightningStore) -> None:
    for host, status in {
        "evil.example:80": 403,
        "[::1]:5": 200,
        "localhost": 200,
        "127.0.0.1:1": 200,
        "[": 403,
    }.items():
        async with ask("GET", f"{API}/statistics", headers={"Host": host}) as response:
            assert response.status == status, host
    headers = {"Host": "store.example", "Authorization": "Bearer t"}
    async with (
        LightningStoreServer(opened, token="t") as server,
        asking(server) as ask,
        ask("GET", f"{API}/statistics", headers=headers) as response,
    ):
        assert response.status == 200


async def test_a_list_in_bulk_has_a_limit_that_is_named_and_changes_nothing_beyond_it(opened: LightningStore) -> None:
    async with LightningStoreServer(opened) as server, LightningStoreClient(server.endpoint) as client:
        with pytest.raises(ConfigError, match=r"more than 20,000 rollouts.*send fewer at a time"):
            await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)] * 20_001)
        with pytest.raises(ConfigError, match=r"more than 500,000 objects and lists; send less at a time"):
            await client.enqueue_rollout([[]] * 500_000)
        assert (await opened.query_rollouts()).total == 0
        text = "{[" * 300_000  # a text may have as many as it likes
        assert (await client.enqueue_rollout(text)).input == text
        assert len(await client.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)] * 2_000)) == 2_000


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
async def test_a_page_of_another_site_changes_and_reads_nothing(
    ask: Ask, opened: LightningStore, headers: dict[str, str]
) -> None:
    running = await claimed(opened)
    waiting = await opened.enqueue_rollout("waits")
    await opened.update_worker("w")
    attempts = f"rollouts/{running.rollout_id}/attempts"
    for path in ("queues/rollouts/release", "queues/rollouts/dequeue", "sweep", "workers/w/pause", attempts):
        async with ask("POST", f"{API}/{path}", headers=headers) as response:
            assert (await error_of(response))[:2] == (403, "ConfigError")
    for path in (f"{API}/statistics", "/openapi.json", f"{API}/health"):
        async with ask("GET", path, headers=headers) as response:
            assert response.status == 403
    assert (await opened.get_rollout_by_id(waiting.rollout_id)).status == "queuing"
    assert [attempt.status for attempt in await opened.query_attempts(running.rollout_id)] == ["preparing"]
    (worker,) = await opened.query_workers()
    assert not worker.paused


async def test_a_token_does_not_open_the_store_to_pages_of_another_site(opened: LightningStore) -> None:
    async with LightningStoreServer(opened, token="t") as server, asking(server, Authorization="Bearer t") as ask:
        for origin, status in {"https://evil.example": 403, server.endpoint: 200}.items():
            async with ask("POST", f"{API}/queues/rollouts/release", headers={"Origin": origin}) as response:
                assert response.status == status


async def test_a_request_with_two_hosts_is_refused(opened: LightningStore) -> None:
    async with LightningStoreServer(opened) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        writer.write(f"GET {API}/statistics HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_never_finishes_its_request_is_cut_off(opened: LightningStore) -> None:
    limits = ConnectionLimits(head_seconds=0.2, stall_seconds=0.2)
    head = f"POST {API}/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with LightningStoreServer(opened, connection_limits=limits) as server, asyncio.timeout(20):
        for sent, said in {head: b"", f"{head}Content-Length: 9\r\n\r\n{{": b"HTTP/1.1 408 "}.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
            writer.write(sent.encode())
            assert (await reader.read()).startswith(said)
            writer.close()
            await writer.wait_closed()


def test_a_server_of_all_addresses_has_one_to_connect_to() -> None:
    assert LightningStoreServer(InMemoryLightningStore(), "0.0.0.0", 5, token="t").endpoint == "http://127.0.0.1:5"
    assert LightningStoreServer(InMemoryLightningStore(), "::", 5, token="t").endpoint == "http://[::1]:5"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "store.example"])
def test_other_machines_are_served_with_a_token_only(host: str) -> None:
    with pytest.raises(ConfigError, match=r"give token.*insecure=True"):
        LightningStoreServer(InMemoryLightningStore(), host)
    LightningStoreServer(InMemoryLightningStore(), host, token="t")
    LightningStoreServer(InMemoryLightningStore(), host, insecure=True)
    with pytest.raises(ConfigError, match="token is empty"):
        LightningStoreServer(InMemoryLightningStore(), host, token="")


# ---- its life --------------------------------------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_said(opened: LightningStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=f"port={port}.*port=0"):
            await LightningStoreServer(opened, port=port).start()


async def test_a_server_starts_again_on_its_port(opened: LightningStore) -> None:
    server = LightningStoreServer(opened)
    with pytest.raises(StoreError, match="no address yet"):
        _ = server.endpoint
    await server.start()
    await server.start()
    endpoint = server.endpoint
    async with server.client() as client:
        await client.enqueue_rollout(1)
        await server.stop()
        await server.stop()
        asking = asyncio.create_task(client.query_rollouts())
        await server.start()
        assert server.endpoint == endpoint
        assert [rollout.input for rollout in await asking] == [1]
    await server.stop()


async def test_a_server_that_stops_answers_those_who_wait_and_they_ask_again(opened: LightningStore) -> None:
    rollout = await opened.enqueue_rollout("awaited")
    await opened.dequeue_rollout()
    server = LightningStoreServer(opened)
    await server.start()
    async with server.client() as client:
        claiming = asyncio.create_task(client.dequeue_rollout(timeout_seconds=SOON))
        waiting = asyncio.create_task(client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON))
        await client.statistics()
        async with asyncio.timeout(2.5):  # nobody is waited for
            await server.stop()
        await server.start()
        await opened.enqueue_rollout("claimed")
        await opened.update_rollout(rollout.rollout_id, status="cancelled")
        found = await claiming
        assert found is not None
        assert found.input == "claimed"
        assert [finished.status for finished in await waiting] == ["cancelled"]
        assert (await client.query_rollouts(status_in=["preparing"])).total == 1
    await server.stop()


async def test_the_server_sweeps(opened: LightningStore) -> None:
    async with LightningStoreServer(opened) as server, server.client() as client:
        rollout = await client.start_rollout(1, config=RolloutConfig(timeout_seconds=0.05))
        assert client.capabilities["swept"]
        (finished,) = await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON)
    assert finished.status == "failed"


async def test_who_wants_a_served_file_is_told_where_it_is_served(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "store.db") as opened:
        async with LightningStoreServer(opened) as server:
            told = json.loads((tmp_path / "store.db.lock").read_text())
            assert told["server"] == server.endpoint
        assert "server" not in json.loads((tmp_path / "store.db.lock").read_text())


async def test_a_server_pickles_to_a_client_of_itself(opened: LightningStore) -> None:
    async with LightningStoreServer(opened, token="t") as server:
        await opened.add_resources({"llm": LLM(endpoint="http://x", model="m")})
        async with pickle.loads(pickle.dumps(server)) as client:
            assert isinstance(client, LightningStoreClient)
            assert (await client.get_latest_resources()).resources["llm"].model == "m"
            async with pickle.loads(pickle.dumps(client)) as again:
                assert again.url == client.url == server.endpoint
                assert (await again.statistics())["total_resources"] == 1


async def test_a_process_that_gets_a_pickled_server_loads_no_server(opened: LightningStore) -> None:
    async with LightningStoreServer(opened) as server:
        program = "import pickle, sys; pickle.load(sys.stdin.buffer); print(*sys.modules)"
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE, stdout=PIPE)
        loaded, _ = await child.communicate(pickle.dumps(server))
    assert {b"leyden.store.client"} <= set(loaded.split())
    assert not {b"leyden.store.server", b"uvicorn"} & set(loaded.split())


# ---- clients that leave --------------------------------------------------------------------------------------------------


async def left_while_waiting(server: LightningStoreServer, body: bytes) -> None:
    """Send a claim that waits, and leave before it is answered."""
    host, port = server.endpoint.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {API}/queues/rollouts/dequeue HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    async with asking(server) as ask, ask("GET", f"{API}/statistics") as response:
        assert response.status == 200  # by now the claim has been read
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("claim", [b"", b', "claim_id": "mine"'])
async def test_a_claim_whose_client_left_claims_nothing(opened: LightningStore, claim: bytes) -> None:
    async with LightningStoreServer(opened) as server:
        for _ in range(10):
            await left_while_waiting(server, b'{"timeout_seconds": 60' + claim + b"}")
        async with server.client() as client:
            mine = asyncio.create_task(client.dequeue_rollout(timeout_seconds=SOON))
            await client.statistics()
            await client.enqueue_rollout("for somebody who is there")
            assert await mine is not None


@pytest.mark.parametrize("claim", [b'{"timeout_seconds": 30}', b'{"timeout_seconds": 30, "claim_id": "its own"}'])
async def test_a_client_that_dies_in_the_moment_of_its_claim_claims_nothing(claim: bytes) -> None:
    gone = asyncio.Event()

    class JustThen(InMemoryLightningStore):
        async def dequeue_many_rollouts(self, **options: Any) -> Any:
            claimed = await super().dequeue_many_rollouts(**options)
            gone.set()
            return claimed

    body = [{"type": "http.request", "body": claim, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with JustThen() as store:
        rollout = await store.enqueue_rollout("work")
        path = f"{API}/queues/rollouts/dequeue"
        headers = [(b"content-type", b"application/json")]
        scope = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        await StoreApp(store)(scope, receive, send)
        assert sent == []
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "queuing"
        assert list(await store.query_attempts(rollout.rollout_id)) == []


async def test_a_client_that_sends_half_a_request_holds_nobody_up(opened: LightningStore) -> None:
    async with LightningStoreServer(opened) as server:
        host, port = server.endpoint.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {API}/rollouts HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{{".encode())
        await writer.drain()
        async with server.client() as client:
            assert (await client.statistics())["total_rollouts"] == 0
        writer.close()
        await writer.wait_closed()


async def test_a_request_is_of_no_run_of_the_servers_process() -> None:
    async with InMemoryLightningStore() as store:
        await store.start_run(RunRecord(run_id="here", name="here", kind="fit", start_time=1.0))
        sent: list[Any] = []

        async def post(path: str, body: bytes) -> None:
            async def receive() -> Any:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: Any) -> None:
                sent.append(message)

            path = API + path
            headers = [(b"content-type", b"application/json")]
            scope = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
            await StoreApp(store)(scope, receive, send)

        token = current_run_id.set("here")
        try:
            for path in ("/queues/rollouts/enqueue", "/rollouts"):
                await asyncio.create_task(post(path, b'{"input": 1}'))
        finally:
            current_run_id.reset(token)
        assert [message["status"] for message in sent if "status" in message] == [201, 201]
        assert [rollout.run_id for rollout in await store.query_rollouts()] == [None, None]


async def test_a_request_has_at_most_so_many_metrics() -> None:
    point = {"stage": "train", "iteration": 1, "name": "x", "value": 1.0, "time": 1.0}
    async with InMemoryLightningStore() as opened, LightningStoreServer(opened) as server, asking(server) as ask:
        await opened.start_run(RunRecord(run_id="run", name="run", kind="fit", start_time=1.0))
        path = f"{API}/runs/run/metrics"
        points = [point | {"iteration": i} for i in range(20_001)]
        async with ask("POST", path, data=io.BytesIO(json.dumps(points).encode()), headers=JSON) as response:
            status, kind, message = await error_of(response)
        assert (status, kind) == (400, "ConfigError")
        assert "more than 20,000 points" in message
        async with ask("POST", path, data=io.BytesIO(json.dumps(points[:-1]).encode()), headers=JSON) as response:
            assert response.status == 201
        async with ask("POST", path, json=point | {"value": None}) as response:
            assert (response.status, await response.json()) == (201, None)
        assert (await opened.query_metrics("run", iteration_from=19_000, limit=1)).total == 1000
        async with ask("POST", path, json=point | {"iteration": -1}) as response:
            assert (await error_of(response))[:2] == (400, "ConfigError")
        async with ask("GET", f"{API}/runs/nobody/metrics") as response:
            assert (await error_of(response))[:2] == (404, "UnknownRun")
