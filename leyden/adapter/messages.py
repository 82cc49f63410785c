"""Convert model calls to conversations in the format of OpenAI's fine-tuning: `{"messages": [...], "tools": [...]}`.

Tool calls are read from the answer itself. If the answer has none, they are read from spans below the call, which
AgentOps writes for them. The module knows messages and no tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from leyden._lib.json import Json
from leyden.adapter.attributes import as_dict, as_list, parsed
from leyden.adapter.calls import nearest
from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView, read_tool_call
from leyden.adapter.order import in_order
from leyden.adapter.roles import chosen_roles
from leyden.adapter.selection import select_calls
from leyden.adapter.trace_adapter import TraceAdapter, log_result
from leyden.adapter.tree import TraceTree
from leyden.dialects.turns import arguments_value
from leyden.types import Span, semconv


class OpenAIMessages(TypedDict):
    """A conversation up to one answer of the model, which is its last message."""

    messages: list[Json]
    """Chat messages; the last is the assistant's."""
    tools: list[Json] | None
    """The tools that the model was offered; None if there were none."""


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation of one attempt up to one answer, and where its messages come from."""

    messages: list[Json]
    """The messages as the last call's prompt had them, and its answer, with the keys of OpenAI's fine-tuning and the
    reasoning."""
    tools: list[Json] | None
    calls: tuple[ModelCallView, ...]
    """The calls whose answers are in it, in order. The last one gave the last message."""
    prompt_length: int
    """How many messages stand before the first of these answers."""
    inexact: str | None
    """Why the messages are not exactly what the model read and wrote; None if they are."""


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
        return [
            OpenAIMessages(
                messages=[_fine_tuning(message) for message in [*call.input_messages, answer]],
                tools=call.tools or None,
            )
            for call, _, answer in self._answered(source)
        ]

    def conversations(self, source: Sequence[Span], *, every_answer: bool = False) -> list[RecordedConversation]:
        """Return what `adapt` returns, or `every_answer`, with the calls that each conversation comes from.

        Calls below a reward, such as a judge's, are left out. Reasoning is kept, so a conversation whose prompt lacks
        the reasoning of an earlier answer is a separate one.
        """
        answered = self._answered(source, judges=False)
        read = [
            [_fine_tuning(each, reasoning=True) for each in (*call.input_messages, said)] for call, _, said in answered
        ]
        prefixes = [
            _prefixes(OpenAIMessages(messages=messages, tools=call.tools or None))
            for messages, (call, _, _) in zip(read, answered, strict=True)
        ]
        beginnings = {each for own in prefixes for each in own[:-1]}
        index_of: dict[bytes, int] = {}
        found: list[RecordedConversation] = []
        for index, (messages, own, (call, _, said)) in enumerate(zip(read, prefixes, answered, strict=True)):
            chain = [*(index_of[each] for each in own[:-1] if each in index_of), index]
            index_of[own[-1]] = index
            if not every_answer and own[-1] in beginnings:
                continue
            cut = (_cut(answered[each][0], answered[each][1]) for each in chain)
            lost = (_lost(message) for message in (*call.input_messages, said))
            inexact = next(filter(None, (*_no_messages(call), *cut, *lost)), None)
            calls = tuple(answered[each][0] for each in chain)
            found.append(RecordedConversation(messages, call.tools or None, calls, len(read[chain[0]]) - 1, inexact))
        return found

    def _answered(self, source: Sequence[Span], *, judges: bool = True) -> list[tuple[ModelCallView, int, Json]]:
        """Return each answer of one attempt: its call, its number among the call's choices, and its message.

        judges: include calls below a reward.
        """
        if not source:
            return []
        selected = select_calls(
            source,
            TraceTree.from_spans(source),
            agent_match=self.agent_match,
            exclude_llm_call_in_reward=not judges,
            repair_hierarchy=True,
            roles=self.roles,
        )
        tools = _tool_calls_below(source, [call.view for call in selected])
        return [
            (call.view, number, answer)
            for call in selected
            if not call.view.replayed
            for number, answer in enumerate(_answers(call.view, tools.get(call.view.span.span_id, [])))
        ]


def _without_beginnings(conversations: Sequence[OpenAIMessages]) -> list[OpenAIMessages]:
    """Return the conversations that are not the beginning of another one with the same tools."""
    keys = [_prefixes(each) for each in conversations]
    beginnings = {each for own in keys for each in own[:-1]}
    return [each for each, own in zip(conversations, keys, strict=True) if own[-1] not in beginnings]


def _prefixes(conversation: OpenAIMessages) -> list[bytes]:
    """Return the digests of a conversation's beginnings, from none of its messages to all."""
    digest = hashlib.sha256(json.dumps(conversation["tools"], sort_keys=True).encode())
    found = [digest.digest()]
    for message in conversation["messages"]:
        digest.update(json.dumps(_comparable(message), sort_keys=True).encode() + b"\n")
        found.append(digest.digest())
    return found


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


def _no_messages(call: ModelCallView) -> list[str]:
    """Return why a call has no messages that a chat model read, as a list of at most one reason."""
    if not call.input_messages:
        return ["its prompt was not recorded"]
    if any(span.attributes.get(semconv.GEN_AI_OPERATION) in _OF_TEXT for span in call.spans):
        return ["it is a call of the completions API, which has no messages"]
    return []


_OF_TEXT = ("text_completion", "completion")


def _cut(call: ModelCallView, number: int) -> str | None:
    """Return why an answer ended before the model ended it; None if it did not, or its end was not recorded."""
    recorded = (span.attributes.get(semconv.GEN_AI_FINISH_REASONS) for span in call.spans)
    reasons = as_list(next((parsed(each) for each in recorded if each is not None), None))
    reason = str(reasons[number]).lower() if number < len(reasons) else ""
    return f"an answer was cut off ({reason})" if reason in ("length", "max_tokens", "content_filter") else None


def _lost(message: Json) -> str | None:
    """Return what of a message has no place in the format; None if all of it has."""
    for part in map(as_dict, as_list(message.get("content"))):
        if not isinstance(part.get("text"), str) and not ("image_url" in part and part.get("type") == "image_url"):
            return f"a message has a part of type {str(part.get('type'))!r:.50}, which is neither text nor image"
    return next((f"a message has {name!r}" for name in ("audio", "function_call") if message.get(name)), None)


_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "weight")
"""The keys of a message in OpenAI's fine-tuning format."""


def _fine_tuning(message: Json, *, reasoning: bool = False) -> Json:
    """Return a message with only the keys of OpenAI's fine-tuning format. Content parts stay if one is an image, and
    are joined to text otherwise. Empty content is None beside tool calls.

    reasoning: keep the reasoning too, as `reasoning_content`.
    """
    kept: dict[str, Any] = {name: message[name] for name in _KEYS if message.get(name) is not None}
    if not any(isinstance(part, dict) and "image_url" in part for part in as_list(kept.get("content"))):
        kept["content"] = message_text(kept.get("content")) or (None if "tool_calls" in kept else "")
    if reasoning and (thoughts := message.get("reasoning_content") or message.get("reasoning")):
        kept["reasoning_content"] = thoughts
    return kept
