"""The role of each model call of an attempt, worked out from the record alone.

A coding agent calls the model for more than its task: it asks for a title, sends a subagent, repeats a call whose
answer was cut off, sums up its history. Such a call is not trained on as if it had earned the reward. Every role but
"agent" needs positive evidence; a call for which the evidence is incomplete stays the agent's, and is counted as a
doubt. The rules, in order:

1. The program says it: the nearest span at or above the call with the attribute `leyden.role`.
2. A call that failed or was cut off is *discarded*. So is one that its client sent again: a later call, sent after it
   had ended, has the same messages, options and tools, and only the later answer comes back in a prompt.
3. *Compaction*: an answer without tool calls, to the messages of a conversation or to a text of them, that was asked
   to sum up, and stands at the beginning of a later prompt with the same instructions or tools, which does not continue
   the conversation itself. With instructions of its own it may be the first of the model's messages there. A prompt
   may also keep the first messages of the conversation, and have the answer in place of the next ones.
4. *Subagent*: a conversation whose first prompt holds a text of the arguments of a tool call, made before it, and whose
   last answer is in the result of that tool call; or, for a task in the background, in a later result of the same
   conversation, or in a user's message that it had not before. Of one that broke off, because its last call failed, the
   tool call has any result. The conversation that made the tool call is its parent.
   A conversation with its instructions that had the text anyway is another try of the same task.
5. *Auxiliary*: a call without tools and with instructions of its own, in an attempt whose agent has tools; it continues
   no call, and no call continues it or has its answer; and its instructions ask for a title, a summary or a name of
   the conversation, or whether its topic is new, or match an expression that the record of the program names
   (`leyden.auxiliary`). A call for a short title may have the conversation as its messages, and so may one for a
   summary, if the conversation goes on without it.

In an attempt without tools a call has another role only if the program says it, or if it failed. A call is part of the
conversation that it continues (`merging.continued_call`); what follows a compaction is part of the conversation before
it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Final, Literal, cast, get_args

from leyden._lib.json import Json
from leyden.adapter.attributes import as_dict, as_list, parsed
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

_WHAT = (
    r"\b(conversation|session|chat|thread|coding task|development task)s?\b"
    r"(?![ _-]*(apps?|bots?|clients?|servers?|rooms?|pools?|variables?|tokens?|ids?|safety|handling)\b)"
)
_TITLE: Final = re.compile(
    r"\btitle generator\b|\bnew (conversation )?topic\b|\bbranch name\b"
    rf"|\b(titles?|headline|(short|concise|descriptive|session) name|name for)\b.{{0,80}}{_WHAT}"
    rf"|{_WHAT}.{{0,80}}\b(titles?|headline|(short|concise|descriptive|session) name)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Words that ask for the title of a conversation. The title of an article, or the topic of a question, may be the
agent's task."""
_ASKS: Final = re.compile(rf"\bsummar(y|ies|i[sz](e|es|ing|ation))\b.{{0,40}}{_WHAT}", re.IGNORECASE | re.DOTALL)
"""Words that ask for the summary of a conversation."""
_SUMS_UP: Final = re.compile(r"summar|compact|compress|condens|hand-?off|checkpoint|snapshot|recap", re.IGNORECASE)
"""Words that ask the model to sum up the messages before them."""
_SUMS_UP_TEXT: Final = re.compile(
    rf"(summar|compact|compress|condens).{{0,60}}{_WHAT}|{_WHAT}.{{0,60}}(summar|compact|compress|condens)",
    re.IGNORECASE | re.DOTALL,
)
"""Words that ask to sum up a conversation that is given as a text. A summary of findings may be the agent's task."""
_LONGEST_TITLE = 200
"""Characters of an answer that may be a title."""
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


