"""Find the prompts that an agent has hard-coded, from recorded model calls.

`extract_prompts` compares the system and user messages of many rollouts. Text that is the same in all of them becomes a
template. A value of the task becomes a placeholder with the name of its field, an earlier answer of the model becomes
`{answer_1}`, and other text that differs becomes `{value_1}`, `{value_2}` and so on. A template that is filled with the
values of a rollout is exactly the message that the rollout has sent.

Pure functions of recorded calls, which know no store and no command line.
"""

from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, NamedTuple, cast

from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView
from leyden.algorithm.usage import fixed_pieces
from leyden.types import PromptTemplate

_MIN_LETTERS = 8  # of a template: with fewer it is the user's text; between two gaps: with fewer it is equal by chance
_MIN_ALIKE = 0.6  # of the shorter message's letters: messages that share so much have one template
_MIN_RUN = 12  # characters in one piece: messages at one position of their rollouts that share it have one template
_MIN_SHARE = 0.1  # of the rollouts: rarer text is no prompt
_MAX_FIELDS = 500  # of one task: further values count as computed
_ROLES = {"system": "system", "developer": "system", "user": "user"}
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
_WORD_EDGE = r"(?!(?<=\w)\w)"


@dataclass(frozen=True, slots=True)
class Message:
    """A system or user message that a rollout has sent, first at a position of one of its calls, both from 0."""

    role: str
    text: str
    call: int
    position: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a rollout, the messages that its model calls have sent (each text once), and their answers."""

    task: Any
    messages: Sequence[Message]
    answers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A value that differs between messages."""

    name: str
    expression: str | None
    """The Python expression of the value, in which `task` is the rollout's input; None if it is no part of it."""
    description: str
    """The source of the value, for people: the expression, or a text such as "the answer to call 1"."""
    examples: Sequence[str] = ()
    """Up to three different values."""


@dataclass(frozen=True, slots=True)
class ExtractedPrompt:
    """A prompt that an agent sends."""

    name: str
    """A name for the resource: `prompt` for an agent's only prompt, otherwise one such as `system_prompt`."""
    role: str
    call: int
    """The number of the first call that sends the prompt, from 0."""
    rollouts: tuple[int, ...]
    """The indexes of the conversations that contain the prompt."""
    template: PromptTemplate
    placeholders: Mapping[str, Placeholder]
    """The placeholders of `template` by name, in the order in which the text has them."""
    resource: str | None
    """The name of the resource from which the prompt comes; None if it is hard-coded."""


_GAP = Placeholder("value_1", None, "computed by the agent")
"""Stands in a template for text that differs and is no value of the task."""
Token = str | Placeholder


class _Sent(NamedTuple):
    """A message with the index of its conversation, and with the conversation's values as texts."""

    rollout: int
    message: Message
    values: Mapping[Placeholder, str]


@dataclass(slots=True)
class _Group:
    """Messages of one role that have a template in common."""

    role: str
    template: Sequence[Token]
    members: list[_Sent]


def conversation_of(task: Any, calls: Sequence[ModelCallView]) -> Conversation:
    """Return the input of a rollout with the messages and answers of its model calls."""
    found: dict[tuple[str, str], Message] = {}
    for number, call in enumerate(calls):
        for position, message in enumerate(call.input_messages):
            role, text = _ROLES.get(str(message.get("role"))), message_text(message.get("content"))
            if role is not None and text:
                found.setdefault((role, text), Message(role, text, number, position))
    answers = [message_text(call.output_messages[0].get("content")) if call.output_messages else "" for call in calls]
    return Conversation(task, tuple(found.values()), answers)


