"""The role of each model call of an attempt, worked out from the record alone.

A coding agent calls the model for more than its task: it asks for a title, sends a subagent, repeats a call whose
answer was cut off, sums up its history. Such a call is not trained on as if it had earned the reward. Every role but
"agent" needs positive evidence; a call for which the evidence is incomplete stays the agent's, and is counted as a
doubt. The rules, in order:

1. The program says it: the nearest span at or above the call with the attribute `leyden.role`.
2. A call that failed or was cut off is *discarded*. So is one that its client sent again: a later call, sent after it
   had ended, has the same messages, options and tools, and only the later answer comes back in a prompt.
3. *Compaction*: an answer without tool calls, to the messages of a conversation, that stands at the beginning of a
   later prompt with the same instructions and tools, which does not continue the conversation itself.
4. *Subagent*: a conversation whose first prompt holds a text of the arguments of a tool call, made before it, and whose
   last answer is in the result of that tool call. The conversation that made the tool call is its parent.
5. *Auxiliary*: a call without tools and with instructions of its own, in an attempt whose agent has tools; it continues
   no call, and no call continues it or has its answer; and its instructions ask for a title, a summary, a topic or a
   name, or match an expression that the record of the program names (`leyden.auxiliary`).

In an attempt without tools only the first two rules hold. A call is part of the conversation that it continues
(`merging.continued_call`); what follows a compaction is part of the conversation before it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, get_args

from leyden._lib.json import Json
from leyden.adapter.attributes import as_list, parsed
from leyden.adapter.calls import nearest
from leyden.adapter.chat_messages import message_text
from leyden.adapter.merging import ComparableCall, continued_call
from leyden.adapter.normalise import ModelCallView
from leyden.dialects.turns import arguments_value
from leyden.errors import ConfigError
from leyden.types import Span, semconv

CallRole = Literal["agent", "subagent", "compaction", "auxiliary", "discarded"]
ROLES: Final[tuple[CallRole, ...]] = get_args(CallRole)
TRAINED: Final[tuple[CallRole, ...]] = ("agent",)
"""The roles that are trained on by default."""

_ASKS: Final = re.compile(
    r"\b(titles?|headline|summar(y|ies|ise|ize|izing|ising)|topic|(short|concise|descriptive) name|branch name|name for)\b",
    re.IGNORECASE,
)
"""What the instructions of an auxiliary call ask for."""
_MIN_PASSED = 8
"""Characters of a tool call's argument that show that a prompt comes from it."""
_MIN_QUOTED = 12
"""Characters of an answer that are not in a text by chance."""
_MIN_SUMMARY = 40
"""Characters of an answer that show that a prompt has it from a compaction."""


@dataclass(frozen=True, slots=True)
class RoleOfCall:
    role: CallRole
    thread: CallRole = "agent"
    """The role of the conversation that a compaction sums up; of any other call its own."""
    parent: str | None = None
    """The span id of the call that a subagent works for, and of the last call before a compaction; None if there is
    none."""
    doubt: str | None = None
    """Why another role is possible; None if none is."""


def chosen_roles(roles: Collection[str]) -> frozenset[str]:
    """Return roles as a set. Raise ConfigError for an unknown one."""
    unknown = [roles] if isinstance(roles, str) else [each for each in roles if each not in ROLES]
    if unknown or not roles:
        raise ConfigError(f"roles is {roles!r:.200}; give a list of {', '.join(map(repr, ROLES))}")
    return frozenset(roles)


def with_roles(calls: Sequence[ModelCallView], spans: Sequence[Span], roles: frozenset[str]) -> list[ModelCallView]:
    """Return the calls of one attempt that have one of these roles; compactions only if their conversation has one too.

    calls: all calls of the attempt, in order (`calls.model_calls`).
    spans: all its spans.
    """
    found = call_roles(calls, spans)
    return [call for call, each in zip(calls, found, strict=True) if {each.role, each.thread} <= roles]


def call_roles(calls: Sequence[ModelCallView], spans: Sequence[Span]) -> list[RoleOfCall]:
    """Return the role of each call of one attempt, by the rules of the module.

    calls: all calls of the attempt, in order (`calls.model_calls`).
    spans: all its spans.
    """
    found = [RoleOfCall("discarded", "discarded") if call.failed else RoleOfCall("agent") for call in calls]
    if any(call.tools for call in calls):
        answered = [index for index, call in enumerate(calls) if not call.failed]
        threads = _Threads([calls[index] for index in answered])
        for index, role in zip(answered, threads.roles(spans), strict=True):
            found[index] = role
    said = {span.span_id: str(role) for span in spans if (role := span.attributes.get(semconv.ROLE)) in ROLES}
    if said:
        parents = {span.span_id: span.parent_id for span in spans}
        for index, call in enumerate(calls):
            above = next((each for span in call.spans if (each := nearest(span.span_id, parents, said))), None)
            if above is not None:
                role = cast(CallRole, said[above])
                found[index] = RoleOfCall(role, role)
    return found


