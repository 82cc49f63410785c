"""Tools through the endpoint, as an official client sees them: calls, streams, and the exact ids of the next turn."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from leyden.engine import EmbeddedBackend
from tests.engine.reciting import Script

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ONE_CALL = '<tool_call>{"arguments":{"city":"Paris"},  "name":"get_weather"}</tool_call>'
"""In another way than the template writes it."""
TWO_CALLS = "Let me see.\n\n" + ONE_CALL + "\n" + ONE_CALL.replace("Paris", "Lima")
IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "logprobs": True}


class Agent:
    """A client of a model that recites."""

    def __init__(self, client: openai.AsyncOpenAI, script: Script, tokenizer: Any) -> None:
        self._client = client
        self._script = script
        self._tokenizer = tokenizer

    def prompt(self, messages: list[Any], tools: list[Any] | None) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def ids(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    async def ask(self, says: str, messages: list[Any], **options: Any) -> Any:
        """Ask the model, which answers a prompt as long as this one with `says`."""
        tools = options.setdefault("tools", [WEATHER])
        self._script.say(len(self.prompt(messages, tools)), self.ids(says))
        return await self._client.chat.completions.create(
            model="policy", messages=messages, max_tokens=400, **{**IDS, **options}
        )


@pytest.fixture
async def agent(reciting: tuple[EmbeddedBackend, Script, Any]) -> AsyncIterator[Agent]:
    backend, script, tokenizer = reciting
    async with openai.AsyncOpenAI(base_url=backend.endpoint().endpoint, api_key="none", max_retries=0) as client:
        yield Agent(client, script, tokenizer)


def result(call_id: str, content: str = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


async def test_a_model_with_tools_calls_one(agent: Agent):
    answer = await agent.ask(ONE_CALL, [QUESTION])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")
    assert choice.token_ids == agent.ids(ONE_CALL)
    assert answer.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content)


async def test_the_template_shows_the_tools_to_the_model(agent: Agent):
    answer = await agent.ask("none needed", [QUESTION])
    assert answer.prompt_token_ids == agent.prompt([QUESTION], [WEATHER])
    assert answer.choices[0].message.tool_calls is None
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("none needed", "stop")


async def test_parallel_calls_come_with_the_content_before_them(agent: Agent):
    message = (await agent.ask(TWO_CALLS, [QUESTION])).choices[0].message
    assert message.content == "Let me see."
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris", "Lima"]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_without_parallel_calls_the_response_ends_with_the_first(agent: Agent):
    choice = (await agent.ask(TWO_CALLS, [QUESTION], parallel_tool_calls=False)).choices[0]
    assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Paris"]
    assert choice.finish_reason == "tool_calls"
    assert choice.token_ids == agent.ids("Let me see.\n\n" + ONE_CALL)[:-1]


@pytest.mark.parametrize("says", [ONE_CALL, TWO_CALLS, "no call at all", "<tool_call>{broken</tool_call>", " <tool_"])
async def test_a_stream_says_the_same_as_the_whole_answer(agent: Agent, says: str):
    whole = (await agent.ask(says, [QUESTION], seed=5)).choices[0]
    content, calls, ids, reasons = "", dict[int, Any](), list[int](), list[str | None]()
    async for chunk in await agent.ask(says, [QUESTION], seed=5, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        ids += choice.token_ids
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.index not in calls
            calls[call.index] = call
    assert content == (whole.message.content or "")
    assert [(calls[index].id, calls[index].function.arguments) for index in range(len(calls))] == [
        (call.id, call.function.arguments) for call in whole.message.tool_calls or ()
    ]
    assert ids == whole.token_ids
    assert reasons[-1] == whole.finish_reason
    assert set(reasons[:-1]) <= {None}


@pytest.mark.parametrize("says", [ONE_CALL, TWO_CALLS])
async def test_the_next_turn_continues_the_sampled_ids(agent: Agent, says: str):
    first = await agent.ask(says, [QUESTION])
    message = first.choices[0].message
    messages = [QUESTION, message.model_dump(), *(result(call.id) for call in message.tool_calls)]
    begun = first.prompt_token_ids + first.choices[0].token_ids
    rendered = agent.prompt(messages, [WEATHER])
    assert rendered[: len(begun)] != begun  # the template writes the call in its own way
    second = await agent.ask("", messages)
    assert second.prompt_token_ids[: len(begun)] == begun
    rest = agent._tokenizer.decode(second.prompt_token_ids[len(begun) :])
    assert agent._tokenizer.decode(rendered).endswith(rest)
    assert rest.count("sunny") == len(message.tool_calls)


@pytest.mark.parametrize("change", ["arguments", "id", "question", "content", "tools"])
async def test_a_history_that_was_changed_is_written_by_the_template(agent: Agent, change: str):
    message = (await agent.ask(ONE_CALL, [QUESTION])).choices[0].message.model_dump(exclude_none=True)
    messages, tools = [dict(QUESTION), message, result(message["tool_calls"][0]["id"])], [WEATHER]
    match change:
        case "arguments":
            message["tool_calls"][0]["function"]["arguments"] = '{"city": "Rome"}'
        case "id":
            message["tool_calls"][0]["id"] = "call_other"
        case "question":
            messages[0]["content"] += " Now."
        case "content":
            message["content"] = "Hm."
        case _:
            tools = [WEATHER, {"type": "function", "function": {"name": "other"}}]
    plain = json.loads(json.dumps(messages))
    for call in plain[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    answer = await agent.ask("", messages, tools=tools)
    assert answer.prompt_token_ids == agent.prompt(plain, tools)


async def test_a_call_that_cannot_be_read_is_content(agent: Agent):
    says = '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'
    choice = (await agent.ask(says, [QUESTION])).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (says, None, "stop")


async def test_a_call_that_is_cut_off_ends_by_length(agent: Agent):
    choice = (await agent.ask(ONE_CALL + " and so on", [QUESTION], max_completion_tokens=len(ONE_CALL))).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "length")


async def test_no_choice_means_no_call_but_the_same_prompt(agent: Agent):
    answer = await agent.ask(ONE_CALL, [QUESTION], tool_choice="none")
    assert answer.prompt_token_ids == agent.prompt([QUESTION], [WEATHER])
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (ONE_CALL, None)


async def test_each_of_several_choices_has_calls_of_its_own(agent: Agent):
    choices = (await agent.ask(ONE_CALL, [QUESTION], n=3, seed=1)).choices
    assert len({choice.message.tool_calls[0].id for choice in choices}) == 3
    again = (await agent.ask(ONE_CALL, [QUESTION], n=3, seed=1)).choices
    assert [c.message.tool_calls[0].id for c in again] == [c.message.tool_calls[0].id for c in choices]
