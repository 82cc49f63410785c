"""An upstream that cuts its answer: what real clients see through the gateway, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden._lib.attempt_key import attempt_key
from leyden._lib.host.http import read_body
from leyden.adapter import TraceToMessages, TraceToTrajectory, TraceToTriplet
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.gateway.gateway_workers import GatewayWorkers
from leyden.store import InMemoryLightningStore, LightningStoreServer
from leyden.testing import Misbehaviour, ServedCall
from leyden.testing.api_answers import ANSWERS
from leyden.testing.fake_tokens import ChatTurn, response_ids_of
from leyden.types import Span, semconv
from tests.gateway.caller import Caller, new_caller, say
from tests.gateway.conversations import HAS_ANTHROPIC
from tests.gateway.test_hosted import run_by

TEXT = "It was a dark and stormy night, and the rain fell in torrents."
APIS = ("chat/completions", "completions", "responses", *(("messages",) if HAS_ANTHROPIC else ()))
DIALECTS = ("chat", "completions", "responses", "messages")


def served(api: str) -> Any:
    ids = response_ids_of(ChatTurn("assistant", TEXT))
    logprobs = [-0.5] * len(ids)
    call = ServedCall("id-1", f"/v1/{api}", {}, {"model": "m"}, [1, 2], ids, logprobs, TEXT, "stop")
    return ANSWERS[api](call, Misbehaviour(), policy_version=None)


def begun(api: str, *, stream: bool) -> bytes:
    """The first half of an answer; of a stream some whole events and the half of another."""
    if not stream:
        whole = json.dumps(served(api).whole()).encode()
        return whole[: len(whole) // 2]
    events = served(api).events()
    return b"".join(events[:9]) + events[9][: len(events[9]) // 2]


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def gzipped(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(body) + packer.flush(zlib.Z_SYNC_FLUSH)  # the member goes on


@dataclass(frozen=True)
class Cut:
    """How an upstream ends before its answer does."""

    headers: bytes
    written: Callable[[bytes], bytes]
    reset: bool = False


CHUNKED = b"transfer-encoding: chunked\r\n"
CUTS = {
    "without the last chunk": Cut(CHUNKED, chunked),
    "in the middle of a chunk": Cut(CHUNKED, lambda body: b"%x\r\n%s" % (len(body) + 100, body)),
    "reset": Cut(CHUNKED, chunked, reset=True),
    "short of its length": Cut(b"content-length: 100000\r\n", bytes),
    "reset, without a length": Cut(b"connection: close\r\n", bytes, reset=True),
    "in a gzip member": Cut(CHUNKED + b"content-encoding: gzip\r\n", lambda body: chunked(gzipped(body))),
}


class Upstream:
    """A server that sends each client the same bytes, and then ends the connection."""

    def __init__(self, api: str, cut: Cut, *, stream: bool) -> None:
        self.requests = 0
        self._body, self._cut = begun(api, stream=stream), cut
        self._type = b"text/event-stream" if stream else b"application/json"

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        self.model = UpstreamModel("m", self.endpoint, dialects=DIALECTS, record_tokens=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        self.requests += 1
        head = b"HTTP/1.1 200 OK\r\ncontent-type: " + self._type + b"\r\n" + self._cut.headers + b"\r\n"
        writer.write(head + self._cut.written(self._body))
        if self._cut.reset:
            await asyncio.sleep(0.1)  # a reset discards what the client has not read yet
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        else:
            writer.close()


async def ask(api: str, url: str, key: str, *, stream: bool) -> tuple[list[Any], Exception | None]:
    """What a client read, and the error that it raised, if one."""
    read: list[Any] = []
    try:
        if api == "messages":
            import anthropic

            async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as other:
                asked: Any = {"model": "m", "messages": say("hi"), "max_tokens": 9}
                answer: Any = await other.messages.create(**asked, stream=stream)
                await into(read, answer, stream=stream)
            return read, None
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            if api == "responses":
                answer = await client.responses.create(model="m", input="hi", stream=stream)
            elif api == "completions":
                answer = await client.completions.create(model="m", prompt="hi", stream=stream)
            else:
                answer = await client.chat.completions.create(model="m", messages=say("hi"), stream=stream)
            await into(read, answer, stream=stream)
    except Exception as error:  # noqa: BLE001 -- which one it is, is what the tests are about
        return read, error
    return read, None


async def into(read: list[Any], answer: Any, *, stream: bool) -> None:
    if not stream:
        read.append(answer.model_dump())
        return
    async for event in answer:
        read.append(event.model_dump())


def is_lost_connection(error: Exception | None) -> bool:
    """Anthropic's client passes an error in a stream as its HTTP library raises it."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"APIConnectionError", "TransportError"})


