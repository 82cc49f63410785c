"""Convert model calls to conversations in the format of OpenAI's fine-tuning: `{"messages": [...], "tools": [...]}`.

Tool calls are read from the answer itself. If the answer has none, they are read from spans below the call, which
AgentOps writes for them. The module knows messages and no tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, TypedDict, cast

from leyden._lib.json import Json
from leyden.adapter.attributes import as_list
from leyden.adapter.calls import nearest
from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView, read_tool_call
from leyden.adapter.order import in_order
from leyden.adapter.roles import chosen_roles
from leyden.adapter.selection import select_calls
from leyden.adapter.trace_adapter import TraceAdapter, log_result
from leyden.adapter.tree import TraceTree
from leyden.dialects.turns import arguments_value
from leyden.types import Span


class OpenAIMessages(TypedDict):
    """A conversation up to one answer of the model, which is its last message."""

    messages: list[Json]
    """Chat messages; the last is the assistant's."""
    tools: list[Json] | None
    """The tools that the model was offered; None if there were none."""


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """Converts the spans of an attempt to conversations for OpenAI's fine-tuning, in order: each as far as it went.

    A call whose conversation a later call continues is left out, because the later one has its messages and answer too.
    A call whose messages or answer were not recorded is left out, and so is a replayed call.
    """

    def __init__(self, agent_match: str | None = None, *, roles: Collection[str] | None = None) -> None:
        """
        agent_match: a regular expression. Only calls of agents whose name contains a match are
            converted. None: all calls.
        roles: the roles of the calls that are converted (`leyden.adapter.roles`); None: "agent", and with
            `agent_match` "subagent" too.
        """
        self.agent_match, self.roles = agent_match, chosen_roles(roles, agent_match)

    def adapt(self, source: Sequence[Span]) -> list[OpenAIMessages]:
        found = self.every_answer(source)
        conversations = _without_beginnings(found)
        log_result(self, source, "conversations", conversations)
        return conversations

    def every_answer(self, source: Sequence[Span]) -> list[OpenAIMessages]:
        """Return a conversation for each answer of one attempt, also where a later one goes on."""
        if not source:
            return []
        selected = select_calls(
            source,
            TraceTree.from_spans(source),
            agent_match=self.agent_match,
            repair_hierarchy=True,
            roles=self.roles,
        )
        tools = _tool_calls_below(source, [call.view for call in selected])
        return [
            OpenAIMessages(
                messages=[_fine_tuning(message) for message in [*call.view.input_messages, answer]],
                tools=call.view.tools or None,
            )
            for call in selected
            if not call.view.replayed
            for answer in _answers(call.view, tools.get(call.view.span.span_id, []))
        ]


def _without_beginnings(conversations: Sequence[OpenAIMessages]) -> list[OpenAIMessages]:
    """Return the conversations that are not the beginning of another one with the same tools."""
    keys: list[bytes] = []
    beginnings: set[bytes] = set()
    for each in conversations:
        digest = hashlib.sha256(json.dumps(each["tools"], sort_keys=True).encode())
        for message in each["messages"]:
            beginnings.add(digest.digest())
            digest.update(json.dumps(_comparable(message), sort_keys=True).encode() + b"\n")
        keys.append(digest.digest())
    return [each for each, key in zip(conversations, keys, strict=True) if key not in beginnings]


def _comparable(message: Json) -> Json:
    """Return a message as it is compared: a client may write a call's arguments in another way, leave out empty
    content, and add the author's name.
    """
    calls: list[Json] = []
    for call in cast("list[Json]", as_list(message.get("tool_calls"))):
        function = cast("Json", call.get("function") or {})
        calls.append({**call, "function": {**function, "arguments": arguments_value(function.get("arguments"))}})
    return {**message, "name": None, "content": message.get("content") or "", "tool_calls": calls}


def _answers(call: ModelCallView, tools: Sequence[Json]) -> list[Json]:
    """Return the choices of a call's answer. If no choice has tool calls, add `tools` that spans below it recorded."""
    answers = call.output_messages
    if tools and len(answers) <= 1 and not any(answer.get("tool_calls") for answer in answers):
        answer = answers[0] if answers else {"role": "assistant", "content": None}
        return [{**answer, "tool_calls": list(tools)}]
    return answers


def _tool_calls_below(spans: Sequence[Span], calls: Sequence[ModelCallView]) -> dict[str, list[Json]]:
    """Return the tool calls that spans below a model call recorded, by the call's span id."""
    parents = {span.span_id: span.parent_id for span in spans}
    calls_of = {span.span_id: call.span.span_id for call in calls for span in call.spans}
    found: dict[str, list[Json]] = {}
    for span in in_order(spans):
        tool = read_tool_call(span)
        if tool is not None and tool.call_id is not None:
            above = nearest(span.span_id, parents, calls_of)
            if above is not None:
                given = tool.arguments
                text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
                call = {"id": tool.call_id, "type": "function", "function": {"name": tool.name, "arguments": text}}
                found.setdefault(calls_of[above], []).append(call)
    return found


_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "weight")
"""The keys of a message in OpenAI's fine-tuning format."""


def _fine_tuning(message: Json) -> Json:
    """Return a message with only the keys of OpenAI's fine-tuning format. Content parts stay if one is an image, and
    are joined to text otherwise. Empty content is None beside tool calls.
    """
    kept: dict[str, Any] = {name: message[name] for name in _KEYS if message.get(name) is not None}
    if not any(isinstance(part, dict) and "image_url" in part for part in as_list(kept.get("content"))):
        kept["content"] = message_text(kept.get("content")) or (None if "tool_calls" in kept else "")
    return kept
