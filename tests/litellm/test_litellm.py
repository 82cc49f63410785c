"""The gateway in front of LiteLLM, which is in front of a real server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller, say, until

pytestmark = [  # LiteLLM's own
    pytest.mark.filterwarnings("ignore:.*ReadOnly:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Unclosed connector|.*BaseConnector.__del__"),
]


def through_litellm(upstream: FakeUpstream, **options: Any) -> UpstreamModel:
    params = {"model": "openai/fake", "api_base": upstream.endpoint, "api_key": "k"}
    return UpstreamModel("fake", litellm_params=params, **options)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def caller(upstream: FakeUpstream) -> AsyncIterator[Caller]:
    async with (
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[through_litellm(upstream)], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client:
            yield caller


async def test_litellm_is_imported_when_it_is_needed_alone(upstream: FakeUpstream) -> None:
    code = (
        "import sys; from leyden.gateway import LLMProxy, UpstreamModel; "
        "LLMProxy(model_list=[UpstreamModel('m', litellm_params={'model': 'openai/x'})]); "
        "raise SystemExit('litellm' in sys.modules)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


async def test_whole_answers(caller: Caller, upstream: FakeUpstream) -> None:
    answer = await caller.client.chat.completions.create(model="fake", messages=say("hi"), temperature=0.5)
    assert answer.choices[0].message.content == upstream.calls[-1].text
    assert upstream.requests[-1]["temperature"] == 0.5
    span = await caller.span()
    assert span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] == len(upstream.calls[-1].response_ids)
    assert upstream.calls[-1].text in str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])
    assert span.tokens is None
    assert "return_token_ids" in str(span.attributes[semconv.TOKENS_REFUSED])


async def test_streams(caller: Caller, upstream: FakeUpstream) -> None:
    text, pieces = "", 0
    async for chunk in await caller.client.chat.completions.create(model="fake", messages=say("hi"), stream=True):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        pieces += 1
    assert text == upstream.calls[-1].text
    assert pieces > 2
    span = await caller.span()
    assert upstream.calls[-1].text in str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])


async def test_other_dialects_are_translated(caller: Caller, upstream: FakeUpstream) -> None:
    url = caller.llm.endpoint.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=caller.llm.api_key, max_retries=0) as client:
        message = await client.messages.create(model="fake", max_tokens=50, messages=say("hi"))
        assert message.content[0].type == "text"
        assert message.content[0].text == upstream.calls[-1].text
    response = await caller.client.responses.create(model="fake", input="hi")
    assert response.output_text == upstream.calls[-1].text
    completion = await caller.client.completions.create(model="fake", prompt="hi")
    assert completion.choices[0].text == upstream.calls[-1].text
    embedded = await caller.client.embeddings.create(model="fake", input="hi")
    assert len(embedded.data[0].embedding) > 0
    assert len(await caller.spans()) == 4


@pytest.mark.parametrize(
    "given",
    [
        {"api_base": "http://127.0.0.1:9/v1"},
        {"base_url": "http://127.0.0.1:9/v1"},
        {"custom_llm_provider": "ollama"},
        {"mock_response": "yes"},
        {"timeout": 3},
        {"model_list": [{"model_name": "fake", "litellm_params": {"model": "openai/fake"}}]},
    ],
    ids=lambda given: next(iter(given)),
)
async def test_an_agent_cannot_say_where_the_operators_key_goes(
    caller: Caller, upstream: FakeUpstream, given: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="litellm_params") as caught:
        await caller.client.chat.completions.create(model="fake", messages=say("hi"), extra_body=given)
    assert caught.value.param == next(iter(given))
    assert not upstream.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 429, 500])
async def test_a_providers_error_is_the_agents(
    caller: Caller, upstream: FakeUpstream, status: int, stream: bool
) -> None:
    upstream.misbehave(*[Misbehaviour(status=status)] * 3)
    with pytest.raises(openai.APIStatusError) as caught:
        await caller.client.chat.completions.create(model="fake", messages=say("hi"), stream=stream)
    assert caught.value.status_code == status
    span = await caller.span()
    assert span.status.status_code == "ERROR"
    assert str(status) in str(span.status.description)
    assert len(upstream.requests) == 1  # LiteLLM does not try again by itself


async def test_a_stream_that_breaks_off_is_an_error(caller: Caller, upstream: FakeUpstream) -> None:
    upstream.misbehave(Misbehaviour(close_after_chunks=2))
    with pytest.raises(openai.APIError):
        async for _ in await caller.client.chat.completions.create(model="fake", messages=say("hi"), stream=True):
            pass
    assert (await caller.span()).status.status_code == "ERROR"


async def test_a_call_that_the_agent_leaves_ends_at_the_provider(upstream: FakeUpstream) -> None:
    async with (
        FakeUpstream(delay_seconds=30) as slow,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[through_litellm(slow)], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            call = asyncio.create_task(client.chat.completions.create(model="fake", messages=say("hi")))
            await until(lambda: slow.requests)
            call.cancel()
            await until(lambda: slow.cancelled)


async def test_a_provider_that_does_not_answer_in_time(upstream: FakeUpstream) -> None:
    async with (
        FakeUpstream(delay_seconds=30) as slow,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[through_litellm(slow)], store=store, timeout_seconds=1) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            with pytest.raises(openai.APIStatusError, match="within 1 s") as caught:
                await client.chat.completions.create(model="fake", messages=say("hi"))
        assert caught.value.status_code == 504
