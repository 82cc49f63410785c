"""When the model, the agent or the store fails: the agent sees what its client expects, the record what happened."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.errors import StoreError
from leyden.gateway import LLMProxy, UpstreamModel, recorder, transport
from leyden.gateway import gateway_app as app
from leyden.gateway.transport import Arriving
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import LLM, Span, semconv
from tests.gateway.caller import Caller, new_caller, say, until


async def recorded_error(caller: Caller) -> str:
    span = await caller.span()
    assert span.status.status_code == "ERROR"
    assert span.tokens is None
    assert semconv.TOKENS_REFUSED in span.attributes
    return str(span.status.description)


async def post(url: str, asked: Any) -> tuple[int, bytes]:
    status, body, broke_off = await post_and_see(url, asked)
    assert not broke_off
    return status, body


async def post_and_see(url: str, asked: Any) -> tuple[int, bytes, bool]:
    """Post, and return the status, what came of the body, and whether the connection broke before its end."""
    body = b""
    async with aiohttp.ClientSession() as session, session.post(url, json=asked) as response:
        try:
            async for piece in Arriving(response):
                body += piece
        except aiohttp.ClientPayloadError:
            return response.status, body, True
        return response.status, body, False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_an_error_of_the_model_passes_with_status_body_and_headers(
    caller: Caller, upstream: FakeUpstream, status: int, stream: bool
) -> None:
    upstream.misbehave(Misbehaviour(status=status, headers={"retry-after": "7", "x-ratelimit-limit-requests": "1"}))
    with pytest.raises(openai.APIStatusError) as caught:
        await caller.client.chat.completions.create(model="fake", messages=say("hello"), stream=stream)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.response.headers["x-ratelimit-limit-requests"] == "1"
    assert f"set to fail with status {status}" in caught.value.message
    error = await recorded_error(caller)
    assert f"{status}" in error
    assert f"set to fail with status {status}" in error


async def test_a_client_that_tries_again_is_recorded_each_time(caller: Caller, upstream: FakeUpstream) -> None:
    upstream.misbehave(Misbehaviour(status=429, headers={"retry-after-ms": "1"}))
    client = caller.client.with_options(max_retries=2)
    answer = await client.chat.completions.create(model="fake", messages=say("hello"))
    failed, succeeded = await caller.spans()
    assert failed.status.status_code == "ERROR"
    assert succeeded.attributes[semconv.GEN_AI_RESPONSE_ID] == answer.id


GARBAGE = [b"<html>bad gateway</html>", b"", b'{"id": "x"', b"[1, 2]", b"\xff"]


@pytest.mark.parametrize("body", GARBAGE)
async def test_garbage_passes_as_it_came_and_the_record_shows_it(
    caller: Caller, upstream: FakeUpstream, body: bytes
) -> None:
    upstream.misbehave(Misbehaviour(body=body, content_type="text/html"))
    asked = {"model": "fake", "messages": say("hello")}
    assert await post(f"{caller.llm.endpoint}/chat/completions", asked) == (200, body)
    assert "without a JSON object" in await recorded_error(caller)


@pytest.mark.parametrize("body", GARBAGE)
async def test_garbage_in_place_of_an_answer_to_translate_is_a_502_that_shows_it(
    caller: Caller, upstream: FakeUpstream, body: bytes
) -> None:
    upstream.misbehave(Misbehaviour(body=body, content_type="text/html"))
    with pytest.raises(openai.InternalServerError, match="cannot be expressed in responses: the body") as caught:
        await caller.client.responses.create(model="fake", input="hello")
    assert caught.value.status_code == 502
    assert "the body" in await recorded_error(caller)


CHUNK = b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "from the model"}}]}\n\ndata: '
GARBAGE_IN_A_STREAM = [
    b"data: {oops\n\n",
    b"data: [1]\n\n",
    b'data: {"choices": 5}\n\n',
    b'data: {"choices": [{"delta": 1}]}\n\n',
]


@pytest.mark.parametrize("body", GARBAGE_IN_A_STREAM)
async def test_garbage_in_a_stream_passes_as_it_came_and_the_record_names_it(
    caller: Caller, upstream: FakeUpstream, body: bytes
) -> None:
    upstream.misbehave(Misbehaviour(body=body, content_type="text/event-stream"))
    asked = {"model": "fake", "messages": say("hello"), "stream": True}
    assert await post(f"{caller.llm.endpoint}/chat/completions", asked) == (200, body)
    assert "before the answer was finished" in await recorded_error(caller)
    assert (await caller.span()).attributes[semconv.UNREAD]


@pytest.mark.parametrize("body", GARBAGE_IN_A_STREAM)
async def test_garbage_in_a_stream_to_translate_is_an_error_event(
    caller: Caller, upstream: FakeUpstream, body: bytes
) -> None:
    upstream.misbehave(Misbehaviour(body=body, content_type="text/event-stream"))
    stream = await caller.client.responses.create(model="fake", input="hello", stream=True)
    with pytest.raises(openai.APIError, match="cannot be read"):
        async for _ in stream:
            pass
    assert "cannot be read" in await recorded_error(caller)


async def test_a_stream_whose_connection_breaks_breaks_for_the_agent_too(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(Misbehaviour(close_after_chunks=3))
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in await caller.client.chat.completions.create(
            model="fake", messages=say("hello"), stream=True
        ):
            chunks.append(chunk)

    with pytest.raises(openai.APIConnectionError):
        await read()
    assert len(chunks) == 3
    assert "broke off" in await recorded_error(caller)


@pytest.mark.parametrize("n_chunks", [0, 3])
async def test_a_stream_that_ends_before_its_answer_passes_and_is_recorded_as_an_error(
    caller: Caller, upstream: FakeUpstream, n_chunks: int
) -> None:
    upstream.misbehave(Misbehaviour(end_after_chunks=n_chunks), Misbehaviour(end_after_chunks=n_chunks))
    stream = await caller.client.chat.completions.create(model="fake", messages=say("hello"), stream=True)
    assert len([chunk async for chunk in stream]) == n_chunks
    assert "before the answer was finished" in await recorded_error(caller)
    translated = await caller.client.responses.create(model="fake", input="hello", stream=True)
    with pytest.raises(openai.APIError, match="before the answer was finished"):
        async for _ in translated:
            pass


async def test_an_answer_that_breaks_off_breaks_off_for_the_agent_and_a_translated_one_is_a_502(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(*[Misbehaviour(close_after_chunks=0)] * 2)
    with pytest.raises(openai.APIConnectionError):
        await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    assert "broke off" in await recorded_error(caller)
    with pytest.raises(openai.InternalServerError, match="broke off"):
        await caller.client.responses.create(model="fake", input="hello")


@pytest.mark.parametrize("content_type", ["text/html", "application/json", "text/plain"])
async def test_what_is_no_stream_passes_to_a_client_that_wants_one_and_is_recorded_as_an_error(
    caller: Caller, upstream: FakeUpstream, content_type: str
) -> None:
    body = b"<html>please log in</html>"
    upstream.misbehave(Misbehaviour(body=body, content_type=content_type))
    asked = {"model": "fake", "messages": say("hello"), "stream": True}
    assert await post(f"{caller.llm.endpoint}/chat/completions", asked) == (200, body)
    assert "please log in" in await recorded_error(caller)


async def test_a_stream_for_a_client_that_wants_none_passes_unless_it_is_to_be_translated(
    caller: Caller, upstream: FakeUpstream
) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
    upstream.misbehave(*[Misbehaviour(body=body, content_type="text/event-stream")] * 2)
    asked = {"model": "fake", "messages": say("hello"), "return_token_ids": True, "logprobs": True}
    assert await post(f"{caller.llm.endpoint}/chat/completions", asked) == (200, body)
    assert json.loads(str((await caller.span()).attributes[semconv.GEN_AI_OUTPUT_MESSAGES])) == [{"content": "hi"}]
    with pytest.raises(openai.InternalServerError, match="not requested") as caught:
        await caller.client.responses.create(model="fake", input="hello")
    assert caught.value.status_code == 502


async def test_an_answer_of_50_megabytes_passes_and_is_recorded(caller: Caller, upstream: FakeUpstream) -> None:
    text = "x" * 50_000_000
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    upstream.misbehave(Misbehaviour(body=json.dumps({"id": "big", "choices": [choice]}).encode()))
    url = f"{caller.llm.endpoint}/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"model": "fake", "messages": []}) as response,
    ):
        assert response.status == 200
        assert (await response.json())["choices"][0]["message"]["content"] == text
    span = await caller.span()
    assert span.status.status_code == "OK"
    assert len(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])) > len(text)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_gigabytes_to_parse_passes_as_it_came_and_is_recorded_as_an_error(
    caller: Caller, upstream: FakeUpstream, stream: bool
) -> None:
    bomb = b'{"choices": [' + b"{}," * 4_100_000 + b"{}]}"
    body = b"data: " + bomb + b"\n\n" if stream else bomb
    kind = "text/event-stream" if stream else "application/json"
    asked = {"model": "fake", "messages": say("hello"), "stream": stream, "max_tokens": 5}
    upstream.misbehave(Misbehaviour(body=body, content_type=kind))
    assert await post(f"{caller.llm.endpoint}/chat/completions", asked) == (200, body)
    upstream.misbehave(Misbehaviour(body=body, content_type=kind))
    status, said, broke_off = await post_and_see(f"{caller.llm.endpoint}/messages", asked)
    assert (status, broke_off) == ((200, True) if stream else (502, False))
    assert b"more than 4,000,000 objects and lists" in said
    passed, translated = await caller.spans()
    assert passed.status.status_code == translated.status.status_code == "ERROR"
    assert not stream or "objects and lists" in str(passed.attributes[semconv.UNREAD])


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_end_is_cut_off_and_recorded_as_an_error(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch, path: str, status: int, stream: bool
) -> None:
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 10_000_000)
    sent, gone = 0, asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=status)
        response.content_type = "text/event-stream" if stream else "application/json"
        await response.prepare(request)
        try:
            await response.write(CHUNK)
            while True:
                await response.write(b"x" * 100_000)
                sent += 100_000
        finally:
            gone.set()

    application = web.Application()
    application.router.add_post("/v1/{path:.*}", endless)
    server = TestServer(application)
    await server.start_server()
    model = UpstreamModel("fake", str(server.make_url("/v1")))
    async with InMemoryLightningStore() as store, LLMProxy(model_list=[model], store=store) as proxy:
        caller = await new_caller(proxy, store)
        asked = {"model": "fake", "messages": say("hello"), "stream": stream, "max_tokens": 5}
        got, body, broke_off = await post_and_see(f"{caller.llm.endpoint}/{path}", asked)
        assert broke_off is (got == 200)
        assert "more than 10,000,000 bytes" in await recorded_error(caller)
    assert got == (200 if stream and status == 200 else 502)
    assert b"more than 10,000,000 bytes" in body
    assert (b"from the model" in body) is (stream and status == 200)  # the client has what came before
    async with asyncio.timeout(10):
        await gone.wait()
    assert sent < 30_000_000  # what the sockets hold, too
    await server.close()


async def test_an_error_that_the_model_reports_in_its_stream_is_recorded(
    caller: Caller, upstream: FakeUpstream
) -> None:
    event = json.dumps({"error": {"message": "out of memory", "type": "server_error", "code": 500}})
    upstream.misbehave(
        Misbehaviour(body=f"data: {event}\n\ndata: [DONE]\n\n".encode(), content_type="text/event-stream")
    )
    stream = await caller.client.chat.completions.create(model="fake", messages=say("hello"), stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        async for _ in stream:
            pass
    assert "out of memory" in await recorded_error(caller)


async def test_a_model_that_is_not_there_is_a_502_that_names_it(store: InMemoryLightningStore) -> None:
    model = LLM(endpoint="http://127.0.0.1:9/v1", model="fake")
    async with LLMProxy(model_list=[model], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            with pytest.raises(openai.InternalServerError, match=r"cannot reach http://127\.0\.0\.1:9/v1") as caught:
                await client.chat.completions.create(model="fake", messages=say("hello"))
        assert caught.value.status_code == 502
        assert "cannot reach" in await recorded_error(caller)


async def test_a_silent_model_is_a_504_that_names_the_option(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, timeout_seconds=0.2) as proxy:
        caller = await new_caller(proxy, store)
        upstream.misbehave(Misbehaviour(delay_seconds=30), Misbehaviour(chunk_delay_seconds=0.05))
        async with caller.client as client:
            with pytest.raises(openai.InternalServerError, match="timeout_seconds") as caught:
                await client.chat.completions.create(model="fake", messages=say("hello"))
            assert caught.value.status_code == 504
            assert "timeout_seconds" in await recorded_error(caller)
            stream = await client.chat.completions.create(model="fake", messages=say("hello"), stream=True)
            with pytest.raises(openai.APIError, match="timeout_seconds"):
                async for _ in stream:
                    pass
        assert (await caller.spans())[1].status.status_code == "ERROR"
        await until(lambda: upstream.cancelled == 2)


async def test_a_client_that_goes_away_cancels_the_model(caller: Caller, upstream: FakeUpstream) -> None:
    upstream.misbehave(Misbehaviour(delay_seconds=30))
    call = asyncio.create_task(caller.client.chat.completions.create(model="fake", messages=say("hello")))
    await until(upstream.requests.copy)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: upstream.cancelled == 1)
    await until(caller.spans)
    assert "disconnected" in await recorded_error(caller)


async def test_a_client_that_leaves_a_stream_cancels_the_model_and_what_came_is_kept(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(Misbehaviour(chunk_delay_seconds=0.05))
    stream = await caller.client.chat.completions.create(model="fake", messages=say("hello"), stream=True)
    got = ""
    async for chunk in stream:
        got += chunk.choices[0].delta.content or ""
        if len(got) == 3:
            break
    await stream.close()
    await until(lambda: upstream.cancelled == 1)
    await until(caller.spans)
    assert "disconnected" in await recorded_error(caller)
    message = json.loads(str((await caller.span()).attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))[0]
    assert message["content"].startswith(got)


async def test_an_agent_that_stops_reading_at_the_finish_reason_has_a_whole_record(
    caller: Caller, upstream: FakeUpstream
) -> None:
    for number in range(20):
        stream = await caller.client.chat.completions.create(model="fake", messages=say(str(number)), stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                break
        await stream.close()
    spans = await caller.spans()
    assert [span.tokens and span.tokens.response_ids for span in spans] == [
        call.response_ids for call in upstream.calls
    ]


async def test_a_stream_that_stalls_after_its_finish_reason_holds_no_ended_attempt_up(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_REST_SECONDS", 0.2)
    async with (
        FakeUpstream(reply=lambda _: "yes") as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            await client.chat.completions.create(model="fake", messages=say("hi"))
            upstream.misbehave(*[Misbehaviour(stall_after_chunks=1 + len(upstream.calls[0].response_ids))] * 2)
            for leaves in (True, False):
                stream = await client.chat.completions.create(model="fake", messages=say("hi"), stream=True)
                async for chunk in stream:
                    if chunk.choices[0].finish_reason:
                        break
                if leaves:
                    await stream.close()
            proxy.end_attempt(caller.rollout_id, caller.attempt_id)
            async with asyncio.timeout(20):
                spans = await caller.spans()
        assert [span.status.status_code for span in spans] == ["OK", "ERROR", "ERROR"]
        await until(lambda: upstream.cancelled == 2)


async def test_an_agent_that_stops_reading_holds_no_drain_up(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "x" * 2**17}, "finish_reason": None}]}
    body = b"data: %s\n\n" % json.dumps(chunk).encode() * 2**7
    upstream.misbehave(Misbehaviour(body=body, content_type="text/event-stream"))
    async with LLMProxy(model_list=[upstream.llm()], store=store, timeout_seconds=2) as proxy:
        caller = await new_caller(proxy, store)
        body = json.dumps({"model": "fake", "messages": say("hi"), "stream": True}).encode()
        address, path = caller.llm.endpoint.removeprefix("http://").split("/", 1)
        reader, writer = await asyncio.open_connection(*address.split(":"), limit=1024)
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readline()
        async with asyncio.timeout(20):
            await proxy.drain()
        writer.transport.abort()
        assert "within 2 s" in await recorded_error(caller)


async def test_a_store_that_fails_is_told_by_flush_once_and_the_answer_passes(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    await caller.spans()
    await caller.store.close()
    answer = await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    assert answer.choices
    with pytest.raises(StoreError, match=rf"{caller.rollout_id}.*{caller.attempt_id}.*StoreClosed"):
        await caller.proxy.flush(caller.rollout_id, caller.attempt_id)
    await caller.proxy.flush(caller.rollout_id, caller.attempt_id)
    assert "StoreClosed" in caplog.text


async def test_a_failure_is_still_told_after_the_gateway_stopped(caller: Caller) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    await caller.spans()
    await caller.store.close()
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    await caller.proxy.stop()
    with pytest.raises(StoreError, match="StoreClosed"):
        await caller.proxy.flush(caller.rollout_id, caller.attempt_id)


async def test_a_store_that_cannot_be_asked_is_a_503(caller: Caller) -> None:
    await caller.store.close()
    with pytest.raises(openai.InternalServerError, match="cannot reach its store") as caught:
        await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    assert caught.value.status_code == 503


class OneBadAttempt(InMemoryLightningStore):
    """A store that cannot take the spans of one attempt."""

    bad = ""

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        if any(span.attempt_id == self.bad for span in spans):
            raise StoreError("disk full")
        return await super().add_many_spans(spans)


async def test_a_call_that_cannot_be_written_takes_no_sibling_along(upstream: FakeUpstream) -> None:
    async with OneBadAttempt() as store, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        callers = [await new_caller(proxy, store) for _ in range(16)]
        store.bad = callers[5].attempt_id
        await asyncio.gather(
            *(caller.client.chat.completions.create(model="fake", messages=say("hello")) for caller in callers)
        )
        for caller in callers:
            await caller.client.close()
            if caller.attempt_id == store.bad:
                with pytest.raises(StoreError, match="disk full"):
                    await caller.spans()
            else:
                assert (await caller.span()).tokens is not None


class SlowStore(InMemoryLightningStore):
    """A store that takes its time, and remembers how much it was given at once."""

    largest = 0

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.largest = max(self.largest, len(spans))
        await asyncio.sleep(0.05)
        return await super().add_many_spans(spans)


async def test_a_slow_store_gets_batches_and_loses_nothing(upstream: FakeUpstream) -> None:
    async with SlowStore() as store, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        url = f"{caller.llm.endpoint}/completions"
        async with aiohttp.ClientSession() as session, caller.client:

            async def call(number: int) -> None:
                async with session.post(url, json={"model": "fake", "prompt": str(number)}) as response:
                    assert response.status == 200

            await asyncio.gather(*(call(number) for number in range(200)))
        spans = await caller.spans()
        assert {span.attributes[semconv.CALL_INDEX] for span in spans} == set(range(200))
        assert store.largest > 1


class HeldStore(InMemoryLightningStore):
    """A store that writes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await asyncio.to_thread(self.let.wait)  # it is asked in the gateway's loop
        return await super().add_many_spans(spans)


