"""Calls that must not be made: who asks is told what is wrong, which ids, and what to do."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import psutil
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller, say, until


class Counted:
    """An OpenAI client with its default retries, and how many requests it really sent."""

    def __init__(self, base_url: str, api_key: str = "EMPTY") -> None:
        self.sent = 0
        http = DefaultAsyncHttpxClient(event_hooks={"request": [self._count]})
        self.client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)

    async def _count(self, _: Any) -> None:
        self.sent += 1

    async def refused(self, model: str = "fake") -> openai.APIStatusError:
        async with self.client as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model=model, messages=say("hello"))
        assert self.sent == 1, "the client tried a final refusal again"
        return caught.value


async def test_an_unknown_rollout_is_404_and_not_tried_again(proxy: LLMProxy, upstream: FakeUpstream) -> None:
    error = await Counted(proxy.as_resource("ro-nowhere", "at-1").endpoint).refused()
    assert isinstance(error, openai.NotFoundError)
    assert error.code == "rollout_not_found"
    assert "'ro-nowhere'" in error.message
    assert "memory://" in error.message
    assert not upstream.requests


async def test_an_unknown_attempt_is_404(proxy: LLMProxy, store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout({})
    error = await Counted(proxy.as_resource(rollout.rollout_id, "at-nowhere").endpoint).refused()
    assert error.status_code == 404
    assert error.code == "attempt_not_found"
    assert "'at-nowhere'" in error.message


async def test_the_latest_attempt_is_named_by_its_id(caller: Caller, upstream: FakeUpstream) -> None:
    url = caller.llm.endpoint.replace(caller.attempt_id, "latest")
    with pytest.raises(openai.NotFoundError, match=f"the latest attempt is '{caller.attempt_id}'"):
        await caller.client.with_options(base_url=url).chat.completions.create(model="fake", messages=say("hi"))
    assert not upstream.requests


async def test_an_attempt_that_the_runner_ended_is_410(caller: Caller, upstream: FakeUpstream) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    caller.proxy.end_attempt(caller.rollout_id, caller.attempt_id)
    error = await Counted(caller.llm.endpoint).refused()
    assert error.status_code == 410
    assert error.code == "attempt_ended"
    assert caller.rollout_id in error.message
    assert caller.attempt_id in error.message
    assert len(upstream.requests) == 1


async def test_the_first_late_call_is_in_the_record_of_its_attempt_and_no_more(caller: Caller) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    await caller.store.update_attempt(caller.rollout_id, caller.attempt_id, status="succeeded")
    caller.proxy.end_attempt(caller.rollout_id, caller.attempt_id)
    for _ in range(3):
        await Counted(caller.llm.endpoint).refused()
    answered, late = await caller.spans()
    assert (answered.status.status_code, late.status.status_code) == ("OK", "ERROR")
    assert "the attempt is over" in str(late.status.description)
    assert late.tokens is None
    attempt = await caller.store.get_attempt_by_id(caller.rollout_id, caller.attempt_id)
    assert attempt.status == "succeeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_the_agent_left_under_way_are_given_up_and_recorded_as_that(
    caller: Caller, upstream: FakeUpstream, stream: bool
) -> None:
    upstream.misbehave(Misbehaviour(chunk_delay_seconds=60) if stream else Misbehaviour(delay_seconds=60))
    call = asyncio.create_task(
        caller.client.chat.completions.create(model="fake", messages=say("later"), stream=stream)
    )
    await until(lambda: upstream.requests)
    async with asyncio.timeout(20):
        caller.proxy.end_attempt(caller.rollout_id, caller.attempt_id)
        span = await caller.span()
    assert (span.status.status_code, span.tokens) == ("ERROR", None)
    assert "did not wait" in str(span.status.description)
    if stream:  # it is refused like the other one where the upstream's first byte had not come yet
        with pytest.raises(openai.APIError, match="did not wait"):
            await read_stream(call)
    else:
        with pytest.raises(openai.APIStatusError) as refused:
            await call
        assert refused.value.status_code == 410


async def read_stream(call: asyncio.Task[Any]) -> None:
    async with await call as answer:
        async for _ in answer:
            pass


async def test_an_attempt_that_ended_in_the_store_is_410_even_after_a_restart(caller: Caller) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    await caller.store.update_attempt(caller.rollout_id, caller.attempt_id, status="succeeded")
    caller.proxy.end_attempt(caller.rollout_id, caller.attempt_id)
    await caller.proxy.restart()
    error = await Counted(caller.llm.endpoint).refused()
    assert error.status_code == 410
    assert "succeeded" in error.message


async def test_an_attempt_of_a_cancelled_rollout_is_410(caller: Caller) -> None:
    await caller.store.update_rollout(caller.rollout_id, status="cancelled")
    error = await Counted(caller.llm.endpoint).refused()
    assert error.status_code == 410


@pytest.mark.parametrize("stream", [False, True])
async def test_an_attempt_whose_rollout_is_cancelled_is_refused_soon_and_its_calls_are_given_up(
    caller: Caller, upstream: FakeUpstream, stream: bool
) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    upstream.misbehave(Misbehaviour(chunk_delay_seconds=60) if stream else Misbehaviour(delay_seconds=60))
    call = asyncio.create_task(
        caller.client.chat.completions.create(model="fake", messages=say("later"), stream=stream)
    )
    await until(lambda: len(upstream.requests) == 2)
    started = time.monotonic()
    await caller.store.update_rollout(caller.rollout_id, status="cancelled")
    with pytest.raises(openai.APIError, match=r"ended|did not wait"):
        await (read_stream(call) if stream else call)
    error = await Counted(caller.llm.endpoint).refused()
    assert time.monotonic() - started < 20
    assert (error.status_code, error.code) == (410, "attempt_ended")
    assert len(upstream.requests) == 2


async def test_a_superseded_attempt_still_calls_and_records_in_its_own(caller: Caller) -> None:
    await caller.store.start_attempt(caller.rollout_id)
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    assert (await caller.span()).attempt_id == caller.attempt_id


async def test_an_unknown_model_is_404_names_the_models_and_is_recorded(caller: Caller) -> None:
    error = await Counted(caller.llm.endpoint).refused(model="gpt-0")
    assert error.code == "model_not_found"
    assert "'gpt-0'" in error.message
    assert "'fake'" in error.message
    span = await caller.span()
    assert span.status.status_code == "ERROR"
    assert "gpt-0" in str(span.status.description)
    assert "gpt-0" in str(span.attributes[semconv.TOKENS_REFUSED])


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 150])
async def test_a_body_that_is_no_json_object_is_400_and_recorded(caller: Caller, body: bytes) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{caller.llm.endpoint}/chat/completions", data=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "invalid_json"
    assert (await caller.span()).status.status_code == "ERROR"


async def test_a_call_without_ids_says_which_url_to_use(proxy: LLMProxy) -> None:
    error = await Counted(proxy.endpoint).refused()
    assert error.status_code == 404
    assert "get_base_url" in error.message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "chat/completions", 405), ("POST", "models", 405), ("POST", "images/generations", 404), ("GET", "", 404)],
)
async def test_a_route_that_does_not_exist_is_told_in_openais_shape(
    caller: Caller, method: str, path: str, status: int
) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{caller.llm.endpoint}/{path}", json={}) as response,
    ):
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_ids_of_the_callers_choice_may_hold_any_character(proxy: LLMProxy, store: InMemoryLightningStore) -> None:
    rollout = await store.start_rollout({}, rollout_id="tasks/7 ü?%2F#1")
    caller = Caller(proxy, store, rollout.rollout_id, rollout.attempt.attempt_id)
    async with caller.client as client:
        await client.chat.completions.create(model="fake", messages=say("hello"))
    assert (await caller.span()).rollout_id == "tasks/7 ü?%2F#1"


async def test_a_token_is_demanded_when_there_is_one(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, token="sesame", host="0.0.0.0") as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            await client.chat.completions.create(model="fake", messages=say("hello"))
        error = await Counted(caller.llm.endpoint, api_key="guess").refused()
        assert isinstance(error, openai.AuthenticationError)
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("anthropic", [False, True])
async def test_a_body_that_is_too_large_is_refused_in_the_clients_form_and_never_held(
    upstream: FakeUpstream, store: InMemoryLightningStore, chunked: bool, anthropic: bool
) -> None:
    size = 2**20
    async with LLMProxy(model_list=[upstream.llm()], store=store, max_body_bytes=size) as proxy:
        caller = await new_caller(proxy, store)
        path = "/messages" if anthropic else "/chat/completions"
        headers = {"anthropic-version": "2023-06-01"} if anthropic else {}

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield bytes(size // 2)

        data = parts() if chunked else io.BytesIO(bytes(2 * size))
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(caller.llm.endpoint + path, data=data) as response,
        ):
            told = await response.json()
        assert response.status == 413
        assert told.get("type") == ("error" if anthropic else None)
        assert "1,048,576 bytes" in told["error"]["message"]
        assert "max_body_bytes" in told["error"]["message"]
        assert not upstream.requests
        answer = await caller.client.chat.completions.create(model="fake", messages=say("x" * (size - 2000)))
        assert answer.choices
        await caller.client.close()


@pytest.mark.parametrize("values", [b"[],", b"1,", b'"",'])
async def test_a_body_of_too_much_work_is_refused_in_the_clients_form_before_it_is_parsed(
    upstream: FakeUpstream, caller: Caller, values: bytes
) -> None:
    body = b'{"model": "fake", "messages": [' + values * 4_100_000 + b"1]}"
    async with aiohttp.ClientSession(headers={"anthropic-version": "2023-06-01"}) as session:
        for path in ("chat/completions", "embeddings", "messages", "responses"):
            async with session.post(f"{caller.llm.endpoint}/{path}", data=io.BytesIO(body)) as response:
                told = await response.json()
            assert response.status == 413
            assert "too much work" in told["error"]["message"]
    assert not upstream.requests


@pytest.mark.faults
@pytest.mark.merge
async def test_a_flood_in_one_body_takes_no_more_memory_than_the_limit(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        before, highest = psutil.Process().memory_info().rss, 0

        async def parts() -> AsyncIterator[bytes]:
            nonlocal highest
            part = bytes(2**20)
            for _ in range(400):
                yield part
                highest = max(highest, psutil.Process().memory_info().rss)

        async with (
            aiohttp.ClientSession() as session,
            session.post(caller.llm.endpoint + "/chat/completions", data=parts()) as response,
        ):
            assert response.status == 413
        assert highest - before < 100 * 2**20


# ---- requests that no model should see -------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "fake", "messages": say("hello")},
    "completions": {"model": "fake", "prompt": "hello"},
    "responses": {"model": "fake", "input": "hello"},
    "messages": {"model": "fake", "max_tokens": 5, "messages": say("hello")},
    "embeddings": {"model": "fake", "input": "hello"},
}


WRONG = dict.fromkeys(REQUESTS, "stream") | {"embeddings": "dimensions"}
"""A field of each API in which a string is wrong."""


@pytest.mark.parametrize("value", ["1e999", "NaN", "[-Infinity]", '"yes"'])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_request_that_cannot_be_recorded_or_is_mistyped_is_the_clients_400_and_no_model_is_asked(
    caller: Caller, upstream: FakeUpstream, path: str, value: str
) -> None:
    raw = f'{json.dumps(REQUESTS[path])[:-1]}, "{WRONG[path]}": {value}}}'.encode()
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{caller.llm.endpoint}/{path}", data=raw, headers=headers) as response,
    ):
        body = await response.json()
    assert response.status == 400, body
    assert body["error"]["type"] == "invalid_request_error"
    assert ("type" in body) == (path == "messages"), "Anthropic's form for its clients alone"
    assert not upstream.requests
    span = await caller.span()
    assert span.status.status_code == "ERROR"
    assert body["error"]["message"] == span.status.description


async def test_mistyped_requests_say_nothing_about_the_server(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    """Of two servers that are well, none is left alone for the faults of its clients."""
    async with FakeUpstream() as other:
        models = [UpstreamModel(model_name="fake", endpoint=server.endpoint) for server in (upstream, other)]
        async with LLMProxy(model_list=models, store=store) as proxy:
            for _ in range(4):
                caller = await new_caller(proxy, store)
                async with caller.client as client:
                    with pytest.raises(openai.BadRequestError, match="stream must be true or false"):
                        await client.chat.completions.create(
                            model="fake", messages=say("hello"), extra_body={"stream": "yes"}
                        )
                    await client.chat.completions.create(model="fake", messages=say("hello"))
    assert len(upstream.calls) == len(other.calls) == 2
