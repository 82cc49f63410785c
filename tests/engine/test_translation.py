"""The engine's endpoint as the official clients of four APIs see it, without a gateway."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from leyden.engine import EmbeddedBackend
from tests.engine import tiny
from tests.engine.reciting import Script
from tests.engine.test_tool_calls import TWO_CALLS, WEATHER

SAID: list[Any] = [{"role": "user", "content": "guess"}]
KEY = "sesame"


def anthropic_client(backend: EmbeddedBackend, key: str = KEY) -> anthropic.AsyncAnthropic:
    root = backend.endpoint().endpoint.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0)


def openai_client(backend: EmbeddedBackend, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=backend.endpoint().endpoint, api_key=key, max_retries=0)


async def test_one_model_says_the_same_in_every_api_whole_and_streamed():
    async with (
        EmbeddedBackend(tiny.model(), tokenizer=tiny.tokenizer(), api_key=KEY) as backend,
        openai_client(backend) as client,
        anthropic_client(backend) as other,
    ):
        greedy: dict[str, Any] = {"model": "policy", "temperature": 0}
        chat = await client.chat.completions.create(messages=SAID, max_tokens=12, **greedy)
        wanted, usage = chat.choices[0].message.content, chat.usage
        response = await client.responses.create(input="guess", max_output_tokens=12, **greedy)
        assert (response.output_text, response.usage.output_tokens) == (wanted, usage.completion_tokens)
        assert response.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
        stream = await client.responses.create(input="guess", max_output_tokens=12, stream=True, **greedy)
        *_, last = [event async for event in stream]
        assert (last.response.status, last.response.output_text) == (response.status, wanted)
        message = await other.messages.create(
            model="policy", messages=SAID, max_tokens=12, extra_body={"temperature": 0}
        )
        assert "".join(block.text for block in message.content) == wanted
        assert (message.usage.input_tokens, message.usage.output_tokens) == (
            usage.prompt_tokens,
            usage.completion_tokens,
        )
        async with other.messages.stream(
            model="policy", messages=SAID, max_tokens=12, extra_body={"temperature": 0}
        ) as events:
            final = await events.get_final_message()
        assert ("".join(block.text for block in final.content), final.stop_reason) == (wanted, message.stop_reason)
        assert [model.id async for model in other.models.list()] == ["policy"]
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_tools_are_called_in_every_api(reciting: tuple[EmbeddedBackend, Script, Any]):
    backend, script, tokenizer = reciting
    text = tokenizer.apply_chat_template(SAID, tools=[WEATHER], tokenize=False, add_generation_prompt=True)
    n_prompt = len(tokenizer.encode(text, add_special_tokens=False))
    said = [*tokenizer.encode(TWO_CALLS, add_special_tokens=False), tokenizer.eos_token_id]
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    async with openai_client(backend) as client, anthropic_client(backend) as other:
        for parallel, cities in ((True, ["Paris", "Lima"]), (False, ["Paris"])):
            script.say(n_prompt, said)
            choice: Any = {"type": "auto", "disable_parallel_tool_use": not parallel}
            message = await other.messages.create(
                model="policy", messages=SAID, max_tokens=400, tools=[tool], tool_choice=choice
            )
            assert [block.input["city"] for block in message.content if block.type == "tool_use"] == cities
            assert message.stop_reason == "tool_use"
            script.say(n_prompt, said)
            response = await client.responses.create(
                model="policy", input=SAID, tools=[{"type": "function", **function}], parallel_tool_calls=parallel
            )
            calls = [item for item in response.output if item.type == "function_call"]
            assert [call.arguments for call in calls] == [f'{{"city": "{city}"}}' for city in cities]


async def test_errors_have_the_form_of_the_clients_api():
    async with (
        EmbeddedBackend(tiny.model(), tokenizer=tiny.tokenizer(), api_key=KEY) as backend,
        openai_client(backend) as client,
        anthropic_client(backend) as other,
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"top_k.* must be -1 or 0") as refused:
            await other.messages.create(model="policy", messages=SAID, max_tokens=4, extra_body={"top_k": 40})
        assert refused.value.body["type"] == "error"
        with pytest.raises(openai.BadRequestError, match="previous_response_id") as wrong:
            await client.responses.create(model="policy", input="hi", previous_response_id="resp_1")
        assert wrong.value.param == "previous_response_id"
        with pytest.raises(anthropic.NotFoundError, match="'other' is not served here"):
            await other.messages.create(model="other", messages=SAID, max_tokens=4)
        with pytest.raises(openai.BadRequestError, match="choices must be one"):
            await client.responses.create(model="policy", input="hi", max_output_tokens=2, extra_body={"n": 2})
        async with anthropic_client(backend, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="missing or wrong"):
                await stranger.messages.create(model="policy", messages=SAID, max_tokens=4)
        url, headers = f"{backend.endpoint().endpoint}/messages", {"authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for body in (
                b"",
                b"[]",
                b"{}",
                b'{"model": 3}',
                b'{"model": "policy", "messages": {}}',
                b'{"model": "policy"}',
            ):
                async with session.post(url, data=body) as answer:
                    assert (answer.status, (await answer.json())["type"]) == (400, "error"), body
            async with session.get(url) as answer:
                assert answer.status == 405


async def test_a_prompt_is_counted_as_it_is_answered_in_every_api():
    said: list[Any] = [*SAID, {"role": "assistant", "content": "42?"}, {"role": "user", "content": "higher"}]
    async with (
        EmbeddedBackend(tiny.model(), tokenizer=tiny.tokenizer(), api_key=KEY, deterministic=True) as backend,
        openai_client(backend) as client,
        anthropic_client(backend) as other,
    ):
        asked: dict[str, Any] = {"model": "policy", "system": "Guess.", "messages": said}
        message = await other.messages.create(**asked, max_tokens=1, extra_body={"seed": 1})
        counted = await other.messages.count_tokens(**asked)
        assert counted.input_tokens == message.usage.input_tokens
        item: Any = {"model": "policy", "instructions": "Guess.", "input": said}
        response = await client.responses.create(**item, max_output_tokens=1, extra_body={"seed": 1})
        assert (await client.responses.input_tokens.count(**item)).input_tokens == response.usage.input_tokens
        root = backend.endpoint().endpoint.removesuffix("/v1")
        headers = {"authorization": f"Bearer {KEY}"}
        body: dict[str, Any] = {"model": "policy", "messages": SAID}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{root}/tokenize", json=body) as reply:
                found = await reply.json()
            answer = await client.chat.completions.create(
                **body, max_tokens=1, extra_body={"return_token_ids": True, "seed": 1}
            )
            assert found["tokens"] == answer.model_extra["prompt_token_ids"]
            assert found["count"] == len(found["tokens"]) == answer.usage.prompt_tokens
            for wrong, status in (({"model": "other", "messages": SAID}, 404), ({"model": "policy"}, 400)):
                async with session.post(f"{root}/tokenize", json=wrong) as reply:
                    assert reply.status == status
        async with aiohttp.ClientSession() as session, session.post(f"{root}/tokenize", json=body) as reply:
            assert reply.status == 401
