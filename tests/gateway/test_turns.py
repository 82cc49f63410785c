"""An answer that an agent writes in another way reaches the model's server as the model wrote it, and nothing else does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from leyden.adapter import turn_merges
from leyden.cli.show import print_rollout
from leyden.dialects.turns import turn_of
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.gateway.turns import Turns
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Reply, ToolCall
from leyden.types import Span, semconv
from tests.gateway.caller import Caller, new_caller, say

ARGUMENTS = '{"command": "echo Gr\\u00f6\\u00dfe", "seconds": 1.0, "env": {"B": 1, "A": [1, 2]}}'
Rewrite = Callable[[dict[str, Any]], dict[str, Any]]


def reply(body: dict[str, Any]) -> Reply:
    n = sum(message["role"] == "assistant" for message in body.get("messages", body.get("input", [])))
    if n == 3:
        return Reply("\n\nDone. ")
    calls = (ToolCall("shell", ARGUMENTS), ToolCall("shell", f'{{"command": "ls", "n": {n}}}'))
    return Reply("\nI look. ", reasoning="Hm. " if body.get("reasoning_effort") else "", calls=calls)


def arguments(write: Callable[[Any], str]) -> Rewrite:
    def rewrite(message: dict[str, Any]) -> dict[str, Any]:
        calls = [
            {**call, "function": {**call["function"], "arguments": write(json.loads(call["function"]["arguments"]))}}
            for call in message.get("tool_calls") or ()
        ]
        return {**message, **({"tool_calls": calls} if calls else {})}

    return rewrite


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def new_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": f"toolu_{n}"} for n, call in enumerate(message.get("tool_calls") or ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


REWRITTEN: dict[str, Rewrite] = {
    "unchanged": dict,
    "compact": arguments(compact),
    "indented": arguments(lambda value: json.dumps(value, indent=2)),
    "sorted": arguments(lambda value: json.dumps(value, sort_keys=True)),
    "reversed": arguments(lambda value: json.dumps(dict(reversed(value.items())))),
    "whole numbers": arguments(lambda value: compact(value).replace("1.0", "1")),
    "exponents": arguments(lambda value: compact(value).replace("1.0", "10e-1")),
    "trimmed": lambda message: {**message, "content": message["content"].strip()},
    "parts": lambda message: {**message, "content": [{"type": "text", "text": message["content"].strip()}]},
    "other ids": new_ids,
    "all of it": lambda m: new_ids(arguments(compact)({**m, "content": m["content"].strip()})),
}
CHANGED: dict[str, Rewrite] = {
    "another value": arguments(lambda value: compact({**value, "command": "true"})),
    "a number as text": arguments(lambda value: compact({**value, "env": "1"})),
    "true for one": arguments(lambda value: compact({**value, "seconds": True})),
    "other order": lambda m: {**m, **({"tool_calls": m["tool_calls"][::-1]} if m.get("tool_calls") else {})},
    "fewer calls": lambda m: {**m, **({"tool_calls": m["tool_calls"][:1]} if m.get("tool_calls") else {})},
    "other text": lambda message: {**message, "content": "I looked."},
    "no text": lambda message: {**message, "content": None},
}


async def converse(caller: Caller, rewrite: Rewrite, **fields: Any) -> tuple[list[Span], list[Any]]:
    """Return the calls of a conversation of four turns, and the messages that the agent sent."""
    messages = say("go")
    for _ in range(4):
        answer = await caller.client.chat.completions.create(model="fake", messages=messages, **fields)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(rewrite(message))
        for call in messages[-1].get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        if not message.get("tool_calls"):
            messages.append({"role": "user", "content": "go on"})
    return await caller.spans(), messages


@pytest.fixture
def upstream() -> FakeUpstream:
    return FakeUpstream(reply=reply)


@pytest.fixture
async def caller(upstream: FakeUpstream, store: InMemoryLightningStore) -> Any:
    async with upstream, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            yield caller


@pytest.mark.parametrize("name", REWRITTEN)
async def test_a_rewritten_answer_continues_the_tokens_of_the_earlier_call(
    caller: Caller, upstream: FakeUpstream, name: str
) -> None:
    spans, sent = await converse(caller, REWRITTEN[name])
    turns = turn_merges(spans)
    assert (turns.continued, turns.merged, turns.splits) == (3, 3, [])
    changed = [span.attributes.get(semconv.RESTORED) for span in spans]
    assert changed[0] is None
    assert [bool(each) for each in changed[1:]] == [name not in ("unchanged",)] * 3
    for span, served in zip(spans, upstream.calls, strict=True):
        assert span.tokens is not None and list(span.tokens.prompt_ids) == served.prompt_ids
        recorded = json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]))
        assert recorded == sent[: len(recorded)]  # the record has the agent's words


@pytest.mark.parametrize("name", CHANGED)
async def test_an_answer_with_another_meaning_passes_as_the_agent_sent_it_and_branches(
    caller: Caller, upstream: FakeUpstream, name: str
) -> None:
    spans, _ = await converse(caller, CHANGED[name])
    assert not any(semconv.RESTORED in span.attributes for span in spans)
    for span in spans:
        sent = json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]))
        served = next(c for c in upstream.calls if c.response_id == span.attributes[semconv.GEN_AI_RESPONSE_ID])
        assert served.request["messages"] == sent
    turns = turn_merges(spans)
    assert turns.merged < turns.continued
    assert turns.splits[0].reason == "history rewritten"
    assert str(turns.splits[0]).startswith("call 1 of AsyncOpenAI/Python ")


@pytest.mark.parametrize("name", ["compact", "another value"])
async def test_a_rollout_is_shown_with_its_merged_turns_and_a_low_share_names_program_turn_and_difference(
    caller: Caller, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    await converse(caller, {**REWRITTEN, **CHANGED}[name])
    await print_rollout(caller.store, caller.rollout_id, full=False)
    shown = capsys.readouterr().out
    low = re.search(r"call 1 of AsyncOpenAI/Python \S+ continues call 0: history rewritten: messages\[1\]", shown)
    assert (low is None) == (name == "compact")
    assert re.search(r"turns +3 of 3 continue" if name == "compact" else r"turns +[0-2] of 3 continue", shown)


async def test_reasoning_that_the_agent_left_out_stays_out_and_is_named(caller: Caller) -> None:
    def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
        kept = {name: each for name, each in message.items() if "reasoning" not in name}
        return arguments(compact)(kept)

    spans, _ = await converse(caller, without_thoughts, reasoning_effort="low")
    assert spans[1].attributes[semconv.RESTORED] == ["messages[1].tool_calls"]
    assert turn_merges(spans).splits[0].reason == "reasoning dropped"


async def test_another_conversation_and_another_attempt_get_nothing_of_this_one(
    caller: Caller, upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    answer = await caller.client.chat.completions.create(model="fake", messages=say("go"))
    message = arguments(compact)(answer.choices[0].message.model_dump(exclude_none=True))
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]
    other = await new_caller(caller.proxy, store)
    async with other.client:
        for client, first in ((other.client, "go"), (caller.client, "go now")):
            messages: Any = [*say(first), message, *results]
            await client.chat.completions.create(model="fake", messages=messages)
            assert upstream.requests[-1]["messages"] == messages


async def test_a_call_without_recorded_tokens_passes_as_it_is(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with upstream:
        model = UpstreamModel("fake", upstream.endpoint, record_tokens=False)
        async with LLMProxy(model_list=[model], store=store) as proxy:
            caller = await new_caller(proxy, store)
            async with caller.client:
                spans, sent = await converse(caller, REWRITTEN["compact"])
    assert not any(semconv.RESTORED in span.attributes for span in spans)
    n_sent = len(upstream.requests[-1]["messages"])
    assert upstream.requests[-1]["messages"] == sent[:n_sent]


def answer(text: str, call_id: str) -> dict[str, Any]:
    return {"tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": text}}]}


def test_of_two_answers_that_say_the_same_the_one_with_the_ids_is_put_back_else_the_newest() -> None:
    turns = Turns()
    key = ("r", "a")
    for text, call_id in (('{"a": 1}', "x"), ('{"a" : 1}', "y")):
        turns.add(key, say("go"), {"role": "assistant", "content": None, **answer(text, call_id)})
    for call_id, text in (("x", '{"a": 1}'), ("y", '{"a" : 1}'), ("z", '{"a" : 1}')):
        (_, found), _ = turns.restore(key, [*say("go"), {"role": "assistant", **answer('{"a":1}', call_id)}])
        assert found["tool_calls"][0]["function"]["arguments"] == text


def test_empty_arguments_stay_an_object_because_servers_refuse_them_empty() -> None:
    turns = Turns()
    turns.add(("r", "a"), say("go"), {"role": "assistant", **answer("", "x")})
    messages = [*say("go"), {"role": "assistant", **answer("{}", "x")}]
    assert turns.restore(("r", "a"), messages) == (messages, [])


def test_equal_calls_that_were_exchanged_with_their_results_stay_exchanged() -> None:
    turns = Turns()
    calls = [answer('{"a": 1}', call_id)["tool_calls"][0] for call_id in "xy"]
    turns.add(("r", "a"), say("go"), {"role": "assistant", "tool_calls": calls})
    results = [{"role": "tool", "tool_call_id": call_id, "content": call_id} for call_id in "yx"]
    messages = [*say("go"), {"role": "assistant", "tool_calls": calls[::-1]}, *results]
    assert turns.restore(("r", "a"), messages) == (messages, [])


def test_ids_belong_to_the_answer_before_them() -> None:
    turns = Turns()
    turns.add(("r", "a"), say("go"), {"role": "assistant", **answer('{"a": 1}', "x")})
    result = {"role": "tool", "tool_call_id": "mine", "content": "ok"}
    mine, made_up = {"role": "assistant", **answer('{"a": 1}', "mine")}, {"role": "assistant", **answer("{}", "mine")}
    found, changed = turns.restore(("r", "a"), [*say("go"), mine, result, made_up, result])
    assert [message.get("tool_call_id") for message in found] == [None, None, "x", None, "mine"]
    assert changed == ["messages[1].tool_calls", "messages[2].tool_call_id"]


def test_calls_whose_ids_are_all_alike_keep_them() -> None:
    turns = Turns()
    calls = [answer(f'{{"a": {n}}}', f"x{n}")["tool_calls"][0] for n in range(2)]
    turns.add(("r", "a"), say("go"), {"role": "assistant", "tool_calls": calls})
    same = [{**call, "id": "call"} for call in calls]
    messages = [*say("go"), {"role": "assistant", "tool_calls": same}]
    assert turns.restore(("r", "a"), messages) == (messages, [])


def test_a_request_that_goes_on_is_read_from_where_it_is_new_and_a_changed_one_from_the_change() -> None:
    turns, key = Turns(), ("r", "a")
    messages = say("go")
    for n in range(3):
        sent = {"role": "assistant", **answer(f'{{"n":{n}}}', f"x{n}")}
        turns.add(key, messages, {"role": "assistant", **answer(f'{{"n": {n}}}', f"x{n}")})
        messages = [*messages, sent, {"role": "tool", "tool_call_id": f"x{n}", "content": "ok"}]
        assert turns.restore(key, messages)[1] == [f"messages[{1 + 2 * each}].tool_calls" for each in range(n + 1)]
    changed = [*messages[:2], {**messages[2], "content": "no"}, *messages[3:]]
    assert turns.restore(key, changed)[1] == ["messages[1].tool_calls"]
    assert len(turns.restore(key, messages)[1]) == 3


def test_a_mark_for_a_cache_that_moves_is_no_other_conversation() -> None:
    turns, key = Turns(), ("r", "a")
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    for others in ([], [picture]):
        part = {"type": "text", "text": "go"}
        mark = {"cache_control": {"type": "ephemeral"}}
        marked: Any = {"role": "user", "content": [*others, {**part, **mark}], **mark}
        plain: Any = {"role": "user", "content": [*others, part] if others else "go"}
        turns.add(key, [marked], {"role": "assistant", **answer('{"a": 1}', "x")})
        messages = [plain, {"role": "assistant", **answer('{"a":1}', "x")}]
        assert turns.restore(key, messages)[1] == ["messages[1].tool_calls"]


def test_answers_are_dropped_with_their_attempt_and_beyond_the_limit() -> None:
    turns = Turns(limit_bytes=1200)
    for n in range(9):
        turns.add((f"r{n}", "a"), say("go"), {"role": "assistant", **answer(json.dumps({"a": "x" * 300}), "x")})
    assert len(turns) == 2
    turns.end(("r8", "a"))
    turns.end(("r8", "a"))
    assert len(turns) == 1
    messages = [*say("go"), {"role": "assistant", **answer(json.dumps({"a": "x" * 300}, indent=1), "x")}]
    assert turns.restore(("r8", "a"), messages) == (messages, [])
    assert turn_of(turns.restore(("r7", "a"), messages)[0][1]) == turn_of(messages[1])
    assert turns.restore(("r7", "a"), messages)[1] == ["messages[1].tool_calls"]


# ---- tools that a server cannot run ------------------------------------------------------------------------------------

HOSTED = {
    "responses": {"type": "web_search", "external_web_access": True},
    "messages": {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
}


def body_of(route: str, *tools: Any, **fields: Any) -> dict[str, Any]:
    turns = {"input": "hello"} if route == "responses" else {"messages": say("hello"), "max_tokens": 50}
    return {"model": "fake", "tools": [*tools], **turns, **fields}


async def asked(caller: Caller, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {caller.llm.api_key}", "anthropic-version": "2023-06-01"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{caller.llm.endpoint}/{route}", json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("route", HOSTED)
async def test_a_hosted_tool_is_refused_with_the_option_that_leaves_it_out(caller: Caller, route: str) -> None:
    status, found = await asked(caller, route, body_of(route, HOSTED[route]))
    assert status == 400
    assert f"dropped_tools=['{HOSTED[route]['type']}']" in found["error"]["message"]


@pytest.mark.parametrize("route", HOSTED)
async def test_a_hosted_tool_is_left_out_if_the_user_names_it_and_the_record_says_so(
    store: InMemoryLightningStore, route: str
) -> None:
    own: Any = {"name": "web_search", "description": "Mine."}
    own |= {"type": "function", "parameters": {}} if route == "responses" else {"input_schema": {"type": "object"}}
    async with (
        FakeUpstream() as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store, dropped_tools=["web_search"]) as proxy,
    ):
        caller = await new_caller(proxy, store)
        choice: Any = "auto" if route == "responses" else {"type": "auto"}
        status, found = await asked(caller, route, body_of(route, HOSTED[route], tool_choice=choice))
        assert status == 200, found
        assert "tools" not in upstream.requests[-1] and "tool_choice" not in upstream.requests[-1]
        assert (await asked(caller, route, body_of(route, HOSTED[route], own)))[0] == 200
        assert [tool["function"]["name"] for tool in upstream.requests[-1]["tools"]] == ["web_search"]
        assert (await asked(caller, route, body_of(route, {"type": "code_execution", "name": "x"})))[0] == 400
        spans = await caller.spans()
    assert [span.attributes.get(semconv.DROPPED_TOOLS) for span in spans] == [["web_search"], ["web_search"], None]


@pytest.mark.parametrize("wrong", ["web_search", [5], [""]])
def test_dropped_tools_are_a_list_of_names(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="dropped_tools"):
        LLMProxy(dropped_tools=wrong)