def extract_prompts(
    conversations: Sequence[Conversation], resources: Mapping[str, PromptTemplate] | None = None
) -> list[ExtractedPrompt]:
    """Return the prompts that at least two conversations, and a tenth of all, have in common, in the order in which the
    agent sends them. A value that all tasks share looks like fixed text, so give rollouts of different tasks.

    resources: the prompts that the rollouts were given, by name.
    """
    pieces = {name: fixed_pieces(each) for name, each in (resources or {}).items()}
    equal: dict[tuple[str, Sequence[Token]], _Group] = {}
    for rollout, conversation in enumerate(conversations):
        values = dict(islice(_values_of("task", "task", conversation.task), _MAX_FIELDS))
        for number, answer in enumerate(conversation.answers, 1):
            values[Placeholder(f"answer_{number}", None, f"the answer to call {number}")] = answer
        for message in conversation.messages:
            template = _masked(message.text, values)
            group = equal.setdefault((message.role, template), _Group(message.role, template, []))
            group.members.append(_Sent(rollout, message, values))
    needed = max(2, _MIN_SHARE * len(conversations))
    found = [prompt for group in _joined(equal.values()) if (prompt := _prompt_of(group, pieces)) is not None]
    found = [prompt for prompt in found if len(prompt.rollouts) >= needed]
    found.sort(key=lambda each: (each.call, each.role))
    numbers = Counter[str]()
    for index, prompt in enumerate(found if len(found) > 1 else []):
        numbers[prompt.role] += 1
        number = numbers[prompt.role]
        found[index] = replace(prompt, name=f"{prompt.role}_prompt" + (f"_{number}" if number > 1 else ""))
    return found


def _values_of(name: str, expression: str, value: Any) -> Iterator[tuple[Placeholder, str]]:
    """Yield this value and each value nested in it, with the text that a prompt would contain: for a dict or list
    several, one per form of JSON.
    """
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list):
        inner = (
            cast("dict[Any, Any]", value).items() if isinstance(value, dict) else enumerate(cast("list[Any]", value))
        )
        forms: list[dict[str, Any]] = [{}, {"ensure_ascii": False}, {"indent": 2}]
        for options in forms:
            written = f"json.dumps({', '.join([expression, *(f'{key}={each}' for key, each in options.items())])})"
            yield Placeholder(name, written, written), json.dumps(value, **options)
    yield Placeholder(name, expression, expression), str(cast("object", value))
    for key, each in inner:
        plain = re.sub(r"\W", "_", str(key) if name == "task" else f"{name}_{key}")
        is_name = plain.isidentifier() and not keyword.iskeyword(plain)
        yield from _values_of(plain if is_name else f"item_{plain}", f"{expression}[{key!r}]", each)


def _masked(text: str, values: Mapping[Placeholder, str]) -> Sequence[Token]:
    """Return the tokens of a text, with a placeholder for each value that is no part of a word. Where several values
    begin, the longest is replaced.
    """
    by_value = {value: each for each, value in reversed([*values.items()]) if value in text and value.strip()}
    longest_first = "|".join(map(re.escape, sorted(by_value, key=len, reverse=True)))
    pieces = re.split(f"{_WORD_EDGE}({longest_first}){_WORD_EDGE}", text) if by_value else [text]
    tokens: list[Token] = []
    for number, piece in enumerate(pieces):
        tokens += [by_value[piece]] if number % 2 else _TOKEN.findall(piece)
    return tuple(tokens)


def _joined(equal: Iterable[_Group]) -> list[_Group]:
    """Return the groups of messages with one template: each group of equal messages, the largest first, is joined to
    the group that it resembles most.
    """
    found: list[_Group] = []
    for new in sorted(equal, key=lambda each: -len(each.members)):
        common = [(group, _common(group.template, new.template)) for group in found if group.role == new.role]
        fitting = [(group, template) for group, template in common if _is_one_template(group, new, template)]
        if fitting:
            group, template = max(fitting, key=lambda pair: _letters(pair[1]))
            group.template = template
            group.members += new.members
        else:
            found.append(new)
    return found


