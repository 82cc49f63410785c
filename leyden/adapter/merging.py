"""Count how many turns of an attempt's conversations merge to one trajectory, and find why the others do not.

A call continues an earlier one if its messages do. The two *merge* if the ids of its prompt begin with the ids of the
earlier prompt and response. Otherwise the later prompt is a separate sequence: it is trained on correctly, but its
context is computed again, and no prefix cache holds it.

The module knows messages and ids, and no tokenizer: a difference that the messages do not explain is attributed to
tokenisation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from leyden._lib.json import Json
from leyden.adapter.attributes import as_dict, as_list
from leyden.adapter.calls import model_calls
from leyden.adapter.chat_messages import comparable, message_text
from leyden.adapter.normalise import ModelCallView
from leyden.types import Span, TokenRecord, semconv
from leyden.types.tokens import common_prefix

FEW_MERGED = 0.95
"""A smaller share of merged turns is worth a warning that names one turn that is not merged."""

SplitReason = Literal["re-tokenised", "history rewritten", "reasoning dropped", "other tools"]


@dataclass(frozen=True, slots=True)
class SplitTurn:
    """A call that continues an earlier one by its messages, and not by its ids."""

    call: int
    """The `leyden.call_index` of the later call, or its index if the record has none."""
    earlier: int
    """The number of the earlier call, of the same kind."""
    reason: SplitReason
    detail: str
    """The difference between both calls, in one line."""
    user_agent: str | None = None
    """The program that made the later call, by its own name; None if the record has none."""

    def __str__(self) -> str:
        program = f" of {self.user_agent}" if self.user_agent else ""
        return f"call {self.call}{program} continues call {self.earlier}: {self.reason}: {self.detail}"


@dataclass(slots=True)
class TurnMerges:
    """The turns of one attempt that continue an earlier one: how many there are, and how many merge."""

    continued: int = 0
    """Calls that continue an earlier one by their messages; both have proven tokens."""
    merged: int = 0
    """Continued calls whose ids continue the earlier call, too."""
    splits: list[SplitTurn] = field(default_factory=list[SplitTurn])
    """Continued calls whose ids do not continue the earlier call, in order."""

    @property
    def share(self) -> float | None:
        """The share of continued turns that merge; None if no call continues another."""
        return self.merged / self.continued if self.continued else None


def turn_merges(spans: Sequence[Span]) -> TurnMerges:
    """Count the calls of one attempt that continue an earlier call, and those that do so token by token.

    Failed calls and calls without tokens are left out. A replayed call is never the later one of a pair, because the
    attempt that it repeats counts that pair.
    """
    views = [view for view in model_calls(spans) if view.tokens is not None and not view.failed]
    calls = [ComparableCall(view, index) for index, view in enumerate(views)]
    found = TurnMerges()
    for index, call in enumerate(calls):
        if call.view.replayed or (earlier := continued_call(call, calls[:index])) is None:
            continue
        found.continued += 1
        if (n_common := common_prefix(call.tokens.prompt_ids, earlier.ids)) == len(earlier.ids):
            found.merged += 1
        else:
            reason, detail = _split_reason(call, earlier, n_common)
            program = call.view.span.attributes.get(semconv.USER_AGENT)
            program = program if isinstance(program, str) else None
            found.splits.append(SplitTurn(call.number, earlier.number, reason, detail, program))
    return found


class ComparableCall:
    """A call whose messages are compared with those of others, by meaning."""

    def __init__(self, view: ModelCallView, index: int) -> None:
        self.view = view
        recorded = view.span.attributes.get(semconv.CALL_INDEX)
        self.number = recorded if isinstance(recorded, int) else index
        self.prompt = [_digest(message) for message in view.input_messages]
        """A digest of each message of the request."""
        self.answer = _digest(view.output_messages[0]) if view.output_messages else None
        """A digest of the answer's first choice."""

    @property
    def tokens(self) -> TokenRecord:
        assert self.view.tokens is not None, "calls without tokens are left out"
        return self.view.tokens

    @cached_property
    def ids(self) -> list[int]:
        return [*self.tokens.prompt_ids, *self.tokens.response_ids]

    @cached_property
    def answers_sent(self) -> frozenset[str]:
        pairs = zip(self.prompt, self.view.input_messages, strict=True)
        return frozenset(digest for digest, message in pairs if message.get("role") == "assistant")

    def extends(self, earlier: ComparableCall) -> bool:
        n = len(earlier.prompt)
        if len(self.prompt) <= n or self.view.input_messages[n].get("role") != "assistant":
            return False
        return self.prompt[:n] == earlier.prompt


