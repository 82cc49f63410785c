"""What an agent sees of a real vLLM behind the gateway, and what its conversations become."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import openai
import pytest

from leyden.adapter import TraceToTrajectory
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller, say, until
from tests.vllm.server import MODEL, VllmServer
from tests.vllm.test_tokens import QUESTION, SAMPLING, answer_of, events_of, tokens_of
from tests.vllm.tiny import MAX_LENGTH, Truth

pytestmark = pytest.mark.merge

DIGITS = "0123456789"
WEATHER = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Bern", "Köln"]}},
    "required": ["place"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": WEATHER, "strict": True}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
LONGEST = MAX_LENGTH - 100
"""Tokens of an answer that no agent waits for: at least ten seconds of generation."""
OF_ONE_CALL = {"id", "created", "prompt_token_ids", "token_ids"}
"""Fields that differ between two equal calls, or that vLLM names when they are empty."""


def essence(found: Any) -> Any:
    """An answer without what is empty, and without what differs between two equal calls."""
    if isinstance(found, dict):
        return {name: essence(value) for name, value in found.items() if value is not None and name not in OF_ONE_CALL}
    return [essence(item) for item in found] if isinstance(found, list) else found


def names_in(found: Any) -> set[str]:
    """The names of all fields that are not empty, at any depth."""
    if isinstance(found, dict):
        return {name for name, value in found.items() if value is not None}.union(*map(names_in, found.values()))
    return set().union(*map(names_in, found)) if isinstance(found, list) else set()


# ---- what an agent sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": QUESTION},
        {"messages": QUESTION, "logprobs": True, "top_logprobs": 2},
        {"messages": QUESTION, "return_token_ids": True},
        {"messages": QUESTION, "n": 2},
        {"prompt": "Say it."},
        {"prompt": "Say it.", "logprobs": 1},
        {"prompt": "Say it.", "echo": True},
        {"prompt": ["Say it.", "Say it again."]},
    ],
    ids=str,
)
async def test_an_agent_gets_vllms_answer_without_what_recording_asked_for(
    caller: Caller, vllm: VllmServer, asked: dict[str, Any]
) -> None:
    path = "chat/completions" if "messages" in asked else "completions"
    body = {**SAMPLING, **asked}
    shown, direct = [await answer_of(url, path, body) for url in (caller.llm.endpoint, vllm.endpoint)]
    assert essence(shown) == essence(direct)
    assert ("token_ids" in names_in(shown)) == ("return_token_ids" in asked)


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": QUESTION},
        {"messages": QUESTION, "logprobs": True},
        {"messages": QUESTION, "stream_options": {"include_usage": True}},
        {"messages": QUESTION, "return_token_ids": True},
        {"prompt": "Say it."},
        {"prompt": "Say it.", "echo": True},
    ],
    ids=str,
)
async def test_a_streaming_agent_gets_no_field_that_it_did_not_ask_for(
    caller: Caller, vllm: VllmServer, asked: dict[str, Any]
) -> None:
    path = "chat/completions" if "messages" in asked else "completions"
    body = {**SAMPLING, **asked, "stream": True}
    shown, direct = [await events_of(url, path, body) for url in (caller.llm.endpoint, vllm.endpoint)]
    assert names_in(shown) <= names_in(direct)
    assert names_in(direct) - names_in(shown) <= {"system_fingerprint"}  # vLLM's chunk with the usage has it instead
    texts = [
        "".join((c.get("delta", {}).get("content") or c.get("text") or "") for e in events for c in e["choices"])
        for events in (shown, direct)
    ]
    assert texts[0] == texts[1]


async def test_several_answers_at_once_reach_the_agent_and_are_not_recorded_as_one(caller: Caller) -> None:
    answer = await caller.client.chat.completions.create(messages=QUESTION, **SAMPLING, n=2)
    assert len(answer.choices) == 2
    span = await caller.span()
    assert span.tokens is None
    assert "n=1" in str(span.attributes[semconv.TOKENS_REFUSED])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_ends_an_answer_at_exactly_so_many_tokens(caller: Caller, stream: bool) -> None:
    answer: Any = await caller.client.chat.completions.create(
        messages=QUESTION, **{**SAMPLING, "max_tokens": 17}, stream=stream, extra_body={"ignore_eos": True}
    )
    if stream:
        async for _ in answer:
            pass
    span = await caller.span()
    assert len(tokens_of(span).response_ids) == 17
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_a_stop_string_are_recorded_though_the_agent_does_not_see_them(
    caller: Caller, truth: Truth, stream: bool
) -> None:
    extra = {"allowed_token_ids": truth.ids_of(DIGITS)}
    first = await caller.client.chat.completions.create(messages=QUESTION, **SAMPLING, extra_body=extra)
    whole = first.choices[0].message.content or ""
    stop = whole[5:7]  # two tokens
    answer: Any = await caller.client.chat.completions.create(
        messages=QUESTION, **SAMPLING, stop=[stop], extra_body=extra, stream=stream
    )
    if stream:
        text = "".join([choice.delta.content or "" async for chunk in answer for choice in chunk.choices])
    else:
        text = answer.choices[0].message.content
    assert text == whole[: whole.index(stop)]
    span = (await caller.spans())[1]
    assert truth.tokenizer.decode(tokens_of(span).response_ids) == text + stop
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_tool_is_recorded_to_the_token(caller: Caller, truth: Truth, stream: bool) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    asked |= {**SAMPLING, "max_tokens": 500, "messages": QUESTION}
    if stream:
        async with caller.client.chat.completions.stream(**asked) as events:
            async for _ in events:
                pass
            answer: Any = await events.get_final_completion()
    else:
        answer = await caller.client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    place = json.loads(call.function.arguments)["place"]
    assert place in ("Bern", "Köln")
    span = await caller.span()
    tokens = tokens_of(span)
    assert tokens.prompt_ids == truth.chat_ids(QUESTION, TOOLS)
    (message,) = json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    assert message["tool_calls"][0]["function"]["arguments"] == call.function.arguments
    sampled = truth.tokenizer.decode(tokens.response_ids).partition('"arguments": ')[2]
    assert json.JSONDecoder().raw_decode(sampled)[0] == {"place": place}  # vLLM may write what was sampled anew


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_the_model_does_not_call_change_nothing(caller: Caller, truth: Truth, stream: bool) -> None:
    answer: Any = await caller.client.chat.completions.create(messages=QUESTION, **SAMPLING, tools=TOOLS, stream=stream)
    if stream:
        async for _ in answer:
            pass
    assert tokens_of(await caller.span()).prompt_ids == truth.chat_ids(QUESTION, TOOLS)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_the_agents_error_and_recorded_as_one(caller: Caller, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await caller.client.chat.completions.create(messages=say("y" * 2 * MAX_LENGTH), **SAMPLING, stream=stream)
    assert caught.value.param == "input_tokens"
    span = await caller.span()
    assert span.status.status_code == "ERROR"
    assert "400" in str(span.status.description)
    assert span.tokens is None
    assert "maximum context length" in str(span.attributes[semconv.TOKENS_REFUSED])


# ---- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_knows_all_that_was_said_before_it_and_the_conversation_is_one_trajectory(
    caller: Caller, truth: Truth, stream: bool
) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    for turn in range(4):
        messages += say(f"Turn {turn}, and now?")
        answer: Any = await caller.client.chat.completions.create(
            messages=messages,
            stream=stream,
            **{**SAMPLING, "seed": turn},
            extra_body={"allowed_token_ids": [*truth.ids_of(DIGITS), truth.end_id], "ignore_eos": False},
        )
        if stream:
            text = "".join([choice.delta.content or "" async for chunk in answer for choice in chunk.choices])
        else:
            text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
    spans = await caller.spans()
    assert spans[0].attributes[semconv.KNOWN_PREFIX] == 0
    for before, span in pairwise(spans):
        said = [*tokens_of(before).prompt_ids, *tokens_of(before).response_ids]
        assert span.attributes[semconv.KNOWN_PREFIX] == len(said)
        assert span.attributes[semconv.GOES_ON_FROM] == before.span_id
        assert tokens_of(span).prompt_ids[: len(said)] == said
    (trajectory,) = TraceToTrajectory().adapt(spans)
    trained = [id_ for id_, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask]
    assert trained == [id_ for span in spans for id_ in tokens_of(span).response_ids]


async def test_a_turn_whose_answer_was_no_text_knows_only_what_the_tokenizer_gives_back(
    caller: Caller, truth: Truth
) -> None:
    """Half characters reach the agent as U+FFFD, which is another token: what was sampled stays exact, in two trajectories."""
    first = await caller.client.chat.completions.create(messages=QUESTION, **{**SAMPLING, "max_tokens": 60})
    text = first.choices[0].message.content or ""
    assert "�" in text
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": text}, *say("And?")]
    await caller.client.chat.completions.create(messages=messages, **SAMPLING)
    one, two = await caller.spans()
    said = [*tokens_of(one).prompt_ids, *tokens_of(one).response_ids]
    prompt = tokens_of(two).prompt_ids
    assert prompt == truth.chat_ids(messages)
    common = next(n for n, (left, right) in enumerate(zip(said, prompt, strict=False)) if left != right)
    assert len(tokens_of(one).prompt_ids) <= common < len(said)
    assert two.attributes[semconv.KNOWN_PREFIX] == common
    assert len(TraceToTrajectory().adapt([one, two])) == 2


async def test_calls_at_once_are_each_recorded_once_in_their_own_rollout(
    proxy: LLMProxy, store: InMemoryLightningStore, truth: Truth
) -> None:
    callers = [await new_caller(proxy, store) for _ in range(32)]

    async def ask(caller: Caller, number: int) -> str:
        async with caller.client as client:
            asked: Any = {"messages": say(f"Number {number}"), **SAMPLING, "seed": number, "stream": number % 2 == 0}
            answer: Any = await client.chat.completions.create(**asked)
            if number % 2:
                return answer.id
            return {chunk.id async for chunk in answer}.pop()

    ids = await asyncio.gather(*(ask(caller, number) for number, caller in enumerate(callers)))
    assert len(set(ids)) == 32
    for number, (caller, response_id) in enumerate(zip(callers, ids, strict=True)):
        span = await caller.span()
        assert span.attributes[semconv.GEN_AI_RESPONSE_ID] == response_id
        tokens = tokens_of(span)
        assert tokens.prompt_ids == truth.chat_ids(say(f"Number {number}"))
        assert tokens.logprobs == pytest.approx(truth.logprobs(tokens.prompt_ids, tokens.response_ids), abs=1e-4)


# ---- agents that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": QUESTION, "max_tokens": LONGEST}),
        ("completions", {"prompt": "Go on.", "max_tokens": LONGEST}),
        ("messages", {"messages": QUESTION, "max_tokens": LONGEST}),
        ("responses", {"input": "Go on.", "max_output_tokens": LONGEST}),
    ],
)
async def test_an_agent_that_goes_away_ends_the_generation(
    caller: Caller, vllm: VllmServer, path: str, asked: dict[str, Any], stream: bool
) -> None:
    async def generated() -> float:
        return await asyncio.to_thread(vllm.metric, "generation_tokens_total")  # the gateway has this thread's loop

    async def under_way() -> float:
        names = ("num_requests_running", "num_requests_waiting")
        return sum([await asyncio.to_thread(vllm.metric, name) for name in names])

    async def has_begun() -> bool:
        return await generated() > before

    async def has_ended() -> bool:
        return await under_way() == 0

    body = {"model": MODEL, "ignore_eos": True, "stream": stream, **asked}
    before = await generated()
    call = asyncio.create_task(events_of(caller.llm.endpoint, path, body))
    await until(has_begun)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(has_ended)
    assert await generated() - before < LONGEST, "vLLM wrote the whole answer although the agent had gone"
    await until(caller.spans)
    span = (await caller.spans())[-1]
    assert "disconnected" in str(span.status.description)
    assert span.tokens is None