async def of_gateway(caller: Caller, api: str, *, stream: bool) -> tuple[list[Any], Exception | None]:
    return await ask(api, caller.llm.endpoint, caller.llm.api_key or "none", stream=stream)


def assert_partial(spans: list[Span]) -> None:
    """The calls are recorded as failed, and nothing of them is trained on."""
    assert spans
    for span in spans:
        assert span.status.status_code == "ERROR"
        assert "broke off" in str(span.status.description)
        assert span.tokens is None
        assert "broke off" in str(span.attributes[semconv.TOKENS_REFUSED])
    assert TraceToTrajectory().adapt(spans) == []
    assert TraceToTriplet().adapt(spans) == []
    assert TraceToMessages().adapt(spans) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("how", CUTS)
async def test_an_agent_sees_a_cut_answer_as_it_would_without_the_gateway(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture, how: str, api: str, stream: bool
) -> None:
    caplog.set_level(logging.WARNING)
    async with Upstream(api, CUTS[how], stream=stream) as upstream:
        direct, lost = await ask(api, upstream.endpoint, "none", stream=stream)
        assert is_lost_connection(lost)
        assert bool(direct) is stream
        async with LLMProxy(model_list=[upstream.model], store=store) as proxy:
            caller = await new_caller(proxy, store)
            read, error = await of_gateway(caller, api, stream=stream)
            assert is_lost_connection(error), error
            assert read == direct
            assert_partial(await caller.spans())
            (status,) = proxy.upstreams()
            assert not status.healthy
        assert upstream.requests == 2  # an answer that has begun is not asked for again
    (line,) = caplog.records
    assert "broke off" in line.message
    assert line.exc_info is None


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_byte_before_the_cut_passes_and_nothing_after_it(
    store: InMemoryLightningStore, stream: bool, connection: str
) -> None:
    async with (
        Upstream("chat/completions", CUTS["in the middle of a chunk"], stream=stream) as upstream,
        LLMProxy(model_list=[upstream.model], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        body = json.dumps({"model": "m", "messages": say("hi"), "stream": stream}).encode()
        address, path = caller.llm.endpoint.removeprefix("http://").split("/", 1)
        reader, writer = await asyncio.open_connection(*address.split(":"))
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer, _, got = (await reader.read()).partition(b"\r\n\r\n")  # to the end of the connection
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert unchunked(got) == begun("chat/completions", stream=stream)


def unchunked(rest: bytes) -> bytes:
    """The bytes of chunks, of which none is the last."""
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        n_bytes = int(size, 16)
        assert n_bytes > 0
        body, rest = body + rest[:n_bytes], rest[n_bytes + 2 :]
    return body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "other"), [("responses", "chat"), ("chat/completions", "responses")])