def chosen_roles(roles: Collection[str] | None, agent_match: str | None = None) -> frozenset[str]:
    """Return roles as a set. Raise ConfigError for an unknown one.

    roles: None for the agent's, and if `agent_match` names the agents, for those that work for another one too.
    """
    if roles is None:
        return frozenset(TRAINED if agent_match is None else (*TRAINED, "subagent"))
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
        threads = _Threads([calls[index] for index in answered], [call for call in calls if call.failed])
        for index, role in zip(answered, threads.roles(spans), strict=True):
            found[index] = role
    said = {span.span_id: str(role) for span in spans if (role := span.attributes.get(semconv.ROLE)) is not None}
    if said:
        parents = {span.span_id: span.parent_id for span in spans}
        for index, call in enumerate(calls):
            above = next((each for span in call.spans if (each := nearest(span.span_id, parents, said))), None)
            if above is None:
                continue
            if said[above] in ROLES:
                role = cast(CallRole, said[above])
                found[index] = RoleOfCall(role, role)
            else:
                found[index] = replace(
                    found[index], doubt=f"its record says {semconv.ROLE}={said[above]!r:.50}, which is none"
                )
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
    made: list[_ToolCall] = field(default_factory=list["_ToolCall"])
    """The tool calls of its answer."""
    opening: str = ""
    """The text with which the prompt begins: all messages before the model's first one."""
    prompted: str = ""
    """The text of the messages that neither the model nor a tool wrote."""
    _results: list[tuple[str, str]] | None = None

    @property
    def results(self) -> list[tuple[str, str]]:
        """The tool calls of its prompt that were answered, each as its key with the text of the result; and what a user
        said, with the key ""."""
        if self._results is None:
            self._results = _tool_results(self.view.input_messages)
        return self._results

    @property
    def start(self) -> float:
        return self.view.span.start_time or 0.0

    @property
    def end(self) -> float:
        return self.view.span.end_time or self.start


@dataclass(frozen=True, slots=True)
class _ToolCall:
    key: str
    """Its function's name and arguments."""
    texts: list[str]
    """The texts in its arguments."""


