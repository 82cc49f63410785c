"""An agent with a tool, through the gateway, in each API: what is recorded is one conversation to train on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from leyden.adapter import TraceToTrajectory
from leyden.engine import EmbeddedBackend
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from tests.engine.reciting import Script
from tests.engine.test_tool_calls import ONE_CALL, WEATHER
from tests.gateway.caller import Caller, new_caller

QUESTION = "What is the weather in Paris?"
PARAMETERS = WEATHER["function"]["parameters"]


class Recorded:
    """A gateway before a model that recites, and one attempt."""

    def __init__(self, caller: Caller, script: Script, tokenizer: Any) -> None:
        self.caller = caller
        self._script = script
        self._tokenizer = tokenizer

    def prompt(self, *more: Any) -> list[int]:
        messages = [{"role": "user", "content": QUESTION}, *more]
        text = self._tokenizer.apply_chat_template(
            messages, tools=[WEATHER], tokenize=False, add_generation_prompt=True
        )
        return self._tokenizer.encode(text, add_special_tokens=False)

    def say(self, n_prompt: int, text: str) -> list[int]:
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        self._script.say(n_prompt, ids)
        return ids

    def script(self) -> tuple[list[int], list[int]]:
        """Have the model call the tool and then tell the weather; return the ids of both responses."""
        first = self.say(len(self.prompt()), ONE_CALL)
        result = self._tokenizer.apply_chat_template(
            [{"role": "tool", "content": "sunny"}], tokenize=False, add_generation_prompt=True
        )
        result = "\n" + result[result.index("<|im_start|>user") :]
        begun = len(self.prompt()) + len(first) + len(self._tokenizer.encode(result, add_special_tokens=False))
        return first, self.say(begun, "It is sunny.")


@pytest.fixture
async def recorded(reciting: tuple[EmbeddedBackend, Script, Any]) -> AsyncIterator[Recorded]:
    backend, script, tokenizer = reciting
    async with (
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[backend.endpoint()], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client:
            yield Recorded(caller, script, tokenizer)


async def by_chat(caller: Caller, stream: bool) -> str:
    client, messages = caller.client, list[Any]([{"role": "user", "content": QUESTION}])
    while True:
        if stream:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=[WEATHER]) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
            message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude={"parsed"}))
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})


async def by_responses(caller: Caller, stream: bool) -> str:
    tool = {"type": "function", "name": "get_weather", "description": "Get the weather for a city.", "strict": True}
    tool["parameters"] = PARAMETERS
    given: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        asked: dict[str, Any] = {"model": "policy", "input": given, "tools": [tool]}
        if stream:
            async with caller.client.responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await caller.client.responses.create(**asked, parallel_tool_calls=True, store=False)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        given += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in answer.output]
        for call in calls:
            assert json.loads(call.arguments) == {"city": "Paris"}
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})


async def by_messages(caller: Caller, stream: bool) -> str:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "get_weather", "description": "Get the weather for a city.", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    base_url = caller.llm.endpoint.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=caller.llm.api_key, max_retries=0) as client:
        while True:
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [tool], "max_tokens": 300}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return answer.content[0].text
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
            messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("agent", [by_chat, by_responses, by_messages])
async def test_an_agent_with_a_tool_is_one_trajectory_of_what_was_sampled(recorded: Recorded, agent: Any, stream: bool):
    called, told = recorded.script()
    assert await agent(recorded.caller, stream) == "It is sunny."
    (trajectory,) = TraceToTrajectory().adapt(await recorded.caller.spans())
    sampled = [token for token, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine]
    assert sampled == called + told
    assert trajectory.token_ids[: len(recorded.prompt())] == recorded.prompt()
    assert len(trajectory.call_spans) == 2


async def test_the_gateways_seeds_make_the_ids_of_calls_the_same_again(recorded: Recorded):
    recorded.script()
    ids = [
        (
            await recorded.caller.client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": QUESTION}], tools=[WEATHER], seed=seed
            )
        )
        .choices[0]
        .message.tool_calls[0]
        .id
        for seed in (1, 1, 2)
    ]
    assert ids[0] == ids[1] != ids[2]


async def test_a_refusal_of_the_engine_reaches_the_agent(recorded: Recorded):
    with pytest.raises(openai.BadRequestError, match="'cook', which is not among the tools: get_weather"):
        await recorded.caller.client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": QUESTION}],
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "cook"}},
        )
