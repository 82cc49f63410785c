"""Functions in the namespaces of the Responses API are functions of chat, and calls to them come back as they were named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from leyden.dialects import DIALECTS, DONE, Translation, dump, sse_event
from leyden.errors import Untranslatable
from leyden.testing import request_prompt_ids

CHAT, RESPONSES = DIALECTS["chat"], DIALECTS["responses"]


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **fields}


def namespace(name: str, *functions: str, **fields: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [function(each) for each in functions], **fields}


def call(name: str, space: str | None, call_id: str = "c1") -> dict[str, Any]:
    named = {"name": name} if space is None else {"name": name, "namespace": space}
    return {"type": "function_call", "call_id": call_id, "arguments": "{}", **named}


def request_of(*tools: Any, calls: tuple[Any, ...] = (), **fields: Any) -> dict[str, Any]:
    results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "ok"} for each in calls]
    return {"model": "m", "input": [{"role": "user", "content": "go"}, *calls, *results], "tools": [*tools], **fields}


def names_of(request: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in RESPONSES.request_to_chat(request)["tools"]]


def answer_with(*names: str) -> dict[str, Any]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return {
        "id": "r",
        "model": "m",
        "created": 1,
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }


def named(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(item.get("namespace"), item["name"]) for item in items]


def streamed(request: dict[str, Any], answer: dict[str, Any]) -> list[dict[str, Any]]:
    translation = Translation(
        RESPONSES, CHAT, dump(request), {**request, "stream": True}, model="m", record_tokens=False
    )
    stream = translation.stream()
    message = answer["choices"][0]["message"]
    pieces = [{"tool_calls": [{"index": n, **each}]} for n, each in enumerate(message["tool_calls"])]
    deltas = [{"delta": piece, "finish_reason": None} for piece in pieces]
    sent = b""
    for delta in [*deltas, {"delta": {}, "finish_reason": "tool_calls"}]:
        chunk = {"id": "r", "object": "chat.completion.chunk", "choices": [{"index": 0, **delta}]}
        sent += stream.feed(sse_event(dump(chunk)), dump(chunk))
    sent += stream.feed(sse_event(DONE), DONE)
    return [json.loads(line[6:]) for line in sent.decode().splitlines() if line.startswith("data: ")]


def test_a_namespace_is_functions_of_chat_that_read_the_same_to_both_servers() -> None:
    request = request_of(
        function("shell"),
        namespace("agents", "spawn", "wait", description="Sub-agents."),
        calls=(call("spawn", "agents"), call("shell", None, "c2")),
    )
    chat = RESPONSES.request_to_chat(request)
    assert names_of(request) == ["shell", "agents__spawn", "agents__wait"]
    assert chat["tools"][1]["function"]["description"] == "Sub-agents."
    assert [each["function"]["name"] for each in chat["messages"][1]["tool_calls"]] == ["agents__spawn", "shell"]
    assert "namespace" not in json.dumps(chat)
    assert request_prompt_ids("responses", request) == request_prompt_ids("chat/completions", chat)


def test_a_call_comes_back_in_its_namespace_whole_and_in_a_stream() -> None:
    request = request_of(function("wait"), namespace("agents", "spawn", "wait"))
    answer = answer_with("agents__wait", "wait", "agents__spawn", "agents__unknown")
    wanted = [("agents", "wait"), (None, "wait"), ("agents", "spawn"), (None, "agents__unknown")]
    assert named(RESPONSES.answer_from_chat(answer, request)["output"]) == wanted
    events = streamed(request, answer)
    assert named([e["item"] for e in events if e["type"] == "response.output_item.added"]) == wanted
    assert named([e["item"] for e in events if e["type"] == "response.output_item.done"]) == wanted
    assert named(events[-1]["response"]["output"]) == wanted


@pytest.mark.parametrize(
    ("tools", "pairs"),
    [
        ([function("a__b"), namespace("a", "b")], [(None, "a__b"), ("a", "b")]),
        ([namespace("a", "b__c"), namespace("a__b", "c")], [("a", "b__c"), ("a__b", "c")]),
        ([namespace("n" * 40, "f" * 40), namespace("n" * 40, "f" * 41)], [("n" * 40, "f" * 40), ("n" * 40, "f" * 41)]),
        ([namespace("mcp.x", "read file"), namespace("mcp_x", "read file")], [("mcp.x", "read file")]),
        ([namespace("größe", "雷"), namespace("größe", "電")], [("größe", "雷"), ("größe", "電")]),
        ([namespace("a", "b", "b")], [("a", "b")]),
    ],
)
def test_names_that_collide_are_too_long_or_odd_stay_apart_and_come_back(
    tools: list[Any], pairs: list[tuple[Any, str]]
) -> None:
    calls = tuple(call(name, space, f"c{n}") for n, (space, name) in enumerate(pairs))
    request = request_of(*tools, calls=calls)
    chat = RESPONSES.request_to_chat(request)
    offered = names_of(request)
    assert len({*offered}) == len({(None if t["type"] == "function" else t["name"], f["name"])
                                   for t in tools for f in t.get("tools", [t])})  # fmt: skip
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in offered)
    sent = [each["function"]["name"] for each in chat["messages"][1]["tool_calls"]]
    assert {*sent} <= {*offered}
    assert named(RESPONSES.answer_from_chat(answer_with(*sent), request)["output"]) == pairs


def test_a_call_of_an_earlier_turn_keeps_its_name_when_its_namespace_is_gone() -> None:
    with_it, without_it = (
        request_of(*tools, calls=(call("spawn", "agents"),)) for tools in ([namespace("agents", "spawn")], [])
    )
    messages = [RESPONSES.request_to_chat(request)["messages"] for request in (with_it, without_it)]
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        (namespace("a", "b", policy="x"), "tools[0].policy"),
        ({"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}, "tools[0].tools[0].type"),
        ({"type": "namespace", "name": "a", "tools": [5]}, "tools[0].tools[0]"),
        ({"type": "namespace", "name": "a", "tools": 5}, "tools[0].tools"),
    ],
)
def test_what_a_namespace_holds_besides_functions_is_refused_by_name(tool: dict[str, Any], field: str) -> None:
    with pytest.raises(Untranslatable) as refused:
        RESPONSES.request_to_chat(request_of(tool))
    assert refused.value.field == field


def test_a_choice_may_name_a_function_of_a_namespace() -> None:
    request = request_of(namespace("a", "b"), tool_choice={"type": "function", "namespace": "a", "name": "b"})
    assert RESPONSES.request_to_chat(request)["tool_choice"] == {"type": "function", "function": {"name": "a__b"}}


def test_a_server_of_the_responses_api_names_a_call_as_its_chat_name_for_the_record() -> None:
    answer = {"id": "r", "output": [call("spawn", "agents")], "status": "completed"}
    calls = RESPONSES.answer_to_chat(answer)["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "agents__spawn"