def count_roles(roles: Sequence[RoleOfCall]) -> Counter[str]:
    """Return how many calls have each role; and how many are the agent's in doubt, as "doubtful"."""
    counts = Counter[str](each.role for each in roles)
    if doubts := sum(each.doubt is not None for each in roles):
        counts["doubtful"] = doubts
    return counts


@dataclass(slots=True)
class _Call:
    """A call with the texts by which it is found in others."""

    view: ModelCallView
    index: int
    compared: ComparableCall
    instructions: str
    """The text of its system messages."""
    asked: str
    """The text of its other messages that the model did not write."""
    answer: str
    tools: str
    continues: _Call | None = None
    thread: int = 0
    role: CallRole = "agent"
    parent: str | None = None
    doubt: str | None = None
    followers: list[_Call] = field(default_factory=list["_Call"])

    @property
    def opening(self) -> str:
        """The text with which the prompt begins: all messages before the model's first one."""
        texts: list[str] = []
        for message in self.view.input_messages:
            if message.get("role") in ("assistant", "tool"):
                break
            texts.append(message_text(message.get("content")))
        return "\n".join(texts)

    @property
    def start(self) -> float:
        return self.view.span.start_time or 0.0

    @property
    def end(self) -> float:
        return self.view.span.end_time or self.start


