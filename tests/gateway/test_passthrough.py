"""What the agent sees: the answer of the model behind the gateway, no more and no less."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import OpenAI

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller, say

OURS = ("prompt_token_ids", "token_ids", "policy_versions")


async def post(url: str, body: Any, **options: Any) -> tuple[int, dict[str, str], bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, **options) as response:
        return response.status, dict(response.headers), await response.read()


def sse(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]


async def test_headers_that_are_not_ascii_pass_as_they_are(caller: Caller, upstream: FakeUpstream) -> None:
    body = {"model": "fake", "messages": say("hello")}
    status, _, _ = await post(f"{caller.llm.endpoint}/chat/completions", body, headers={"x-note": "Größe 雷"})
    assert status == 200
    assert upstream.calls[0].headers["x-note"] == "Größe 雷"


async def test_an_async_client_gets_the_models_answer(caller: Caller, upstream: FakeUpstream) -> None:
    answer = await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    truth = upstream.truth(answer.id)
    assert answer.choices[0].message.content == truth.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(truth.response_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_echoes_its_prompt_and_is_recorded_as_text_that_says_why(
    caller: Caller, upstream: FakeUpstream, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked: Any = {"model": "fake", "prompt": "Once upon a time", "echo": True, "stream": stream}
    if stream:  # with a usage and no ids, which is not the server's fault
        asked["stream_options"] = {"include_usage": True}
    answer: Any = await caller.client.completions.create(**asked)
    if stream:
        text = "".join([choice.text async for chunk in answer for choice in chunk.choices])
    else:
        text = answer.choices[0].text
    assert text == "Once upon a time" + upstream.calls[0].text
    span = await caller.span()
    assert span.tokens is None
    assert "echo" in str(span.attributes[semconv.TOKENS_REFUSED])
    assert "loses token ids" not in caplog.text


async def test_a_sync_client_gets_the_models_answer(caller: Caller, upstream: FakeUpstream) -> None:
    def agent() -> tuple[str, str | None]:
        with OpenAI(base_url=caller.llm.endpoint, api_key=caller.llm.api_key) as client:
            answer = client.chat.completions.create(model="fake", messages=say("hello"))
            stream = client.chat.completions.create(model="fake", messages=say("hello"), stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream), answer.choices[0].message.content

    streamed, whole = await asyncio.to_thread(agent)
    assert streamed == whole == upstream.calls[0].text


async def test_a_stream_arrives_chunk_by_chunk_with_one_chunk_for_each_token(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(Misbehaviour(chunk_delay_seconds=0.005))
    stream = await caller.client.chat.completions.create(model="fake", messages=say("slowly"), stream=True)
    chunks = [chunk async for chunk in stream]
    truth = upstream.calls[0]
    assert len(chunks) == 1 + len(truth.response_ids)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == truth.text
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_completions_take_text_and_token_ids(caller: Caller, upstream: FakeUpstream) -> None:
    text = await caller.client.completions.create(model="fake", prompt="hello")
    ids = await caller.client.completions.create(model="fake", prompt=upstream.calls[0].prompt_ids)
    assert text.choices[0].text == ids.choices[0].text == upstream.calls[0].text


async def test_fields_and_headers_that_the_gateway_does_not_know_reach_the_model(
    caller: Caller, upstream: FakeUpstream
) -> None:
    await caller.client.chat.completions.create(
        model="fake",
        messages=say("hello"),
        extra_body={"guided_regex": "[0-9]+", "nested": {"x": [1.0, None]}},
        extra_headers={"x-session-id": "s-1"},
    )
    request = upstream.calls[0].request
    assert request["guided_regex"] == "[0-9]+"
    assert request["nested"] == {"x": [1.0, None]}
    assert upstream.calls[0].headers["x-session-id"] == "s-1"


async def test_the_model_sees_its_own_key_and_never_the_agents(caller: Caller, upstream: FakeUpstream) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"), extra_headers={"cookie": "a=b"})
    headers = {name.lower(): value for name, value in upstream.calls[0].headers.items()}
    assert headers["authorization"] == "Bearer upstream-key"
    assert "cookie" not in headers


async def test_what_recording_asks_for_is_hidden_from_the_answer(caller: Caller) -> None:
    body = {"model": "fake", "messages": say("hello")}
    _, _, raw = await post(f"{caller.llm.endpoint}/chat/completions", body)
    answer = json.loads(raw)
    choice = answer["choices"][0]
    assert not [name for name in OURS if name in answer or name in choice]
    assert choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] > 0


async def test_what_recording_asks_for_is_hidden_from_a_stream(caller: Caller) -> None:
    body = {"model": "fake", "messages": say("hello"), "stream": True}
    _, _, raw = await post(f"{caller.llm.endpoint}/chat/completions", body)
    chunks = sse(raw)
    assert len(chunks) > 2
    for chunk in chunks:
        assert "usage" not in chunk
        assert len(chunk["choices"]) == 1
        assert chunk["choices"][0]["logprobs"] is None
        assert not [name for name in OURS if name in chunk or name in chunk["choices"][0]]
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_what_the_agent_asked_for_is_shown_to_the_byte(caller: Caller, upstream: FakeUpstream) -> None:
    body = {
        "model": "fake",
        "messages": say("hello"),
        "logprobs": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    for stream in (False, True):
        _, _, through = await post(f"{caller.llm.endpoint}/chat/completions", {**body, "stream": stream})
        _, _, direct = await post(f"{upstream.endpoint}/chat/completions", {**body, "stream": stream})
        ids = upstream.calls[-2].response_id, upstream.calls[-1].response_id
        assert through.replace(ids[0].encode(), ids[1].encode()) == direct


async def test_each_wish_of_the_agent_is_kept_apart(caller: Caller, upstream: FakeUpstream) -> None:
    url = f"{caller.llm.endpoint}/chat/completions"
    _, _, raw = await post(url, {"model": "fake", "messages": say("hello"), "logprobs": True})
    choice = json.loads(raw)["choices"][0]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == upstream.calls[0].logprobs
    assert "token_ids" not in choice
    _, _, raw = await post(url, {"model": "fake", "messages": say("hello"), "return_token_ids": True})
    choice = json.loads(raw)["choices"][0]
    assert choice["token_ids"] == upstream.calls[1].response_ids
    assert choice["logprobs"] is None


async def test_the_gateway_lists_its_models_and_says_that_it_is_well(caller: Caller) -> None:
    models = await caller.client.models.list()
    assert [model.id for model in models.data] == ["fake"]
    root = caller.llm.endpoint.split("/rollout/")[0]
    async with aiohttp.ClientSession() as session, session.get(f"{root}/health") as response:
        assert response.status == 200
        assert await response.json() == {"status": "ok"}


async def test_a_large_prompt_passes(caller: Caller, upstream: FakeUpstream) -> None:
    text = "räuber " * 60_000
    answer = await caller.client.completions.create(model="fake", prompt=text, max_tokens=2)
    assert len(upstream.truth(answer.id).prompt_ids) == len(text.encode())
    span = await caller.span()
    assert span.tokens is not None
    assert span.tokens.prompt_ids == upstream.calls[0].prompt_ids


CHUNK = '{"id": "c", "object": "chat.completion.chunk", "choices": [%s]}'
DELTA = CHUNK % '{"index": 0, "delta": %s, "finish_reason": null}'
ODD = {
    "chat/completions": [
        DELTA % '{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}',
        DELTA % '{"content": 1}',
        DELTA % '{"content": {"text": "h"}}',
        DELTA % '{"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": {"a": 1}}}]}',
        DELTA % '{"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}',
        DELTA % '{"tool_calls": {"index": null, "id": "y", "function": null}}',
        DELTA % '{"tool_calls": [{"index": 1000000000, "id": "z", "function": {"name": "f"}}]}',
        DELTA % '"h"',
        CHUNK % "null",
        CHUNK % '{"index": null, "delta": {"content": "h"}}',
        CHUNK % '{"index": 5, "delta": {"content": "h"}}',
        CHUNK % '{"index": 0, "delta": {}, "finish_reason": {"type": "stop"}}',
        *('{"choices": null}', '{"id": 1, "usage": [1], "choices": 5}', '{"type": "ping"}', "[1, 2]", "{oops", "null"),
        DELTA % '{"audio": {"data": "AA"}, "annotations": [{"a": 1}]}',
        DELTA % '{"audio": "BB", "annotations": {"b": 1}, "content": "!"}',
    ],
    "messages": [
        '{"type": "content_block_delta", "index": 3, "delta": {"type": "text_delta", "text": "h"}}',
        '{"type": "content_block_start", "index": 0, "content_block": {"type": "server_tool_use", "id": "s"}}',
        '{"type": "content_block_start", "index": "1", "content_block": {"type": "text", "text": ["h"]}}',
        *('{"type": "message_start"}', '{"type": "news"}', '{"type": 5}', "[1]", "{oops"),
        '{"type": "message_delta", "delta": {"stop_reason": {"a": 1}}, "usage": [1]}',
    ],
    "responses": [
        '{"type": "response.output_item.added", "output_index": 0, "item": {"type": "web_search_call"}}',
        '{"type": "response.output_text.delta", "delta": {"text": "h"}}',
        '{"type": "response.function_call_arguments.delta", "output_index": 7, "delta": "{}"}',
        *('{"type": "response.created", "response": null}', '{"type": "vendor.news"}', "[1]", "{oops"),
    ],
}


@pytest.mark.parametrize("pieces", ["at once", "each event", "split anywhere"])
@pytest.mark.parametrize(
    ("route", "with_tokens"),
    [("chat/completions", True), ("chat/completions", False), ("messages", False), ("responses", False)],
)
async def test_every_event_passes_whatever_it_holds_and_the_record_names_what_it_could_not_read(
    store: InMemoryLightningStore, route: str, with_tokens: bool, pieces: str
) -> None:
    events = [f"data: {data}\n\n".encode() for data in ODD[route]]
    raw = b"".join([b": hello\n\n", *events, b"data: [DONE]\n\n"])
    parts = {"at once": [raw], "each event": events, "split anywhere": [raw[i : i + 7] for i in range(0, len(raw), 7)]}

    async def odd(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts[pieces]:
            await response.write(part)
        return response

    server = web.Application()
    server.router.add_post(f"/v1/{route}", odd)
    async with TestServer(server) as upstream:
        address = str(upstream.make_url("/v1"))
        model = UpstreamModel("fake", address, dialects=("chat", "messages", "responses"), record_tokens=with_tokens)
        async with LLMProxy(model_list=[model], store=store) as proxy:
            caller = await new_caller(proxy, store)
            asked = {"model": "fake", "messages": say("hi"), "input": "hi", "stream": True}
            _, _, got = await post(f"{caller.llm.endpoint}/{route}", asked)
            span = await caller.span()
    assert got == b"".join(parts[pieces])
    unread = str(span.attributes[semconv.UNREAD])
    assert "events: " in unread
    assert "TypeError" not in unread


async def test_a_stream_in_another_framing_passes_as_it_arrives(store: InMemoryLightningStore) -> None:
    """Lines of JSON without blank lines between them, of which each is read before the next one is sent."""
    read = asyncio.Event()

    async def lines(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        for number in range(3):
            await response.write(b'{"message": %d}\n' % number)
            await read.wait()
            read.clear()
        return response

    server = web.Application()
    server.router.add_post("/v1/chat/completions", lines)
    async with TestServer(server) as upstream:
        model = UpstreamModel("fake", str(upstream.make_url("/v1")), record_tokens=False)
        async with LLMProxy(model_list=[model], store=store) as proxy, aiohttp.ClientSession() as session:
            caller = await new_caller(proxy, store)
            asked = {"model": "fake", "messages": say("hi"), "stream": True}
            async with session.post(f"{caller.llm.endpoint}/chat/completions", json=asked) as response:
                for number in range(3):
                    assert await response.content.readline() == b'{"message": %d}\n' % number
                    read.set()
            assert "before the answer was finished" in str((await caller.span()).status.description)
