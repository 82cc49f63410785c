"""The fake model tells the truth about its tokens, in vLLM's convention, and misbehaves only when told to."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from leyden.errors import ConfigError
from leyden.testing import FakeUpstream, Misbehaviour, Reply, ToolCall, decode, encode, prompt_ids
from leyden.testing.__main__ import main


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


async def post(upstream: FakeUpstream, path: str, **body: Any) -> Any:
    async with aiohttp.ClientSession() as session:
        url = f"{upstream.endpoint}/{path}"
        async with session.post(url, json={"model": "fake", **body}) as response:
            raw = await response.read()
    if body.get("stream"):
        return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    return json.loads(raw)


MESSAGES = [{"role": "user", "content": "hello"}]
WISHES = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}


@given(st.text())
def test_tokens_are_reversible(text: str) -> None:
    assert decode(encode(text)) == text


async def test_an_answer_follows_from_the_request_and_its_seed(upstream: FakeUpstream) -> None:
    texts = [
        (await post(upstream, "chat/completions", messages=MESSAGES, seed=seed))["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_ids_stand_where_vllm_puts_them(upstream: FakeUpstream) -> None:
    chat = await post(upstream, "chat/completions", messages=MESSAGES, **WISHES)
    completion = await post(upstream, "completions", prompt="hello", **WISHES)
    first, second = upstream.calls
    assert chat["prompt_token_ids"] == first.prompt_ids == prompt_ids(MESSAGES)
    assert chat["choices"][0]["token_ids"] == first.response_ids
    assert [entry["logprob"] for entry in chat["choices"][0]["logprobs"]["content"]] == first.logprobs
    assert completion["choices"][0]["prompt_token_ids"] == second.prompt_ids == encode("hello")
    assert completion["choices"][0]["token_ids"] == second.response_ids
    assert completion["choices"][0]["logprobs"]["token_logprobs"] == second.logprobs


@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "hi"})]
)
async def test_a_stream_holds_the_same_as_a_whole_answer(upstream: FakeUpstream, path: str, prompt: Any) -> None:
    chunks = await post(upstream, path, stream=True, **prompt, **WISHES)
    truth = upstream.calls[0]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [id_ for choice in choices for id_ in choice.get("token_ids") or []] == truth.response_ids
    text = "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)
    assert text == truth.text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(truth.response_ids)
    assert "prompt_token_ids" in {**chunks[0], **choices[0]}
    assert not any("prompt_token_ids" in {**chunk, **(chunk["choices"] or [{}])[0]} for chunk in chunks[1:])


async def test_nothing_is_given_that_was_not_asked_for(upstream: FakeUpstream) -> None:
    chat = await post(upstream, "chat/completions", messages=MESSAGES)
    assert "prompt_token_ids" not in chat
    assert "token_ids" not in chat["choices"][0]
    assert chat["choices"][0]["logprobs"] is None
    chunks = await post(upstream, "chat/completions", messages=MESSAGES, stream=True)
    assert not any("usage" in chunk for chunk in chunks)


async def test_an_answer_that_is_cut_short_has_no_end_token(upstream: FakeUpstream) -> None:
    chat = await post(upstream, "chat/completions", messages=MESSAGES, max_tokens=3)
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["completion_tokens"] == len(upstream.calls[0].response_ids) == 3
    assert encode(chat["choices"][0]["message"]["content"]) == upstream.calls[0].response_ids


async def test_the_official_client_reads_answers_and_errors() -> None:
    async with FakeUpstream(reply=lambda request: f"{len(request['messages'])} messages") as upstream:
        llm = upstream.llm()
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
            messages: Any = MESSAGES
            answer = await client.chat.completions.create(model="fake", messages=messages)
            assert answer.choices[0].message.content == "1 messages"
            assert upstream.truth(answer.id).text == "1 messages"
            upstream.misbehave(Misbehaviour(status=429), Misbehaviour(close_after_chunks=0))
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="fake", messages=messages)
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="fake", messages=messages)
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="other", messages=messages)
            await client.chat.completions.create(model="fake", messages=messages)


CALLS = (ToolCall("weather", '{"place": "Zürich"}', "c0"), ToolCall("time"))
PROMPTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "messages": {"messages": MESSAGES, "max_tokens": 999},
    "responses": {"input": "hello"},
}


@pytest.mark.parametrize("path", PROMPTS)
async def test_reasoning_text_and_calls_are_sampled_tokens(path: str) -> None:
    async with FakeUpstream(reply=lambda _: Reply("I look. 🌩", "hm 雷", CALLS)) as upstream:
        answer = await post(upstream, path, **PROMPTS[path], **WISHES)
        truth = upstream.calls[0]
    assert (truth.text, truth.reasoning, truth.finish_reason) == ("I look. 🌩", "hm 雷", "tool_calls")
    assert truth.prompt_ids == prompt_ids(MESSAGES)
    assert decode(truth.response_ids).startswith("hm 雷I look. 🌩c0weather{")
    first, second = truth.calls
    assert first == CALLS[0]
    assert second.call_id.startswith("call_")
    shown = json.dumps(answer, ensure_ascii=False)
    assert all(text in shown for text in ("hm 雷", "I look. 🌩", "Zürich", second.call_id))


@pytest.mark.parametrize("path", PROMPTS)
async def test_the_next_prompt_begins_with_what_was_sampled(path: str) -> None:
    async with FakeUpstream(reply=lambda _: Reply("I look.", "hm", CALLS[:1])) as upstream:
        said = {"role": "assistant", "content": "I look.", "reasoning": "hm"}
        function = {"name": "weather", "arguments": CALLS[0].arguments}
        said["tool_calls"] = [{"id": "c0", "type": "function", "function": function}]
        result = {"role": "tool", "tool_call_id": "c0", "content": "20°"}
        await post(upstream, path, **PROMPTS[path])
        told = prompt_ids([*MESSAGES, said, result])
        truth = upstream.calls[0]
    assert told[: len(truth.prompt_ids) + len(truth.response_ids)] == truth.prompt_ids + truth.response_ids


@pytest.mark.parametrize(("path", "limit"), [("messages", "max_tokens"), ("responses", "max_output_tokens")])
async def test_a_call_that_is_cut_short_is_told_as_far_as_it_came(path: str, limit: str) -> None:
    async with FakeUpstream(reply=lambda _: Reply("", "", CALLS[:1])) as upstream:
        answer = await post(upstream, path, **{**PROMPTS[path], limit: 16})
        truth = upstream.calls[0]
    assert truth.finish_reason == "length"
    assert truth.calls[0].arguments == CALLS[0].arguments[: len(truth.calls[0].arguments)] != ""
    assert (answer.get("stop_reason"), answer.get("status")) in (("max_tokens", None), (None, "incomplete"))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda _: {"tool_calls": []}, "reply returned a dict; return a str or leyden.testing.Reply"),
        (lambda _: None, "reply returned None; return a str or leyden.testing.Reply"),
        (lambda _: Reply(calls=({"name": "add"},)), "whose calls hold a dict; use leyden.testing.ToolCall"),
        (lambda body: body["absent"], "reply raised KeyError: 'absent'"),
    ],
)
async def test_a_wrong_reply_function_is_named_and_not_the_request(reply: Any, message: str) -> None:
    async with FakeUpstream(reply=reply) as upstream:
        answer = await post(upstream, "chat/completions", messages=MESSAGES)
    assert message in answer["error"]["message"]
    assert not upstream.calls


@pytest.mark.parametrize(
    ("served", "asked", "status"),
    [
        ("fake", "fake", 200),
        ("fake", "other", 404),
        (["a", "b"], "a", 200),
        (("a", "b"), "b", 200),
        (["a", "b"], "c", 404),
        (None, "anything/at-all", 200),
        (None, 5, 404),
        (None, None, 404),
    ],
)
async def test_one_name_a_list_or_any_name_is_served(served: Any, asked: Any, status: int) -> None:
    async with FakeUpstream(model=served) as upstream, aiohttp.ClientSession() as session:
        body = {"model": asked, "messages": MESSAGES, "max_tokens": 9}
        for path in ("chat/completions", "messages"):
            async with session.post(f"{upstream.endpoint}/{path}", json=body) as response:
                assert response.status == status
                if status == 200:
                    assert (await response.json())["model"] == asked
        async with session.get(f"{upstream.endpoint}/models") as response:
            listed = [model["id"] for model in (await response.json())["data"]]
    assert listed == (["fake"] if served is None else [served] if isinstance(served, str) else list(served))
    assert upstream.llm().model == listed[0]
    assert upstream.llm("b").model == "b"


@pytest.mark.parametrize("wrong", ["", [], [""], [5]])
def test_no_name_to_serve_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="give a name, a list of names, or None"):
        FakeUpstream(model=wrong)


@pytest.mark.parametrize(
    ("options", "said", "model"), [((), "any model", "x"), (("--model", "a", "--model", "b"), "a, b", "b")]
)
async def test_a_server_of_its_own_answers_until_it_is_told_to_end(
    options: tuple[str, ...], said: str, model: str
) -> None:
    command = [sys.executable, "-m", "leyden.testing", "--port", "0", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(50):
        line = (await process.stdout.readline()).decode()
        assert line.startswith(f"serving {said} at http://127.0.0.1:")
        async with AsyncOpenAI(base_url=line.split()[-1], api_key="any", max_retries=0) as client:
            answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def test_the_command_says_what_it_takes_and_why_it_cannot_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--port", "--model", "--delay"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    assert main(["--port", "99999"]) == 2
    assert main(["--model", ""]) == 2
    assert capsys.readouterr().err.count("the server cannot start: ") == 3