async def test_stop_loses_no_call_that_waits_for_room_in_the_queue(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_QUEUE_LIMIT", 2)
    monkeypatch.setattr(recorder, "_BATCH", 1)
    async with HeldStore() as store, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            calls = [
                asyncio.create_task(client.completions.create(model="fake", prompt=str(number))) for number in range(8)
            ]
            await until(lambda: len(upstream.calls) == len(calls))
            stopping = asyncio.create_task(proxy.stop())
            await asyncio.gather(*calls, return_exceptions=True)
            store.let.set()
            await stopping
        spans = await store.query_spans(caller.rollout_id, caller.attempt_id)
        assert {span.attributes[semconv.CALL_INDEX] for span in spans} == set(range(8))
        assert all(span.tokens is not None for span in spans)


# ---- the run's own engine --------------------------------------------------------------------------------------------


def own_engine(upstream: FakeUpstream) -> UpstreamModel:
    return UpstreamModel(model_name="fake", endpoint=upstream.endpoint, part_of_run=True)


async def test_a_call_that_lost_the_engine_of_its_run_waits_for_the_end_of_its_attempt(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[own_engine(upstream)], store=store, upstream_retries=0) as proxy:
        caller = await new_caller(proxy, store)
        await upstream.stop()
        async with caller.client as client:
            call = asyncio.create_task(client.chat.completions.create(model="fake", messages=say("hello")))
            done, _ = await asyncio.wait({call}, timeout=0.2)
            assert not done
            proxy.end_attempt(caller.rollout_id, caller.attempt_id)
            with pytest.raises(openai.APIStatusError, match="410"):
                await call


async def test_a_dead_engine_that_ends_no_run_is_a_502_in_the_end(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(
        model_list=[own_engine(upstream)], store=store, upstream_retries=0, timeout_seconds=0.3
    ) as proxy:
        caller = await new_caller(proxy, store)
        await upstream.stop()
        async with caller.client as client:
            with pytest.raises(openai.InternalServerError, match="cannot reach"):
                await client.chat.completions.create(model="fake", messages=say("hello"))


async def test_an_engine_that_breaks_one_answer_off_and_lives_breaks_it_off_for_the_agent_at_once(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    upstream.misbehave(Misbehaviour(close_after_chunks=0))
    async with LLMProxy(model_list=[own_engine(upstream)], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="fake", messages=say("hello"))
        assert "broke off" in await recorded_error(caller)
