"""What each API promises its clients beyond a conversation: errors in its own shape, its own headers, its own state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from leyden._lib.host.http import Refusal
from leyden.adapter import LlmProxyTraceToTriplet
from leyden.dialects import DIALECTS
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.responses import KeptResponses
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour, Reply, ToolCall
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller, say, until

ANTHROPIC = {"anthropic-version": "2023-06-01", "x-api-key": "EMPTY"}


async def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status, dict(response.headers), await response.read()


def asked(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 100, "messages": say(text), **fields}


@pytest.fixture
async def anthropic_client(caller: Caller) -> AsyncIterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    base_url = caller.llm.endpoint.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=caller.llm.api_key, max_retries=0) as client:
        yield client


async def through(spoken: Any, upstream: FakeUpstream, store: InMemoryLightningStore, **options: Any) -> LLMProxy:
    """A gateway before a server that speaks one dialect."""
    model = UpstreamModel("fake", upstream.endpoint, dialects=(spoken,), record_tokens=False, **options)
    proxy = LLMProxy(model_list=[model], store=store)
    await proxy.start()
    return proxy


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "name"), [(400, "BadRequestError"), (429, "RateLimitError"), (500, "InternalServerError")]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_model_is_one_of_anthropics(
    caller: Caller, upstream: FakeUpstream, anthropic_client: Any, status: int, name: str, stream: bool
) -> None:
    import anthropic

    upstream.misbehave(Misbehaviour(status=status, headers={"retry-after": "7"}))
    with pytest.raises(getattr(anthropic, name), match=f"set to fail with status {status}") as caught:
        await anthropic_client.messages.create(**asked(), stream=stream)
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.body["type"] == "error"
    span = await caller.span()
    assert f"set to fail with status {status}" in str(span.status.description)


async def test_an_anthropic_client_is_told_of_a_broken_stream(
    caller: Caller, upstream: FakeUpstream, anthropic_client: Any
) -> None:
    import anthropic

    upstream.misbehave(Misbehaviour(close_after_chunks=3))
    with pytest.raises(anthropic.APIError, match="broke off"):
        async for _ in await anthropic_client.messages.create(**asked(), stream=True):
            pass
    assert "broke off" in str((await caller.span()).status.description)


async def test_a_responses_client_is_told_of_a_broken_stream(caller: Caller, upstream: FakeUpstream) -> None:
    upstream.misbehave(Misbehaviour(close_after_chunks=3))
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in await caller.client.responses.create(model="fake", input="hello", stream=True):
            pass
    assert "broke off" in str((await caller.span()).status.description)


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_an_error_that_the_model_reports_in_its_stream_reaches_the_agent_in_its_dialect(
    caller: Caller, upstream: FakeUpstream, path: str
) -> None:
    event = json.dumps({"error": {"message": "out of memory", "type": "server_error", "code": 500}})
    body = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    upstream.misbehave(Misbehaviour(body=body, content_type="text/event-stream"))
    _, _, raw = await post(f"{caller.llm.endpoint}/{path}", {**asked(), "input": "hello", "stream": True})
    (line,) = [line for line in raw.splitlines() if line.startswith(b"data:")]
    found = json.loads(line[5:])
    assert found["type"] == "error"
    assert found["error"]["message"] == "out of memory"
    assert "out of memory" in str((await caller.span()).status.description)


@pytest.mark.parametrize(
    ("change", "status", "kind", "text"),
    [
        ({"model": "gpt-0"}, 404, "not_found_error", "'gpt-0'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0].type"),
    ],
)
async def test_a_refused_call_is_an_error_of_anthropics_that_names_what_is_wrong(
    caller: Caller, upstream: FakeUpstream, change: dict[str, Any], status: int, kind: str, text: str
) -> None:
    found, headers, raw = await post(f"{caller.llm.endpoint}/messages", asked(**change), **ANTHROPIC)
    assert found == status
    assert headers["x-should-retry"] == "false"
    error = json.loads(raw)
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert text in error["error"]["message"]
    assert not upstream.requests
    assert text in str((await caller.span()).status.description)


async def test_a_field_that_cannot_be_translated_is_the_errors_param_for_openais_client(caller: Caller) -> None:
    with pytest.raises(openai.BadRequestError, match="background") as caught:
        await caller.client.responses.create(model="fake", input="hello", background=True)
    assert caught.value.param == "background"


async def test_an_attempt_that_ended_is_410_for_anthropics_client_too(caller: Caller) -> None:
    caller.proxy.end_attempt(caller.rollout_id, caller.attempt_id)
    status, _, raw = await post(f"{caller.llm.endpoint}/messages", asked(), **ANTHROPIC)
    assert status == 410
    assert json.loads(raw)["type"] == "error"


async def test_an_answer_that_the_dialect_cannot_say_is_a_502_and_recorded(
    caller: Caller, upstream: FakeUpstream
) -> None:
    choices = [{"index": i, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"} for i in (0, 1)]
    upstream.misbehave(Misbehaviour(body=json.dumps({"id": "c", "choices": choices}).encode()))
    status, _, raw = await post(f"{caller.llm.endpoint}/messages", asked(n=2), **ANTHROPIC)
    assert status == 502
    assert "choices" in json.loads(raw)["error"]["message"]
    assert "choices" in str((await caller.span()).status.description)


@pytest.mark.parametrize("path", ["messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_the_model(
    caller: Caller, upstream: FakeUpstream, path: str, stream: bool
) -> None:
    upstream.misbehave(Misbehaviour(chunk_delay_seconds=30) if stream else Misbehaviour(delay_seconds=30))
    body = {**asked(), "input": "hello", "stream": stream}
    call = asyncio.create_task(post(f"{caller.llm.endpoint}/{path}", body))
    await until(upstream.requests.copy)
    call.cancel()
    await until(lambda: upstream.cancelled == 1)
    await until(caller.spans)
    assert "disconnected" in str((await caller.span()).status.description)


# ---- requests --------------------------------------------------------------------------------------------------------


async def test_a_key_is_read_where_anthropics_clients_put_it(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, token="sesame") as proxy:
        caller = await new_caller(proxy, store)
        url = f"{caller.llm.endpoint}/messages"
        for headers, wanted in (
            ({"x-api-key": "sesame"}, 200),
            ({"authorization": "Bearer sesame"}, 200),
            ({"x-api-key": "guess"}, 401),
            ({}, 401),
        ):
            status, _, raw = await post(url, asked(), **{"anthropic-version": "2023-06-01", **headers})
            assert status == wanted
        assert json.loads(raw)["error"]["type"] == "authentication_error"
        assert "x-api-key" not in {name.lower() for call in upstream.calls for name in call.headers}


async def test_an_anthropic_server_gets_its_key_and_version_as_it_wants_them(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    proxy = await through("messages", upstream, store, api_key="secret")
    try:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            await client.chat.completions.create(model="fake", messages=say("hello"))
    finally:
        await proxy.stop()
    headers = {name.lower(): value for name, value in upstream.calls[0].headers.items()}
    assert (headers["x-api-key"], headers["anthropic-version"]) == ("secret", "2023-06-01")
    assert "authorization" not in headers


async def test_fields_that_nobody_knows_reach_the_model(caller: Caller, upstream: FakeUpstream) -> None:
    extra = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}
    await post(f"{caller.llm.endpoint}/messages", asked(**extra))
    await post(f"{caller.llm.endpoint}/responses", {"model": "fake", "input": "hello", **extra})
    for request in upstream.requests:
        assert {name: request.get(name) for name in extra} == extra


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_what_recording_asks_for_is_hidden_from_agents_of_every_dialect(
    caller: Caller, upstream: FakeUpstream, path: str, stream: bool
) -> None:
    body = {**asked(), "input": "hello", "stream": stream}
    _, headers, raw = await post(f"{caller.llm.endpoint}/{path}", body)
    assert headers["Content-Type"].startswith("text/event-stream" if stream else "application/json")
    assert upstream.requests[0]["return_token_ids"] is True
    assert not any(name in raw for name in (b"token_ids", b"policy_versions", b"-0.", b"token_id:"))


async def test_a_seed_is_given_to_calls_of_every_dialect(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, deterministic_seed=3) as proxy:
        caller = await new_caller(proxy, store)
        await post(f"{caller.llm.endpoint}/messages", asked())
        await post(f"{caller.llm.endpoint}/responses", {"model": "fake", "input": "hello"})
        spans = await caller.spans()
    seeds = [request["seed"] for request in upstream.requests]
    assert len(set(seeds)) == 2
    assert [span.attributes["gen_ai.request.seed"] for span in spans] == seeds


async def test_a_route_that_the_server_lacks_and_that_cannot_be_translated_is_named(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    proxy = await through("chat", upstream, store)
    try:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            with pytest.raises(openai.NotFoundError, match="dialects") as caught:
                await client.completions.create(model="fake", prompt="hello")
        assert caught.value.code == "dialect_not_served"
    finally:
        await proxy.stop()


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("spoken", ["messages", "responses"])
async def test_bytes_pass_as_they_are_where_both_speak_the_same(
    store: InMemoryLightningStore, spoken: str, stream: bool
) -> None:
    calls = (ToolCall("t", '{"a": "ü"}', "c0"), ToolCall("t", "{}", "c1"))
    async with FakeUpstream(reply=lambda _: Reply("Let me see 雷.", "hm", calls)) as upstream:
        proxy = await through(spoken, upstream, store)
        try:
            caller = await new_caller(proxy, store)
            body = {**asked(), "input": "hello", "stream": stream}
            _, _, shown = await post(f"{caller.llm.endpoint}/{spoken}", body)
            _, _, direct = await post(f"{upstream.endpoint}/{spoken}", body)
            span = await caller.span()
        finally:
            await proxy.stop()
        first, second = (call.response_id.encode() for call in upstream.calls)
        assert shown.replace(first, second) == direct
        assert upstream.requests[0] == upstream.requests[1]
    (message,) = json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    assert message["content"] == "Let me see 雷."
    assert message["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": "ü"}', "{}"]
    assert span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] == len(upstream.calls[0].response_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_chat_has_no_words_for_still_passes_between_two_that_have(
    store: InMemoryLightningStore, upstream: FakeUpstream, stream: bool
) -> None:
    proxy = await through("messages", upstream, store)
    content = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]
    whole: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": "fake", "content": content}
    start = {**whole, "content": []}
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": content[0]},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ]
    body = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    body = body if stream else json.dumps(whole).encode()
    kind = "text/event-stream" if stream else "application/json"
    upstream.misbehave(Misbehaviour(body=body, content_type=kind))
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    try:
        caller = await new_caller(proxy, store)
        status, _, raw = await post(f"{caller.llm.endpoint}/messages", asked(tools=tools, stream=stream))
        span = await caller.span()
    finally:
        await proxy.stop()
    assert (status, raw) == (200, body)
    assert span.status.status_code == "OK"
    assert "web_search" in str(span.attributes[semconv.GEN_AI_TOOL_DEFINITIONS])


async def test_a_call_is_described_in_the_same_attributes_whatever_it_came_in(caller: Caller) -> None:
    system = {"role": "system", "content": "Be brief."}
    await caller.client.chat.completions.create(
        model="fake", messages=[system, *say("hello")], max_tokens=5, temperature=0.5
    )
    await post(f"{caller.llm.endpoint}/messages", asked(system="Be brief.", max_tokens=5, temperature=0.5))
    settings = {"instructions": "Be brief.", "max_output_tokens": 5, "temperature": 0.5}
    await post(f"{caller.llm.endpoint}/responses", {"model": "fake", "input": "hello", **settings})
    spans = await caller.spans()
    own = {
        *(semconv.CALL_INDEX, semconv.GEN_AI_RESPONSE_ID, "gen_ai.request.max_completion_tokens"),
        *(semconv.KNOWN_PREFIX, semconv.GOES_ON_FROM, semconv.SENT_TIME),
        semconv.USER_AGENT,
        semconv.REQUEST_FIELDS,  # named as the client's API names them
    }
    chat, messages, responses = (
        {name: value for name, value in span.attributes.items() if name not in own} for span in spans
    )
    assert chat == messages == {**responses, "gen_ai.request.max_tokens": 5}
    assert all(span.tokens is not None for span in spans)


async def test_models_are_listed_as_each_client_reads_them(caller: Caller, anthropic_client: Any) -> None:
    listed = await anthropic_client.models.list()
    assert [(model.id, model.type) for model in listed.data] == [("fake", "model")]
    assert [model.id for model in (await caller.client.models.list()).data] == ["fake"]


async def test_embeddings_pass_and_are_no_call_to_train_on(caller: Caller, upstream: FakeUpstream) -> None:
    await caller.client.chat.completions.create(model="fake", messages=say("hello"))
    found = await caller.client.embeddings.create(model="fake", input=["a", "b"])
    assert [len(item.embedding) for item in found.data] == [8, 8]
    assert "return_token_ids" not in upstream.requests[1]
    spans = await caller.spans()
    assert [span.name for span in spans] == [semconv.MODEL_CALL, semconv.EMBEDDINGS]
    assert spans[1].attributes[semconv.GEN_AI_INPUT_TOKENS] == 2
    assert semconv.TOKENS_REFUSED not in spans[1].attributes
    assert len(LlmProxyTraceToTriplet().adapt(spans)) == 1


# ---- the state of the Responses API ----------------------------------------------------------------------------------


async def test_a_kept_response_can_be_read_and_deleted_until_its_attempt_ends(caller: Caller) -> None:
    client = caller.client
    first = await client.responses.create(model="fake", input="hello")
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    second = await client.responses.create(model="fake", input="and then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    await client.responses.delete(second.id)
    for missing in (second.id, "resp_nowhere"):
        with pytest.raises(openai.NotFoundError, match="store=false"):
            await client.responses.create(model="fake", input="more", previous_response_id=missing)
    unkept = await client.responses.create(model="fake", input="hello", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)


async def test_a_response_of_another_attempt_is_not_told(
    caller: Caller, proxy: LLMProxy, store: InMemoryLightningStore
) -> None:
    first = await caller.client.responses.create(model="fake", input="a secret")
    other = await new_caller(proxy, store)
    async with AsyncOpenAI(base_url=other.llm.endpoint, api_key="EMPTY", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="another attempt"):
            await client.responses.create(model="fake", input="what?", previous_response_id=first.id)


def test_what_is_kept_has_a_bound_and_ends_with_the_attempt() -> None:
    kept, conversations = KeptResponses(limit_bytes=100), DIALECTS["responses"].conversations
    assert conversations is not None
    keys: list[AttemptKey] = [("ro", "at-1"), ("ro", "at-2")]
    for key in keys:
        for number in range(2):
            kept.keep(key, {"input": "x"}, {"id": f"r{number}", "output": []}, conversations, n_bytes=30)
    with pytest.raises(Refusal, match="dropped"):
        kept.get(keys[0], "r0")
    assert kept.get(keys[0], "r1").items == [{"type": "message", "role": "user", "content": "x"}]
    kept.end(keys[1])
    with pytest.raises(Refusal, match="'r1'"):
        kept.get(keys[1], "r1")
    kept.keep(keys[0], {"input": "x"}, {"id": "r2", "output": []}, conversations, n_bytes=70)
    assert kept.get(keys[0], "r1") and kept.get(keys[0], "r2")
