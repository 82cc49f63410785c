"""Whoever recorded it, the same agent is the same view: proven on spans that real instrumentors recorded, and on the conventions' own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.adapter import (
    TracerTraceToTriplet,
    TraceToMessages,
    TraceTree,
    model_calls,
    read_agent,
    read_model_call,
    read_tool_call,
)
from tests.adapter.traces import recorded, span

OSLO_AND_ROME = [
    {"id": f"call_1{letter}", "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
    for letter, city in (("a", "Oslo"), ("b", "Rome"))
]
QUESTION = "Where is it warmer, Oslo or Rome?"
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/map.png"}}


def conversation(*, image: bool) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}, IMAGE] if image else QUESTION},
        {"role": "assistant", "content": None, "tool_calls": OSLO_AND_ROME},
        {"role": "tool", "tool_call_id": "call_1a", "content": "3 degrees"},
        {"role": "tool", "tool_call_id": "call_1b", "content": "19 degrees"},
        {"role": "assistant", "content": "Rome is warmer."},
    ]


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as values, since their JSON may be spaced in any way, and without the author's name that some frameworks add."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        message.pop("name", None)
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


RECORDINGS = [
    ("gen_ai", None),
    ("openllmetry", None),
    ("agentops", None),
    ("openinference", None),
    ("openinference_openai_agents", "Guide"),
    ("openinference_langgraph", "guide.agent"),
]


@pytest.mark.parametrize(("name", "agent_name"), RECORDINGS)
def test_every_recorded_dialect_tells_the_same_conversation(name: str, agent_name: str | None):
    spans = recorded(name)
    first, second = TraceToMessages().every_answer(spans)
    expected = conversation(image=agent_name is None)
    assert plain(first["messages"]) == expected[:3]
    assert plain(second["messages"]) == expected
    assert TraceToMessages().adapt(spans) == [second], "the first call is its beginning"
    assert first["tools"] is not None
    (tool,) = first["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", "weather")
    assert tool["function"]["parameters"]["required"] == ["city"]


@pytest.mark.parametrize(("name", "agent_name"), RECORDINGS)
def test_every_recorded_dialect_tells_ids_usage_settings_and_agents(name: str, agent_name: str | None):
    spans = recorded(name)
    calls = model_calls(spans)
    assert [call.response_id for call in calls] == ["chatcmpl-1", "chatcmpl-2"]
    assert [call.usage for call in calls] == [(21, 7), (22, 7)]
    triplets = TracerTraceToTriplet().adapt(spans)
    assert [triplet.metadata["agent_name"] for triplet in triplets] == [agent_name] * 2
    assert all("without token ids" in triplet.metadata["refused"] for triplet in triplets)
    if agent_name is None:
        assert [triplet.metadata["temperature"] for triplet in triplets] == [0.5, 0.5]
        assert triplets[0].prompt.image_urls == [IMAGE["image_url"]["url"]]
    else:
        assert [len(call.spans) for call in calls] == [2, 2], "each was seen by the framework and by the client"


def test_the_tools_that_ran_are_read():
    tools = [tool for one in recorded("openinference_openai_agents") if (tool := read_tool_call(one))]
    assert [(tool.name, tool.arguments, tool.result) for tool in tools] == [
        ("weather", {"city": "Oslo"}, "3 degrees"),
        ("weather", {"city": "Rome"}, "19 degrees"),
    ]
    executed = span(
        "execute_tool search", 1, 2, id=1, gen_ai__operation__name="execute_tool", gen_ai__tool__name="search",
        gen_ai__tool__call__id="c", gen_ai__tool__call__arguments='{"q": 1}', gen_ai__tool__call__result="found",
    )  # fmt: skip
    tool = read_tool_call(executed)
    assert tool is not None
    assert (tool.name, tool.call_id, tool.arguments, tool.result) == ("search", "c", {"q": 1}, "found")
    assert read_tool_call(span("search", 1, 2, id=2)) is None


def test_agentops_tools_are_known_by_their_call_id_where_their_kind_is_missing():
    """OpenTelemetry's SDK from 1.39 to 1.42 drops `agentops.span.kind`, because its value is an enum."""
    spans = recorded("agentops")
    for one in spans:
        one.attributes.pop("agentops.span.kind", None)
    tools = [tool for one in spans if (tool := read_tool_call(one)) is not None]
    assert [(tool.name, tool.call_id, tool.arguments) for tool in tools] == [
        ("weather", "call_1a", {"city": "Oslo"}),
        ("weather", "call_1b", {"city": "Rome"}),
    ]
    assert TraceToMessages().adapt(spans) == TraceToMessages().adapt(recorded("agentops"))
    assert len(TraceToMessages().every_answer(spans)[0]["messages"][-1]["tool_calls"]) == 2


