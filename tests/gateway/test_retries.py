"""What a client sends again is one call; equal calls that are no retries are two."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from leyden.adapter.calls import model_calls
from leyden.gateway.retries import Retries
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import semconv
from tests.gateway.caller import Caller, say, until

BODY = {"model": "fake", "messages": say("hello")}


async def send(caller: Caller, count: int | None, body: Any = BODY) -> bytes:
    headers = {} if count is None else {"x-stainless-retry-count": str(count)}
    url = f"{caller.llm.endpoint}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return await response.read()


async def test_a_client_whose_answer_was_lost_gets_the_same_again(caller: Caller, upstream: FakeUpstream) -> None:
    lost: list[bytes] = []

    async def lose_the_first(response: Any) -> None:
        if not lost:
            lost.append(await response.aread())
            library: Any = importlib.import_module(type(response).__module__.partition(".")[0])  # httpx or httpx2
            raise library.ReadError("the network broke after the answer was sent")

    http = DefaultAsyncHttpxClient(event_hooks={"response": [lose_the_first]})
    async with AsyncOpenAI(base_url=caller.llm.endpoint, api_key=caller.llm.api_key, http_client=http) as client:
        answer = await client.chat.completions.create(model="fake", messages=say("hello"))
        assert answer.choices[0].message.content == upstream.truth(answer.id).text
    assert len(lost) == len(upstream.requests) == 1
    assert (await caller.span()).attributes[semconv.GEN_AI_RESPONSE_ID] == answer.id


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_replayed_to_the_byte(caller: Caller, upstream: FakeUpstream, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    first = await send(caller, 0, body)
    assert [await send(caller, count, body) for count in (1, 2)] == [first, first]
    assert len(upstream.requests) == len(await caller.spans()) == 1


async def test_equal_calls_stay_two_and_so_do_those_of_clients_that_say_nothing(
    caller: Caller, upstream: FakeUpstream
) -> None:
    await asyncio.gather(send(caller, 0), send(caller, 0), send(caller, None), send(caller, None))
    await send(caller, 1, {"model": "fake", "messages": say("something else")})
    spans = await caller.spans()
    assert sorted(span.attributes[semconv.CALL_INDEX] for span in spans) == [0, 1, 2, 3, 4]
    assert len(upstream.requests) == 5


async def test_a_failed_call_that_is_sent_again_keeps_its_number(caller: Caller, upstream: FakeUpstream) -> None:
    upstream.misbehave(Misbehaviour(status=429, headers={"retry-after-ms": "1"}))
    client = caller.client.with_options(max_retries=2)
    answer = await client.chat.completions.create(model="fake", messages=say("hello"))
    await client.chat.completions.create(model="fake", messages=say("next"))
    failed, succeeded, after = await caller.spans()
    assert [span.attributes[semconv.CALL_INDEX] for span in (failed, succeeded, after)] == [0, 0, 1]
    assert failed.status.status_code == "ERROR"
    assert succeeded.attributes[semconv.RETRY_OF] == failed.span_id
    calls = model_calls([failed, succeeded, after])
    assert len(calls) == 2
    assert calls[0].span.attributes[semconv.GEN_AI_RESPONSE_ID] == answer.id


async def test_a_client_that_lost_patience_and_tries_again_made_one_call(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(Misbehaviour(delay_seconds=30))
    impatient = asyncio.create_task(send(caller, 0))
    await until(upstream.requests.copy)
    impatient.cancel()
    await until(lambda: upstream.cancelled == 1)
    await until(caller.spans)
    assert await send(caller, 1)
    gone, answered = await caller.spans()
    assert "disconnected" in str(gone.status.description)
    assert answered.attributes[semconv.RETRY_OF] == gone.span_id
    assert answered.attributes[semconv.CALL_INDEX] == gone.attributes[semconv.CALL_INDEX]


def test_what_is_kept_for_retries_has_a_bound_and_ends_with_the_attempt() -> None:
    scope = {"headers": [(b"x-stainless-retry-count", b"0")]}
    again = {"headers": [(b"x-stainless-retry-count", b"1")]}
    retries = Retries(limit_bytes=20_000)
    for number in range(100):
        one = retries.begin(("r", "a"), "p", b"%d" % number, scope, call_index=number, span_id="s")
        assert one is not None
        retries.answered(one, [], b"x" * 1000)
    assert 5 < len(retries) < 20
    assert retries.earlier(("r", "a"), "p", b"0", again) is None
    assert retries.earlier(("r", "b"), "p", b"99", again) is None
    newest = retries.earlier(("r", "a"), "p", b"99", again)
    assert newest is not None
    assert newest.call_index == 99
    retries.end(("r", "a"))
    assert len(retries) == 0
