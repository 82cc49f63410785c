"""Streams that lose token ids, are silent for long, or are no streams at all."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour, Reply
from leyden.testing.fake_tokens import ToolCall
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller, say

LOSSES = [Misbehaviour(lost_response_ids=1), Misbehaviour(no_token_ids=True)]


async def ask(caller: Caller, api: str) -> str:
    """What a streaming client puts together."""
    if api == "chat":
        text = ""
        async for chunk in await caller.client.chat.completions.create(model="fake", messages=say("hi"), stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return text
    if api == "completions":
        text = ""
        async for part in await caller.client.completions.create(model="fake", prompt="hi", stream=True):
            text += part.choices[0].text if part.choices else ""
        return text
    async with caller.client.responses.stream(model="fake", input="hi") as stream:
        return (await stream.get_final_response()).output_text


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
@pytest.mark.parametrize("loss", LOSSES)
async def test_a_server_that_loses_ids_in_streams_is_asked_for_whole_answers(
    caller: Caller, upstream: FakeUpstream, caplog: pytest.LogCaptureFixture, api: str, loss: Misbehaviour
) -> None:
    upstream.misbehave(loss)
    for _ in range(3):
        assert await ask(caller, api) == upstream.calls[-1].text
    first, *others = await caller.spans()
    assert first.tokens is None
    assert semconv.TOKENS_REFUSED in first.attributes
    for span, truth in zip(others, list(upstream.calls)[1:], strict=True):
        assert span.tokens is not None
        assert span.tokens.prompt_ids == truth.prompt_ids
        assert span.tokens.response_ids == truth.response_ids
        assert span.tokens.logprobs == truth.logprobs
    assert [request["stream"] for request in upstream.requests] == [True, False, False]
    assert caplog.text.count("loses token ids") == 1


async def test_a_server_without_ids_in_whole_answers_either_is_streamed_as_it_comes(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(*[Misbehaviour(no_token_ids=True)] * 4)
    for _ in range(4):
        await ask(caller, "chat")
    assert [request["stream"] for request in upstream.requests] == [True, False, True, True]


async def test_a_synthesised_stream_has_tools_reasoning_and_only_what_was_asked_for(
    store: InMemoryLightningStore,
) -> None:
    calls = (ToolCall("look", '{"x":1}'), ToolCall("look", '{"x":2}'))
    async with (
        FakeUpstream(reply=lambda _: Reply("well", "hmm", calls)) as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        upstream.misbehave(Misbehaviour(lost_response_ids=1))
        async with caller.client as client:
            await ask(caller, "chat")
            stream = await client.chat.completions.create(model="fake", messages=say("hi"), stream=True)
            chunks = [chunk async for chunk in stream]
        assert upstream.requests[-1]["stream"] is False
        first = chunks[0].choices[0].delta
        assert first.content == "well"
        assert (first.model_extra or {})["reasoning"] == "hmm"
        assert [(call.index, call.function and call.function.arguments) for call in first.tool_calls or ()] == [
            (0, '{"x":1}'),
            (1, '{"x":2}'),
        ]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert not [chunk for chunk in chunks if chunk.usage or "token_ids" in chunk.model_dump_json()]


async def raw_stream(caller: Caller) -> bytes:
    body = {"model": "fake", "messages": say("hi"), "stream": True}
    url = f"{caller.llm.endpoint}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        return await response.read()


async def test_a_silent_stream_is_kept_alive_by_comments(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, keep_alive_seconds=0.02) as proxy:
        caller = await new_caller(proxy, store)
        upstream.misbehave(
            Misbehaviour(chunk_delay_seconds=0.1), Misbehaviour(lost_response_ids=1), Misbehaviour(delay_seconds=0.3)
        )
        assert (await raw_stream(caller)).count(b": keep-alive\n\n") > 1
        await raw_stream(caller)
        buffered = await raw_stream(caller)
        assert buffered.startswith(b": keep-alive\n\n")
        upstream.misbehave(Misbehaviour(delay_seconds=0.3))
        async with caller.client:
            assert await ask(caller, "chat") == upstream.calls[-1].text
        assert [span.tokens is not None for span in await caller.spans()] == [True, False, True, True]


@pytest.mark.parametrize(("delay", "error"), [(0.0, openai.RateLimitError), (0.3, openai.APIError)])
async def test_an_error_in_place_of_a_buffered_answer_reaches_the_agent(
    upstream: FakeUpstream, store: InMemoryLightningStore, delay: float, error: type[Exception]
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, keep_alive_seconds=0.05 if delay else 60) as proxy:
        caller = await new_caller(proxy, store)
        upstream.misbehave(Misbehaviour(lost_response_ids=1), Misbehaviour(status=429, delay_seconds=delay))
        async with caller.client:
            await ask(caller, "chat")
            with pytest.raises(error, match="set to fail with status 429"):
                await ask(caller, "chat")
        assert "set to fail with status 429" in str((await caller.spans())[1].status.description)


async def test_a_whole_answer_to_a_client_that_wants_a_stream_becomes_one(
    caller: Caller, upstream: FakeUpstream
) -> None:
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    answer = {"id": "x-1", "object": "chat.completion", "created": 0, "model": "fake", "choices": [choice]}
    upstream.misbehave(Misbehaviour(body=json.dumps(answer).encode()))
    assert await ask(caller, "chat") == "ok"
    assert (await caller.span()).attributes[semconv.GEN_AI_RESPONSE_ID] == "x-1"