def test_the_conventions_before_1_37_are_read_with_tool_calls_and_functions():
    attributes = {
        "gen_ai.system": "openai",
        "llm.request.type": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "r",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": QUESTION,
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "c",
        "gen_ai.prompt.1.tool_calls.0.name": "weather",
        "gen_ai.prompt.1.tool_calls.0.arguments": '{"city": "Oslo"}',
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.tool_call_id": "c",
        "gen_ai.prompt.2.content": "3 degrees",
        "gen_ai.prompt.10.content": "And Rome?",
        "gen_ai.prompt.prompt_filter_results": "[]",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.finish_reason": "tool_calls",
        "gen_ai.completion.0.tool_calls.0.id": "d",
        "gen_ai.completion.0.tool_calls.0.name": "weather",
        "gen_ai.completion.0.tool_calls.0.arguments": '{"city": "Rome"}',
        "llm.request.functions.0.name": "weather",
        "llm.request.functions.0.description": "The weather.",
        "llm.request.functions.0.parameters": '{"type": "object"}',
    }
    (found,) = TraceToMessages().adapt([span("openai.chat", 1, 2, id=1, **attributes)])
    assert [message["role"] for message in found["messages"]] == ["user", "assistant", "tool", "user", "assistant"]
    assert found["messages"][3] == {"role": "user", "content": "And Rome?"}, (
        "the eleventh comes last, without a role too"
    )
    assert plain(found["messages"])[-1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Rome"},
    }
    function = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
    assert found["tools"] == [{"type": "function", "function": function}]


def test_system_instructions_reasoning_and_answers_of_tools_as_parts():
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": '[{"type": "text", "content": "Be brief."}]',
        "gen_ai.input.messages": json.dumps(
            [
                {
                    "role": "tool",
                    "parts": [{"type": "tool_call_response", "id": i, "response": {"x": i}} for i in "ab"],
                },
                {
                    "role": "user",
                    "parts": [{"type": "blob", "modality": "image", "mime_type": "image/png", "content": "QQ"}],
                },
            ]
        ),
        "gen_ai.output.messages": json.dumps(
            [
                {
                    "role": "assistant",
                    "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "Yes"}],
                }
            ]
        ),
    }
    call = read_model_call(span("chat m", 1, 2, id=1, **attributes))
    assert call is not None
    assert call.input_messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "a", "content": '{"x": "a"}'},
        {"role": "tool", "tool_call_id": "b", "content": '{"x": "b"}'},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ"}}]},
    ]
    assert call.output_messages == [{"role": "assistant", "content": "Yes", "reasoning_content": "hm"}]


def test_agent_lightnings_weave_spans_are_read_with_their_tokens():
    output = "agentlightning.operation.output"
    attributes = {
        "agentlightning.operation.name": "openai.chat.completions.create",
        "agentlightning.operation.input.model": "m",
        "agentlightning.operation.input.messages.0.role": "user",
        "agentlightning.operation.input.messages.0.content": "2 + 2",
        f"{output}.id": "r",
        f"{output}.choices.0.message.role": "assistant",
        f"{output}.choices.0.message.content": "4",
        f"{output}.choices.0.token_ids": [7, 8],
        f"{output}.prompt_token_ids": [1, 2, 3],
        "logprobs.content": '[{"token": "4", "logprob": -0.5}, {"token": "", "logprob": -1}]',
    }
    (triplet,) = TracerTraceToTriplet().adapt([span("agentlightning.operation", 1, 2, id=1, **attributes)])
    assert triplet.prompt.raw_content == [{"role": "user", "content": "2 + 2"}]
    assert triplet.response.raw_content == [{"role": "assistant", "content": "4"}]
    assert (triplet.prompt.token_ids, triplet.response.token_ids) == ([1, 2, 3], [7, 8])
    assert triplet.response.logprobs == [-0.5, -1.0]
    assert triplet.metadata["response_id"] == "r"


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "embeddings", "gen_ai.response.id": "r"},
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]", "gen_ai.agent.name": "a"},
        {"openinference.span.kind": "AGENT", "llm.input_messages.0.message.role": "user"},
        {"openinference.span.kind": "EMBEDDING", "gen_ai.operation.name": "chat"},
        {"http.request.method": "POST"},
    ],
)
def test_what_is_no_model_call_is_none(attributes: dict[str, Any]):
    assert read_model_call(span("x", 1, 2, id=1, **attributes)) is None


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("invoke_agent", {"gen_ai.agent.name": "me"}),
        ("Agent", {"agent.name": "me"}),
        ("me.agent", {"agentops.span.kind": "agent", "operation.name": "me"}),
        ("me.agent", {"traceloop.span.kind": "agent", "traceloop.entity.name": "me"}),
        ("autogen process", {"recipient_agent_type": "me"}),
        ("chain", {"langchain.chain.type": "me"}),
        ("executor.process", {"executor.id": "me"}),
        ("call", {"type": "agent", "agentlightning.operation.input.name": "me"}),
        ("langchain.Chain.invoke", {"lc_name": "me"}),
        ("me", {"openinference.span.kind": "CHAIN", "metadata": '{"ls_integration": "langgraph"}'}),
    ],
)
def test_agents_are_known_by_the_conventions_of_each_framework(name: str, attributes: dict[str, Any]):
    found = read_agent(span(name, 1, 2, id=1, **attributes))
    assert found is not None
    assert found.name == "me"