def _digest(message: Json) -> str:
    return json.dumps(comparable(message), sort_keys=True)


def continued_call(call: ComparableCall, before: Sequence[ComparableCall]) -> ComparableCall | None:
    """Return the earlier call that `call` continues, or None. It is the latest one whose messages and answer the
    request contains, else the latest one whose messages it contains, else the latest one whose answer it contains.
    """
    if not call.answers_sent:
        return None
    extended = quoted = None
    for earlier in reversed(before):
        if call.extends(earlier):
            if call.prompt[len(earlier.prompt)] == earlier.answer:
                return earlier
            extended = extended or earlier
        elif earlier.answer in call.answers_sent:
            quoted = quoted or earlier
    return extended or quoted


def _split_reason(call: ComparableCall, earlier: ComparableCall, n_common: int) -> tuple[SplitReason, str]:
    """Return why the ids of a call do not continue those of `earlier`, as a reason and a sentence. Causes that a user
    can see (tools, messages) are checked before the one that only ids show.
    """
    where = f"the ids differ from {n_common} on, of {len(earlier.ids)}"
    if call.view.tools != earlier.view.tools:
        return "other tools", f"{_tool_names(call)} instead of {_tool_names(earlier)}; {where}"
    if not call.extends(earlier):
        pairs = zip(call.prompt, earlier.prompt, strict=False)  # either may be the shorter one
        changed = next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(earlier.prompt))
        return "history rewritten", f"messages[{changed}] is not the earlier call's; {where}"
    n = len(earlier.prompt)
    sent, answer = call.view.input_messages[n], (earlier.view.output_messages or [{}])[0]
    if call.prompt[n] != earlier.answer:
        text = message_text(sent.get("content")).strip()
        if text == _without_thoughts(answer) != message_text(answer.get("content")).strip():
            return "reasoning dropped", f"messages[{n}] leaves out what stands before </think>; {where}"
        return "history rewritten", f"messages[{n}] is not the answer that the model gave; {where}"
    reasoning = next((name for name in ("reasoning_content", "reasoning") if answer.get(name)), None)
    if reasoning is not None and not sent.get(reasoning):
        return "reasoning dropped", f"messages[{n}] has no {reasoning!r}, but the answer had; {where}"
    # A chat template that drops thoughts makes the ids differ at the response's start. + 1, because
    # the first token may be equal by chance.
    if _without_thoughts(answer) != message_text(answer.get("content")).strip() and (
        n_common <= len(earlier.tokens.prompt_ids) + 1
    ):
        return "reasoning dropped", f"the chat template leaves it out of messages[{n}]; {where}"
    if _arguments(sent) != _arguments(answer):
        return "re-tokenised", f"messages[{n}] spells the arguments of its calls in another way; {where}"
    return "re-tokenised", f"the messages are the same; {where}"


def _arguments(message: Json) -> list[Any]:
    return [as_dict(as_dict(call).get("function")).get("arguments") for call in as_list(message.get("tool_calls"))]


def _without_thoughts(message: Json) -> str:
    return message_text(message.get("content")).rpartition("</think>")[2].strip()


def _tool_names(call: ComparableCall) -> str:
    names = [str(as_dict(tool.get("function")).get("name")) for tool in call.view.tools]
    return f"tools {', '.join(names)}" if names else "no tools"