class _Threads:
    """The answered calls of an attempt whose agent has tools, as conversations."""

    def __init__(self, views: Sequence[ModelCallView], failed: Sequence[ModelCallView] = ()) -> None:
        """failed: the calls of the attempt that were not answered, which show where a conversation broke off."""
        self.calls: list[_Call] = []
        self._failed = [ComparableCall(view, index) for index, view in enumerate(failed)]
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
                opening=_opening(view.input_messages),
                prompted=_texts([message for message in view.input_messages if message.get("role") not in _WRITTEN]),
                made=[_tool_call(each) for each in as_list((view.output_messages or [{}])[0].get("tool_calls"))],
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
            for text in as_list(span.attributes.get(semconv.AUXILIARY))
            if isinstance(text, str) and (pattern := _compiled(text)) is not None
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
        own = {call.instructions for call in self.calls if call.view.tools}
        for call in self.calls:
            if not call.answer or call.made or not _is_asked_to_sum_up(call, own):
                continue
            earlier = [call.continues] if call.continues is not None else reversed(self.calls[: call.index])
            candidates = [
                each
                for each in earlier
                if each is call.continues or _is_quoted(each, call.asked) or _has_beginning(call, each)
            ]
            with_it = [
                (later, _begins_with_summary(later, call, own), _place_of_summary(later, call, own))
                for later in (self.calls[call.index + 1 :] if candidates else ())
                if not later.compared.extends(call.compared)
            ]
            with_it = [each for each in with_it if each[1] or each[2] is not None]
            used = [
                (before, later)
                for before in candidates
                for later, is_first, place in with_it
                if (later.instructions == before.instructions or later.tools == before.tools != _NO_TOOLS)
                and (is_first or _replaces(place, later, self._last_before(call, before)))
            ]
            if not used:
                continue
            # the text may also quote subagents, which have instructions of their own
            before, later = next((pair for pair in used if pair[0].instructions == pair[1].instructions), used[0])
            call.role, call.parent = "compaction", self._last_before(call, before).view.span.span_id
            old = later.thread
            for each in self.calls:
                if each.thread == old:
                    each.thread = before.thread
            call.thread = before.thread

    def _last_before(self, call: _Call, member: _Call) -> _Call:
        """Return the last call of a conversation before another call."""
        return next(each for each in reversed(self.calls[: call.index]) if each.thread == member.thread)

    def _find_subagents(self) -> None:
        by_thread: dict[int, list[_Call]] = {}
        for call in self.calls:
            if call.role == "agent":
                by_thread.setdefault(call.thread, []).append(call)
        for thread in by_thread.values():
            first, last = thread[0], thread[-1]
            handed: dict[str, _Call] = {}
            for call in self.calls[: first.index]:
                if call.thread != first.thread:
                    handed |= {made.key: call for made in call.made if _is_handed(made, call, first)}
            answers = [last.answer] if last.answer else [text for made in last.made for text in made.texts]
            if not handed or not any(answers):
                continue
            caller = self._answered_to(last, answers, handed)
            if caller is None and any(each.extends(last.compared) for each in self._failed):
                results = (key for later in self.calls[last.index + 1 :] for key, _ in later.results)
                caller = next((handed[key] for key in results if key in handed), None)
            if caller is None:
                first.doubt = "its prompt is from a tool call, and no result of the tool has its conversation's answer"
                continue
            for call in thread:
                call.role, call.parent, call.doubt = "subagent", caller.view.span.span_id, None

    def _answered_to(self, last: _Call, answers: Sequence[str], handed: Mapping[str, _Call]) -> _Call | None:
        """Return the call that has the answer of a conversation in the result of its tool call, or of a later one.

        last: the conversation's last call.
        handed: the calls that handed a prompt to the conversation, by the keys of their tool calls.
        """
        threads = {caller.thread: caller for caller in handed.values()}
        forms = {answer: _quoted_forms(answer) for answer in answers}
        seen: set[tuple[int, str, str]] = set()
        for later in self.calls[last.index + 1 :]:
            if later.thread == last.thread or not later.results:
                continue
            for key, result in later.results:
                if (later.thread, key, result) in seen or (key not in handed and later.thread not in threads):
                    continue
                seen.add((later.thread, key, result))
                if not key and result in threads[later.thread].prompted:
                    continue
                for answer, quoted in forms.items():
                    needed = _MIN_PASSED if key in handed else _MIN_QUOTED
                    is_in = len(answer) >= needed and any(form in result for form in quoted)
                    if is_in or (key in handed and answer and answer == result.strip()):
                        return handed.get(key) or threads[later.thread]
        return None

    def _goes_on(self, call: _Call) -> bool:
        """Return whether a call's conversation goes on after it."""
        return any(each.thread == call.thread and each.view.tools for each in self.calls[call.index + 1 :])

    def _find_auxiliary(self, patterns: Sequence[re.Pattern[str]]) -> None:
        own = {call.instructions or call.opening for call in self.calls if call.view.tools}
        for call in self.calls:
            asks = call.instructions or call.opening
            if call.role != "agent" or call.view.tools or call.followers or self._is_used(call) or asks in own:
                continue
            if call.continues is not None and call.continues.instructions == call.instructions:
                continue
            is_title = len(call.answer) <= _LONGEST_TITLE and _TITLE.search(asks)
            if (
                is_title
                or any(pattern.search(asks) for pattern in patterns)
                or (_ASKS.search(asks) and (call.continues is None or self._goes_on(call)))
            ):
                call.role, call.doubt = "auxiliary", None
            else:
                call.doubt = "it has no tools, and no later prompt has its answer"