def _common(one: Sequence[Token], other: Sequence[Token]) -> Sequence[Token]:
    """Return the tokens that two templates have in common, in order, with a gap wherever one of them has other tokens
    between. Two gaps with too little text between them are one.
    """
    start = _shared_start(one, other)
    end = _shared_start(one[start:][::-1], other[start:][::-1])
    middle, other_middle = one[start : len(one) - end], other[start : len(other) - end]
    tokens = list(one[:start])
    for kind, begin, stop, _, _ in SequenceMatcher(None, middle, other_middle, autojunk=False).get_opcodes():
        tokens += middle[begin:stop] if kind == "equal" else [_GAP]
    found: list[Token] = []
    last_gap: int | None = None  # in `found`, with only text after it
    for token in [*tokens, *one[len(one) - end :]]:
        if token is _GAP and last_gap is not None and _letters(found[last_gap:]) < _MIN_LETTERS:
            del found[last_gap:]
        if not isinstance(token, str):
            last_gap = len(found) if token is _GAP else None
        found.append(token)
    return tuple(found)


def _shared_start(one: Sequence[Token], other: Sequence[Token]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _is_one_template(group: _Group, new: _Group, common: Sequence[Token]) -> bool:
    letters = _letters(common)
    if letters >= _MIN_LETTERS and letters >= _MIN_ALIKE * min(_letters(group.template), _letters(new.template)):
        return True
    places = [{(sent.message.call, sent.message.position) for sent in each.members} for each in (group, new)]
    runs = "".join(token if isinstance(token, str) else "\0" for token in common).split("\0")
    return not places[0].isdisjoint(places[1]) and max(map(len, runs)) >= _MIN_RUN


def _letters(tokens: Iterable[Token]) -> int:
    return sum(len(token) for token in tokens if isinstance(token, str) and token[0].isalnum())


def _prompt_of(group: _Group, pieces: Mapping[str, Sequence[str]]) -> ExtractedPrompt | None:
    """Return the prompt of a group, named `prompt`; None if its messages have too little text in common.

    pieces: the text between the placeholders of each resource. A prompt with all of it comes from the resource.
    """
    columns = zip(*(_texts_in(group.template, each) for each in group.members), strict=True)
    template, letters = "", 0
    placeholders: dict[str, Placeholder] = {}
    for token, texts in zip(group.template, columns, strict=True):
        if len(set(texts)) == 1:
            template += PromptTemplate.escape(texts[0])
            letters += sum(map(str.isalnum, texts[0]))
            continue
        source = token if isinstance(token, Placeholder) else _GAP
        if source is _GAP:  # unless a value is this text in every message
            sources = (
                each
                for each in group.members[0].values
                if all(sent.values.get(each) == text for sent, text in zip(group.members, texts, strict=True))
            )
            source = next(sources, _GAP)
        name, number = source.name, 1
        while name in placeholders and (source is _GAP or placeholders[name].description != source.description):
            number += 1
            name = f"{source.name.removesuffix('_1')}_{number}"
        template += f"{{{name}}}"
        placeholders[name] = replace(source, name=name, examples=tuple(dict.fromkeys(texts))[:3])
    if letters < _MIN_LETTERS:
        return None
    text = " ".join(template.replace("{{", "{").replace("}}", "}").split())
    return ExtractedPrompt(
        name="prompt",
        role=group.role,
        call=min(each.message.call for each in group.members),
        rollouts=tuple(sorted({each.rollout for each in group.members})),
        template=PromptTemplate(template=template),
        placeholders=placeholders,
        resource=next((name for name, each in pieces.items() if each and all(piece in text for piece in each)), None),
    )


def _texts_in(template: Sequence[Token], sent: _Sent) -> Iterator[str]:
    """Yield the text that a message has for each token of its template. A gap ends at the first following text."""
    written = [token if isinstance(token, str) else sent.values.get(token, "") for token in template]
    gaps = [index for index, token in enumerate(template) if token is _GAP]
    text, at = sent.message.text, 0
    for index, token in enumerate(template):
        end = at + len(written[index])
        if token is _GAP:
            gaps.pop(0)
            after = "".join(written[index + 1 : gaps[0] if gaps else None])
            end = text.index(after, at) if gaps else text.rindex(after)
        yield text[at:end]
        at = end
