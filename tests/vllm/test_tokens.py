"""What the gateway records of a real vLLM's answers, against the tokenizer, the weights and vLLM's own answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import anthropic
import pytest

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.types import Span, TokenRecord, semconv
from tests.gateway.caller import Caller, new_caller, say
from tests.vllm.server import MODEL, VllmServer
from tests.vllm.tiny import Truth

pytestmark = pytest.mark.merge

QUESTION = say("What is 6 times 7?")
LONGEST = 24
SAMPLING: dict[str, Any] = {"model": MODEL, "max_tokens": LONGEST, "seed": 7}
LARGEST_ERROR = 1e-4
"""Of a log-probability: two float32 kernels that add in different orders. Measured: 3e-6 at most."""


async def answer_of(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A server's answer that is no stream."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def events_of(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a server's stream."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def sampled_by(vllm: VllmServer, path: str, body: dict[str, Any]) -> list[int]:
    """What vLLM itself, asked without the gateway, samples with the same seed."""
    answer = await answer_of(vllm.endpoint, path, {**body, "stream": False, "return_token_ids": True})
    return answer["choices"][0]["token_ids"]


def tokens_of(span: Span) -> TokenRecord:
    assert span.status.status_code == "OK"
    assert span.tokens is not None, span.attributes.get(semconv.TOKENS_REFUSED)
    assert semconv.TOKENS_REFUSED not in span.attributes
    return span.tokens


def assert_exact(
    span: Span, truth: Truth, prompt_ids: Sequence[int], response_ids: Sequence[int], *, temperature: float = 1.0
) -> None:
    """The record is what the model was given and sampled, as likely as the weights say."""
    tokens = tokens_of(span)
    assert tokens.prompt_ids == prompt_ids
    assert tokens.response_ids == response_ids
    assert tokens.logprobs == pytest.approx(
        truth.logprobs(prompt_ids, response_ids, temperature=temperature), abs=LARGEST_ERROR
    )
    assert span.attributes[semconv.GEN_AI_INPUT_TOKENS] == len(prompt_ids)
    assert span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] == len(response_ids)


# ---- chat ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}], ids=str)
async def test_a_chat_is_recorded_to_the_token(
    caller: Caller, vllm: VllmServer, truth: Truth, asked: dict[str, Any]
) -> None:
    answer = await caller.client.chat.completions.create(messages=QUESTION, **SAMPLING, **asked)
    wanted = await sampled_by(vllm, "chat/completions", {"messages": QUESTION, **SAMPLING})
    assert_exact(await caller.span(), truth, truth.chat_ids(QUESTION), wanted)
    logprobs = answer.choices[0].logprobs
    assert (logprobs is not None) == bool(asked)
    if logprobs is not None:
        assert [one.logprob for one in logprobs.content or ()] == tokens_of(await caller.span()).logprobs


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=str,
)
async def test_a_streamed_chat_is_recorded_to_the_token(
    caller: Caller, vllm: VllmServer, truth: Truth, asked: dict[str, Any]
) -> None:
    chunks = [
        chunk
        async for chunk in await caller.client.chat.completions.create(
            messages=QUESTION, stream=True, **SAMPLING, **asked
        )
    ]
    body = {"messages": QUESTION, **SAMPLING}
    assert_exact(await caller.span(), truth, truth.chat_ids(QUESTION), await sampled_by(vllm, "chat/completions", body))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    whole = await answer_of(vllm.endpoint, "chat/completions", body)
    assert "".join(choice.delta.content or "" for choice in choices) == whole["choices"][0]["message"]["content"]
    assert any(choice.logprobs for choice in choices) == ("logprobs" in asked)
    assert any(chunk.usage for chunk in chunks) == ("stream_options" in asked)


async def test_a_greedy_answer_is_the_likeliest_by_the_weights(caller: Caller, truth: Truth) -> None:
    await caller.client.chat.completions.create(messages=QUESTION, model=MODEL, max_tokens=LONGEST, temperature=0)
    tokens = tokens_of(await caller.span())
    assert tokens.response_ids == truth.greedy_ids(truth.chat_ids(QUESTION), LONGEST)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
async def test_with_processed_logprobs_they_are_those_of_the_temperature(
    caller: Caller, vllm: VllmServer, truth: Truth, temperature: float
) -> None:
    asked = {"messages": QUESTION, **SAMPLING, "temperature": temperature}
    await caller.client.chat.completions.create(**asked)
    wanted = await sampled_by(vllm, "chat/completions", asked)
    assert_exact(await caller.span(), truth, truth.chat_ids(QUESTION), wanted, temperature=temperature)


async def test_tokens_that_are_parts_of_characters_are_recorded_though_no_string_tells_them(
    caller: Caller, truth: Truth
) -> None:
    answer = await caller.client.chat.completions.create(
        messages=QUESTION, **{**SAMPLING, "max_tokens": 200}, logprobs=True, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    strings = [one.token for one in logprobs.content or ()]
    assert strings.count("") > 20  # vLLM shows them so
    assert "�" in (answer.choices[0].message.content or "")
    tokens = tokens_of(await caller.span())
    assert len(tokens.response_ids) == 200
    assert truth.text_ids("".join(strings)) != tokens.response_ids
    assert_exact(await caller.span(), truth, truth.chat_ids(QUESTION), tokens.response_ids)


# ---- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Say it: Größe 雷", [5, 6, 7, 300, 42]], ids=["text", "ids"])
@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}], ids=str)
async def test_a_completion_is_recorded_to_the_token(
    caller: Caller, vllm: VllmServer, truth: Truth, prompt: Any, stream: bool, asked: dict[str, Any]
) -> None:
    answer: Any = await caller.client.completions.create(prompt=prompt, stream=stream, **SAMPLING, **asked)
    if stream:
        async for _ in answer:
            pass
    prompt_ids = truth.text_ids(prompt) if isinstance(prompt, str) else prompt
    wanted = await sampled_by(vllm, "completions", {"prompt": prompt, **SAMPLING})
    assert_exact(await caller.span(), truth, prompt_ids, wanted)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_that_echoes_its_prompt_is_recorded_as_text_that_says_why(
    caller: Caller, stream: bool
) -> None:
    """vLLM leaves the echo out of an answer with token ids: the agent gets what it asked for."""
    answer: Any = await caller.client.completions.create(prompt="Say it.", echo=True, stream=stream, **SAMPLING)
    text = "".join([chunk.choices[0].text async for chunk in answer]) if stream else answer.choices[0].text
    assert text.startswith("Say it.")
    span = await caller.span()
    assert span.tokens is None
    assert "`echo`" in str(span.attributes[semconv.TOKENS_REFUSED])


# ---- the other dialects ----------------------------------------------------------------------------------------------


@pytest.fixture
async def anthropic_client(caller: Caller) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = caller.llm.endpoint.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=caller.llm.api_key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_are_recorded_to_the_token(
    caller: Caller, anthropic_client: anthropic.AsyncAnthropic, vllm: VllmServer, truth: Truth, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": LONGEST, "messages": QUESTION, "system": "Be brief."}
    if stream:
        async with anthropic_client.messages.stream(**asked, extra_body={"seed": 7}) as answer:
            message = await answer.get_final_message()
    else:
        message = await anthropic_client.messages.create(**asked, extra_body={"seed": 7})
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    wanted = await sampled_by(vllm, "chat/completions", {"messages": messages, **SAMPLING})
    assert_exact(await caller.span(), truth, truth.chat_ids(messages), wanted)
    assert message.usage.output_tokens == len(wanted)
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_recorded_to_the_token(
    caller: Caller, vllm: VllmServer, truth: Truth, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "What is 6 times 7?", "max_output_tokens": LONGEST}
    seed = {"seed": 7}  # of the servers, not of the API
    if stream:
        events = [event async for event in await caller.client.responses.create(**asked, stream=True, extra_body=seed)]
        response = events[-1].response
    else:
        response = await caller.client.responses.create(**asked, extra_body=seed)
    wanted = await sampled_by(vllm, "chat/completions", {"messages": QUESTION, **SAMPLING})
    assert_exact(await caller.span(), truth, truth.chat_ids(QUESTION), wanted)
    assert response.usage is not None
    assert response.usage.output_tokens == len(wanted)
    assert response.status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_vllms_own_messages_and_responses_pass_and_are_recorded_as_text_that_says_why(
    vllm: VllmServer, store: InMemoryLightningStore, dialect: Any, stream: bool
) -> None:
    model = UpstreamModel(MODEL, vllm.endpoint, dialects=(dialect,))
    limit = {"messages": "max_tokens", "responses": "max_output_tokens"}[dialect]
    field = {"messages": "messages", "responses": "input"}[dialect]
    body = {"model": MODEL, limit: 5, field: QUESTION, "stream": stream, "temperature": 0}
    async with LLMProxy(model_list=[model], store=store) as proxy:
        caller = await new_caller(proxy, store)
        ask: Any = events_of if stream else answer_of
        shown, direct = [await ask(url, dialect, body) for url in (caller.llm.endpoint, vllm.endpoint)]
        span = await caller.span()
    assert said(shown) == said(direct)
    assert span.status.status_code == "OK"
    assert span.tokens is None
    assert "return_token_ids" in str(span.attributes[semconv.TOKENS_REFUSED])
    assert span.attributes[semconv.GEN_AI_OUTPUT_TOKENS] == 5
    assert said(direct) in json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))[0]["content"]


def said(found: Any) -> str:
    """The text of an answer in messages or responses, or of the events of one."""
    if isinstance(found, list):
        deltas = [event["delta"] for event in found if event["type"].endswith(("output_text.delta", "block_delta"))]
        return "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
    parts = found["content"] if "content" in found else found["output"][0]["content"]
    return "".join(part["text"] for part in parts)