_WRITTEN = ("system", "developer", "assistant", "tool")
_NO_TOOLS = "[]"


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Return an expression of the record; None if it is none, because a program may write any text there."""
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _texts(messages: Sequence[Json]) -> str:
    return "\n".join(message_text(message.get("content")) for message in messages)


def _summary(answer: str) -> str:
    """Return what a new context takes from an answer that sums up: the text between <summary> tags if it has them."""
    tagged = re.search(r"<summary>(.*?)</summary>", answer, re.DOTALL)
    return (tagged[1] if tagged else answer).strip()


def _opening(messages: Sequence[Json]) -> str:
    roles = [message.get("role") for message in messages]
    return _texts(messages[: next((n for n, role in enumerate(roles) if role in ("assistant", "tool")), len(roles))])


def _quoted_forms(answer: str) -> list[str]:
    """Return an answer as it is, and as a text of JSON and of XML."""
    texts = (json.dumps(answer)[1:-1], json.dumps(answer, ensure_ascii=False)[1:-1])
    return list(dict.fromkeys((answer, *texts, escape(answer, quote=False), escape(answer))))


def _is_asked_to_sum_up(call: _Call, own: Collection[str]) -> bool:
    """own: the instructions of the agents, which may name summaries among other things."""
    asked = message_text((call.view.input_messages or [{}])[-1].get("content"))
    if call.instructions not in own:
        asked = f"{call.instructions}\n{asked}"
    if call.continues is None and not call.view.tools:
        return _SUMS_UP_TEXT.search(asked) is not None
    return "<summary>" in call.answer or _SUMS_UP.search(asked) is not None


def _is_quoted(earlier: _Call, text: str) -> bool:
    """Return whether a text has what the model answered: its words, or all arguments of a tool call."""
    said = _summary(earlier.answer)
    if len(said) >= _MIN_QUOTED and said in text:
        return True
    return any(
        sum(map(len, made.texts)) >= _MIN_QUOTED
        and all(any(form in text for form in _quoted_forms(each)) for each in made.texts)
        for made in earlier.made
    )


def _has_beginning(call: _Call, earlier: _Call) -> bool:
    """Return whether a call's messages, but for the instructions and what is asked last, are the first ones of an
    earlier prompt.
    """
    mine, others = (
        [
            digest
            for digest, message in zip(each.compared.prompt, each.view.input_messages, strict=True)
            if message.get("role") not in ("system", "developer")
        ]
        for each in (call, earlier)
    )
    return 1 < len(mine) <= len(others) + 1 and mine[:-1] == others[: len(mine) - 1]


def _begins_with_summary(later: _Call, summed_up: _Call, own: Collection[str]) -> bool:
    """Return whether a prompt begins with an answer that sums up. Whose instructions are those of an agent may have the
    answer there because the messages before it were dropped, unless no message follows it.
    """
    body = _summary(summed_up.answer)
    if len(body) >= _MIN_SUMMARY and body in later.opening:
        return True
    messages = later.view.input_messages
    first = next((each for each in messages if each.get("role") in ("assistant", "tool")), cast("Json", {}))
    is_first = not first.get("tool_calls") and message_text(first.get("content")).strip() == summed_up.answer
    return is_first and (summed_up.instructions not in own or first is messages[-1])


def _place_of_summary(later: _Call, summed_up: _Call, own: Collection[str]) -> int | None:
    """Return which message of a prompt has an answer that sums up; None if none has it. An agent that was asked to sum
    up may have its own answer in a prompt because the messages before it were dropped.
    """
    body = _summary(summed_up.answer)
    roles = ("user",) if summed_up.instructions in own else ("user", "assistant")
    messages = later.view.input_messages if len(body) >= _MIN_SUMMARY else []
    places = (n for n, m in enumerate(messages) if m.get("role") in roles and body in message_text(m.get("content")))
    return next(places, None)


def _replaces(place: int | None, later: _Call, before: _Call) -> bool:
    """Return whether a prompt is the same as an earlier one up to a message that stands where others were dropped."""
    old, new = before.compared.prompt, later.compared.prompt
    return place is not None and place < len(old) and old[:place] == new[:place] and old[place] not in new


def _is_handed(made: _ToolCall, caller: _Call, first: _Call) -> bool:
    """Return whether a conversation's first prompt has a text of a tool call's arguments. A text that the caller was
    asked itself shows nothing about a conversation with the caller's instructions.
    """
    alike = first.instructions == caller.instructions
    prompt = first.prompted if alike else f"{first.instructions}\n{first.prompted}"
    return any(
        len(text) >= _MIN_PASSED and text in prompt and not (alike and text in caller.prompted) for text in made.texts
    )


def _tool_call(call: Any) -> _ToolCall:
    function = as_dict(as_dict(call).get("function"))
    arguments = arguments_value(function.get("arguments"))
    return _ToolCall(json.dumps([function.get("name"), arguments], sort_keys=True), _strings(parsed(arguments)))


def _tool_results(messages: Sequence[Json]) -> list[tuple[str, str]]:
    asked: dict[str, Any] = {}
    results: list[tuple[str, str]] = []
    for message in messages:
        for call in as_list(message.get("tool_calls")):
            asked[str(as_dict(call).get("id"))] = call
        if message.get("role") == "tool" and (made := asked.get(str(message.get("tool_call_id")))) is not None:
            results.append((_tool_call(made).key, message_text(message.get("content"))))
        elif message.get("role") == "user":
            results.append(("", message_text(message.get("content"))))
    return results


def _strings(value: Any) -> list[str]:
    """Return all texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(cast("Json", value).values())
    return [text for item in as_list(value) for text in _strings(item)]