async def test_a_translated_answer_that_was_cut_is_an_error_that_says_so_and_never_a_whole_one(
    store: InMemoryLightningStore, api: str, other: Literal["chat", "responses"], stream: bool
) -> None:
    there = {"chat": "chat/completions", "responses": "responses"}[other]
    async with Upstream(there, CUTS["without the last chunk"], stream=stream) as upstream:
        model = UpstreamModel("m", upstream.endpoint, dialects=(other,), record_tokens=False)
        async with LLMProxy(model_list=[model], store=store) as proxy:
            caller = await new_caller(proxy, store)
            read, error = await of_gateway(caller, api, stream=stream)
            assert isinstance(error, openai.APIError)
            assert "broke off" in str(error)
            assert bool(read) is stream
            assert isinstance(error, openai.InternalServerError) is not stream
            assert_partial(await caller.spans())
            if stream:
                body = {"model": "m", "messages": say("hi"), "input": "hi", "stream": True}
                url = f"{caller.llm.endpoint}/{api}"
                async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                    with pytest.raises(aiohttp.ClientPayloadError):  # for clients that know no error events
                        await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_hidden_fields_breaks_off_too_and_shows_none_of_them(
    store: InMemoryLightningStore, stream: bool
) -> None:
    async with Upstream("chat/completions", CUTS["without the last chunk"], stream=stream) as upstream:
        model = UpstreamModel("m", upstream.endpoint, dialects=DIALECTS)
        async with LLMProxy(model_list=[model], store=store) as proxy:
            caller = await new_caller(proxy, store)
            read, error = await of_gateway(caller, "chat/completions", stream=stream)
            assert isinstance(error, openai.APIConnectionError)
            direct, _ = await ask("chat/completions", upstream.endpoint, "none", stream=stream)
            assert len(read) == len(direct)
            assert_partial(await caller.spans())


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_breaks_off_in_another_worker_breaks_off_for_the_agent(stream: bool) -> None:
    async with (
        Upstream("chat/completions", CUTS["without the last chunk"], stream=stream) as upstream,
        InMemoryLightningStore() as store,
        LightningStoreServer(store) as server,
    ):
        direct, _ = await ask("chat/completions", upstream.endpoint, "none", stream=stream)
        started = [await store.start_rollout({}) for _ in range(12)]
        keys = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in started]
        at: Any = {"store_url": server.endpoint, "control_secret": None, "host": "127.0.0.1", "port": 0}
        async with GatewayWorkers(2, **at, token="sesame", model_list=[upstream.model]) as gateway:
            found = await asyncio.gather(
                *(ask("chat/completions", gateway.endpoint, attempt_key("sesame", *key), stream=stream) for key in keys)
            )
        for read, error in found:  # the kernel gives some to the worker that has not their attempt
            assert isinstance(error, openai.APIConnectionError)
            assert read == direct
        for key in keys:
            assert_partial(list(await store.query_spans(*key)))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_ends_in_its_answer_breaks_it_off_for_the_agent_of_its_process(
    store: InMemoryLightningStore, stream: bool
) -> None:
    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await read_body(dict(scope["headers"]), receive, max_bytes=2**20)
        kind = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        body = begun("chat/completions", stream=stream)
        await send({"type": "http.response.body", "body": body, "more_body": True})

    proxy = LLMProxy(store=store)
    await proxy.reserve()
    async with run_by(proxy, engine):
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            asked: Any = {"model": "policy", "messages": say("hi"), "stream": stream}
            read: list[Any] = []
            with pytest.raises(openai.APIConnectionError):
                await into(read, await client.chat.completions.create(**asked), stream=stream)
        assert bool(read) is stream
        (span,) = await caller.spans()
        assert "in the middle of its answer" in str(span.status.description)
    await proxy.stop()


class Stalling:
    """A server that stalls in the middle of an event of a stream, until the test lets it go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.events = served("chat/completions").events()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self.events[0] + self.events[1][:20])
        await self.go_on.wait()
        await response.write(self.events[1][20:])
        for event in self.events[2:]:
            await response.write(event)
        return response


@asynccontextmanager
async def stalling(store: InMemoryLightningStore, **options: Any) -> AsyncIterator[tuple[Stalling, Caller]]:
    handler, application = Stalling(), web.Application()
    application.router.add_post("/v1/chat/completions", handler.answer)
    server = TestServer(application)
    await server.start_server()
    model = UpstreamModel("m", str(server.make_url("/v1")), record_tokens=False)
    async with LLMProxy(model_list=[model], store=store, **options) as proxy:
        yield handler, await new_caller(proxy, store)
    await server.close()


async def test_no_comment_is_put_into_an_event(store: InMemoryLightningStore) -> None:
    async with stalling(store, keep_alive_seconds=0.02) as (upstream, caller), aiohttp.ClientSession() as session:
        asked = {"model": "m", "messages": say("hi"), "stream": True}
        async with session.post(f"{caller.llm.endpoint}/chat/completions", json=asked) as response:
            got = await response.content.readexactly(len(upstream.events[0]) + 20)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):  # fifteen times the silence that calls for a comment
                    got += await response.content.readany()
            upstream.go_on.set()
            got += await response.read()
        assert got == b"".join(upstream.events)
        assert (await caller.span()).status.status_code == "OK"


async def test_a_stream_that_the_gateway_ends_inside_an_event_breaks_off_there(store: InMemoryLightningStore) -> None:
    async with stalling(store, timeout_seconds=0.3) as (upstream, caller):
        read, error = await of_gateway(caller, "chat/completions", stream=True)
        assert isinstance(error, openai.APIConnectionError)  # and no event that is half the model's
        assert len(read) == 1
        assert "timeout_seconds" in str((await caller.span()).status.description)
        upstream.go_on.set()