class _Threads:
    """The answered calls of an attempt whose agent has tools, as conversations."""

    def __init__(self, views: Sequence[ModelCallView]) -> None:
        self.calls: list[_Call] = []
        compared: list[ComparableCall] = []
        for index, view in enumerate(views):
            mine = ComparableCall(view, index)
            system = [message for message in view.input_messages if message.get("role") in ("system", "developer")]
            others = [
                message
                for message in view.input_messages
                if message.get("role") not in ("system", "developer", "assistant")
            ]
            call = _Call(
                view,
                index,
                mine,
                instructions=_texts(system),
                asked=_texts(others),
                answer=message_text((view.output_messages or [{}])[0].get("content")).strip(),
                tools=json.dumps(view.tools, sort_keys=True),
                thread=index,
            )
            earlier = continued_call(mine, compared)
            if earlier is not None:
                call.continues = self.calls[compared.index(earlier)]
                call.continues.followers.append(call)
                call.thread = call.continues.thread
            self.calls.append(call)
            compared.append(mine)

    def roles(self, spans: Sequence[Span]) -> list[RoleOfCall]:
        for rule in (self._find_discarded, self._find_compactions, self._find_subagents):
            rule()
        patterns = [
            pattern
            for span in spans
            for pattern in as_list(span.attributes.get(semconv.AUXILIARY))
            if isinstance(pattern, str)
        ]
        self._find_auxiliary(patterns)
        subagents = {call.thread for call in self.calls if call.role == "subagent"}
        return [
            RoleOfCall(
                call.role,
                call.role if call.role != "compaction" else "subagent" if call.thread in subagents else "agent",
                call.parent,
                call.doubt,
            )
            for call in self.calls
        ]

    def _find_discarded(self) -> None:
        for call in self.calls:
            if call.followers:
                continue
            again = next(
                (
                    each
                    for each in self.calls[call.index + 1 :]
                    if each.compared.prompt == call.compared.prompt
                    and each.tools == call.tools
                    and each.view.settings == call.view.settings
                    and each.start >= call.end
                    and each.followers
                ),
                None,
            )
            if again is not None and call.view.tools and not self._is_used(call):
                call.role = "discarded"

    def _is_used(self, call: _Call) -> bool:
        """Return whether a later prompt has the call's answer, in a message that the call itself had not. A short
        answer must be a whole line of it, because it may stand in a text by chance.
        """
        if not call.answer:
            return False
        for later in self.calls[call.index + 1 :]:
            if call.compared.answer in later.compared.answers_sent:
                return True
            for digest, message in zip(later.compared.prompt, later.view.input_messages, strict=True):
                if digest in call.compared.prompt or message.get("role") == "assistant":
                    continue
                text = message_text(message.get("content"))
                if call.answer in (text if len(call.answer) >= _MIN_QUOTED else map(str.strip, text.splitlines())):
                    return True
        return False

    def _find_compactions(self) -> None:
        for call in self.calls:
            body = _summary(call.answer)
            if len(body) < _MIN_SUMMARY or call.view.output_messages[0].get("tool_calls"):
                continue
            before = call.continues or next(
                (each for each in reversed(self.calls[: call.index]) if each.answer and each.answer in call.asked), None
            )
            if before is None:
                continue
            for later in self.calls[call.index + 1 :]:
                goes_on = later.instructions == before.instructions and later.tools == before.tools
                if goes_on and not later.compared.extends(call.compared) and body in later.opening:
                    call.role, call.parent = "compaction", before.view.span.span_id
                    old = later.thread
                    for each in self.calls:
                        if each.thread == old:
                            each.thread = before.thread
                    call.thread = before.thread
                    break

    def _find_subagents(self) -> None:
        by_thread: dict[int, list[_Call]] = {}
        for call in self.calls:
            if call.role == "agent":
                by_thread.setdefault(call.thread, []).append(call)
        for thread in by_thread.values():
            first, last = thread[0], thread[-1]
            if not last.answer or first.index == 0:
                continue
            answered_to = None
            for later in self.calls[last.index + 1 :]:
                if later.thread == first.thread:
                    continue
                for function, result in _tool_results(later.view.input_messages):
                    if last.answer != result.strip() and not (
                        len(last.answer) >= _MIN_PASSED and last.answer in result
                    ):
                        continue
                    caller = _caller(self.calls[: first.index], function, not_in=first.thread)
                    if caller is None:
                        continue
                    texts = _strings(parsed(function.get("arguments")))
                    if any(len(text) >= _MIN_PASSED and text in first.asked for text in texts):
                        answered_to = caller
                        break
                    first.doubt = (
                        "its conversation's answer is in a tool's result, and its prompt is not from the tool call"
                    )
                if answered_to is not None:
                    break
            if answered_to is not None:
                for call in thread:
                    call.role, call.parent, call.doubt = "subagent", answered_to.view.span.span_id, None

    def _find_auxiliary(self, patterns: Sequence[str]) -> None:
        own = {call.instructions for call in self.calls if call.view.tools}
        for call in self.calls:
            alone = call.continues is None and not call.followers and not self._is_used(call)
            if call.role != "agent" or call.view.tools or not alone or call.instructions in own:
                continue
            asks = call.instructions or call.asked
            if _ASKS.search(asks) or any(re.search(pattern, asks) for pattern in patterns):
                call.role = "auxiliary"
            else:
                call.doubt = "it has no tools, and no later prompt has its answer"


def _texts(messages: Sequence[Json]) -> str:
    return "\n".join(message_text(message.get("content")) for message in messages)


def _summary(answer: str) -> str:
    """Return what a new context takes from an answer that sums up: the text between <summary> tags if it has them."""
    tagged = re.search(r"<summary>(.*?)</summary>", answer, re.DOTALL)
    return (tagged[1] if tagged else answer).strip()


def _tool_results(messages: Sequence[Json]) -> list[tuple[Json, str]]:
    """Return the tool calls of a prompt that were answered, each as its function with the text of the result."""
    asked: dict[str, Json] = {}
    results: list[tuple[Json, str]] = []
    for message in messages:
        for call in cast("list[Json]", as_list(message.get("tool_calls"))):
            asked[str(call.get("id"))] = cast("Json", call.get("function") or {})
        if message.get("role") == "tool" and (made := asked.get(str(message.get("tool_call_id")))) is not None:
            results.append((made, message_text(message.get("content"))))
    return results


def _caller(before: Sequence[_Call], function: Json, *, not_in: int) -> _Call | None:
    """Return the latest earlier call of another conversation whose answer makes this tool call."""
    wanted = function.get("name"), arguments_value(function.get("arguments"))
    for call in reversed(before):
        for made in cast("list[Json]", as_list((call.view.output_messages or [{}])[0].get("tool_calls"))):
            its = cast("Json", made.get("function") or {})
            if call.thread != not_in and (its.get("name"), arguments_value(its.get("arguments"))) == wanted:
                return call
    return None


def _strings(value: Any) -> list[str]:
    """Return all texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(cast("Json", value).values())
    return [text for item in as_list(value) for text in _strings(item)]