def test_an_operation_is_no_agent_only_because_it_has_a_name():
    assert read_agent(span("step", 1, 2, id=1, operation__name="me", agentops__span__kind="task")) is None
    assert TraceTree.from_spans([span("step", 1, 2, id=1)]).agent_name() is None


@pytest.mark.parametrize(
    "attributes",
    [
        {"gen_ai.operation.name": "chat", "gen_ai.input.messages": "not json", "gen_ai.output.messages": '{"a": 1}'},
        {"gen_ai.operation.name": "chat", "gen_ai.input.messages": "[1, null, [2]]", "gen_ai.tool.definitions": "7"},
        {
            "gen_ai.prompt.0": "x",
            "gen_ai.prompt.0.role": "user",
            "gen_ai.completion.x": "y",
            "gen_ai.completion.0.tool_calls": "?",
        },
        {
            "openinference.span.kind": "LLM",
            "llm.input_messages.0.message": "x",
            "llm.tools.0": "y",
            "output.value": "[]",
        },
        {"gen_ai.prompt.0.role": "user", "prompt_token_ids": "__import__('os')", "response_token_ids": [1]},
        {
            "gen_ai.prompt.0.content": '[{"unclosed',
            "logprobs.content": "[3]",
            "prompt_token_ids": [True],
            "response_token_ids": [1],
        },
    ],
)
def test_nonsense_in_attributes_is_no_error_and_no_tokens(attributes: dict[str, Any]):
    call = read_model_call(span("x", 1, 2, id=1, **attributes))
    assert call is not None
    assert call.tokens is None
    assert call.refused == "the call was recorded without token ids"
    TraceToMessages().adapt([span("x", 1, 2, id=1, **attributes)])


def turn(number: int, said: list[str], answer: str) -> Any:
    """A call whose messages alternate between the user and the model, and its answer."""
    parts = [
        {"role": ("user", "assistant")[n % 2], "parts": [{"type": "text", "content": text}]}
        for n, text in enumerate([*said, answer])
    ]
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps(parts[:-1]),
        "gen_ai.output.messages": json.dumps([{**parts[-1], "role": "assistant"}]),
    }
    return span("chat qwen", number, number + 1, id=number, **attributes)


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([(["a"], "b"), (["a", "b", "c"], "d"), (["a", "b", "c", "d", "e"], "f")], ["f"]),
        ([(["a"], "b"), (["a", "changed", "c"], "d")], ["b", "d"]),
        ([(["a"], "b"), (["a"], "b")], ["b", "b"]),
        ([(["a"], "b"), (["a"], "x"), (["a", "b", "c"], "d")], ["x", "d"]),
        ([(["a", "b", "c"], "d"), (["a"], "b")], ["d"]),
    ],
)
def test_only_the_end_of_each_conversation_is_returned(calls: list[tuple[list[str], str]], kept: list[str]) -> None:
    spans = [turn(number, said, answer) for number, (said, answer) in enumerate(calls, 1)]
    found = TraceToMessages()
    assert [each["messages"][-1]["content"] for each in found.adapt(spans)] == kept
    assert len(found.every_answer(spans)) == len(calls)
