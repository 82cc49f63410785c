"""Find the prompts that an agent has hard-coded, from recorded model calls.

`extract_prompts` compares the system and user messages of many rollouts. Text that is the same in
all of them becomes a template. A value of the task becomes a placeholder with the name of its
field, an earlier answer of the model becomes `{answer_1}`, and other text that differs becomes
`{value_1}`, `{value_2}` and so on. A template that is filled with the values of a rollout is
exactly the message that the rollout has sent.

Pure functions of recorded calls, which know no store and no command line.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, cast

from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView
from leyden.types import PromptTemplate

_LEAST_CHARACTERS = 8
"""A template must have so many letters and digits of fixed text. With fewer, the message is taken
to be the user's."""
_ISLAND_CHARACTERS = 8
"""Fixed text between two gaps with fewer letters and digits is taken to be equal by chance."""
_LEAST_RUN = 12
"""Two messages at the same place of a rollout have one template if they have a piece of so many
characters in common."""
_ALIKE = 0.6
"""Two messages have one template if they have this share of the shorter one's text in common."""
_LEAST_SHARE = 0.1
"""A template must be in at least this share of the rollouts. Rarer text is no prompt."""
_MOST_FIELDS = 500
"""How many values of one task are searched for. Further values count as computed."""
_ROLES = {"system": "system", "developer": "system", "user": "user"}
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Message:
    """One message that a rollout has sent."""

    role: str
    text: str
    call: int
    """The number of the first call that sends the message, from 0."""
    place: int
    """The message's position in that call, from 0."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of one rollout, and the messages that its model calls have sent."""

    task: Any
    """The rollout's input."""
    messages: Sequence[Message]
    """The system and user messages of the rollout's calls, each text once."""
    answers: Sequence[str] = ()
    """The model's answer to each call."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The value that a placeholder stands for."""

    expression: str | None
    """The Python expression of the value, in which `task` is the rollout's input; None if the value
    is no part of the input."""
    description: str
    """The source of the placeholder's value, as text for people, such as "the answer to call 1"."""
    examples: tuple[str, ...]
    """Up to three different values."""


@dataclass(frozen=True, slots=True)
class ExtractedPrompt:
    """A prompt that an agent sends."""

    name: str
    """A name for the resource: `prompt` if the agent has only one prompt, otherwise a name with its
    role, such as `system_prompt`."""
    role: str
    template: PromptTemplate
    placeholders: Mapping[str, Placeholder]
    """The placeholders by name, in order of appearance."""
    rollouts: tuple[int, ...]
    """The places of the conversations that contain the prompt, in the argument of
    `extract_prompts`."""
    call: int
    """The number of the first call that sends the prompt, from 0."""


def conversation_of(task: Any, calls: Sequence[ModelCallView]) -> Conversation:
    """Return the input of a rollout with the system and user messages of its model calls. A message
    that later calls repeat is contained once.
    """
    found: dict[tuple[str, str], Message] = {}
    for number, call in enumerate(calls):
        for place, message in enumerate(call.input_messages):
            role, text = _ROLES.get(str(message.get("role"))), message_text(message.get("content"))
            if role is not None and text:
                found.setdefault((role, text), Message(role, text, number, place))
    answers = [message_text(call.output_messages[0].get("content")) if call.output_messages else "" for call in calls]
    return Conversation(task, tuple(found.values()), answers)


def formatting_call(prompt: ExtractedPrompt) -> str:
    """Return the Python expression with which an agent makes the message from the resource, such as
    `resources['prompt'].format(city=task['city'])`.
    """
    values = ", ".join(f"{name}={each.expression or '...'}" for name, each in prompt.placeholders.items())
    return f"resources[{prompt.name!r}].format({values})"


def extract_prompts(conversations: Sequence[Conversation]) -> list[ExtractedPrompt]:
    """Return the prompts that at least two conversations, and a tenth of all, have in common, in
    the order in which the agent sends them.

    A field of the task that has the same value in all rollouts looks like fixed text, so give
    rollouts of different tasks.
    """
    masked = [_Masked(number, message, fields) for number, message, fields in _with_fields(conversations)]
    needed = max(2, _LEAST_SHARE * len(conversations))
    found: list[ExtractedPrompt] = []
    for group in _groups(masked):
        prompt = _prompt_of(group)
        if prompt is not None and len(prompt.rollouts) >= needed:
            found.append(prompt)
    return _named(sorted(found, key=lambda each: (each.call, each.role != "system")))


# ---- values of the task --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """A value of a rollout's task or one of its answers, written in one way."""

    name: str
    expression: str | None
    """The Python expression of the value; None for an answer of the model."""
    call: int = 0
    """The number of the call that was answered, from 0."""

    @property
    def description(self) -> str:
        return self.expression or f"the answer to call {self.call + 1}"


def _fields(conversation: Conversation) -> dict[_Field, str]:
    """Return all values of a task as texts, including the whole task, and the model's answers."""
    answers = {_Field(f"answer_{call + 1}", None, call): text for call, text in enumerate(conversation.answers)}
    return {**dict(islice(_walk("task", "task", conversation.task), _MOST_FIELDS)), **answers}


def _walk(name: str, expression: str, value: Any) -> Iterator[tuple[_Field, str]]:
    """Yield a field for this value and for each value nested in it, with the text that a prompt
    would contain. Dicts and lists have several texts, one per form of JSON.

    expression: the Python expression that reads the value from the task.
    """
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = cast("dict[Any, Any]", value).items()
    elif isinstance(value, list):
        inner = enumerate(cast("list[Any]", value))
    if isinstance(value, dict | list):
        json_value = cast("Any", value)
        for options in ("", ", ensure_ascii=False", ", indent=2"):
            text = json.dumps(
                json_value, ensure_ascii="ascii" not in options, indent=2 if "indent" in options else None
            )
            yield _Field(name, f"json.dumps({expression}{options})"), text
    yield _Field(name, expression), str(cast("object", value))
    for key, each in inner:
        shown = str(key) if name == "task" else f"{name}_{key}"
        yield from _walk(_plain_name(shown), f"{expression}[{key!r}]", each)


def _plain_name(text: str) -> str:
    """Return a text as the name of a placeholder: a Python identifier."""
    name = re.sub(r"\W", "_", text)
    name = name if name.isidentifier() else f"item_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def _with_fields(conversations: Sequence[Conversation]) -> Iterator[tuple[int, Message, dict[_Field, str]]]:
    """Yield each message with the number of its conversation and the fields of its task."""
    for number, conversation in enumerate(conversations):
        fields = _fields(conversation)
        for message in conversation.messages:
            yield number, message, fields


# ---- messages as tokens --------------------------------------------------------------------------


class _Gap:
    """A part of a template for text that differs and is no field."""

    def __repr__(self) -> str:
        return "..."


_GAP = _Gap()
Token = str | _Field | _Gap


@dataclass(slots=True)
class _Masked:
    """A message in which the values of the task are replaced by their fields."""

    conversation: int
    message: Message
    fields: Mapping[_Field, str]
    tokens: tuple[Token, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = _mask(self.message.text, self.fields)


def _mask(text: str, fields: Mapping[_Field, str]) -> tuple[Token, ...]:
    """Return the tokens of a text, in which the values of fields are replaced by the fields.

    The longest values are replaced first. Values that are only white space are not replaced.
    """
    pieces: list[str | _Field] = [text]
    for each, value in sorted(fields.items(), key=lambda item: -len(item[1])):
        if not value.strip():
            continue
        pattern = re.compile(
            (r"(?<!\w)" if value[0].isalnum() else "") + re.escape(value) + (r"(?!\w)" if value[-1].isalnum() else "")
        )
        pieces = [
            new for piece in pieces for new in (_split(piece, pattern, each) if isinstance(piece, str) else [piece])
        ]
    return tuple(token for piece in pieces for token in (_TOKEN.findall(piece) if isinstance(piece, str) else [piece]))


def _split(text: str, pattern: re.Pattern[str], mark: _Field) -> Iterator[str | _Field]:
    """Yield the pieces of a text, with `mark` in the place of each match of the pattern."""
    for number, piece in enumerate(pattern.split(text)):
        if number:
            yield mark
        if piece:
            yield piece


# ---- messages of one template --------------------------------------------------------------------


@dataclass(slots=True)
class _MessageGroup:
    """Messages of one role that have a template in common."""

    template: tuple[Token, ...]
    members: list[_Masked]

    @property
    def places(self) -> set[tuple[int, int]]:
        return {(each.message.call, each.message.place) for each in self.members}


def _groups(messages: Sequence[_Masked]) -> list[_MessageGroup]:
    """Return the messages grouped by template. Equal messages are one group at first; then each
    group is joined to the one that it resembles most, if any, the largest first.
    """
    equal: dict[tuple[str, tuple[Token, ...]], _MessageGroup] = {}
    for each in messages:
        equal.setdefault((each.message.role, each.tokens), _MessageGroup(each.tokens, [])).members.append(each)
    groups: dict[str, list[_MessageGroup]] = {}
    for (role, _), new in sorted(equal.items(), key=lambda item: -len(item[1].members)):
        of_role = groups.setdefault(role, [])
        merged = [(group, _common(group.template, new.template)) for group in of_role]
        fitting = [(group, template) for group, template in merged if _is_one_template(group, new, template)]
        if not fitting:
            of_role.append(new)
            continue
        group, template = max(fitting, key=lambda pair: _letters(pair[1]))
        group.template = template
        group.members += new.members
    return [group for of_role in groups.values() for group in of_role]


def _common(template: Sequence[Token], tokens: Sequence[Token]) -> tuple[Token, ...]:
    """Return the tokens that two templates have in common, in order, with a gap wherever one of
    them has other tokens between.
    """
    start = _shared_start(template, tokens)
    end = _shared_start(template[start:][::-1], tokens[start:][::-1])
    middle, other = template[start : len(template) - end], tokens[start : len(tokens) - end]
    found: list[Token] = [*template[:start]]
    at, at_other = 0, 0
    for block in SequenceMatcher(None, middle, other, autojunk=False).get_matching_blocks():
        if block.a > at or block.b > at_other:
            found.append(_GAP)
        found += middle[block.a : block.a + block.size]
        at, at_other = block.a + block.size, block.b + block.size
    return _without_islands([*found, *template[len(template) - end :]])


def _shared_start(one: Sequence[Token], other: Sequence[Token]) -> int:
    """Return how many tokens two sequences have in common at their start."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _without_islands(template: Sequence[Token]) -> tuple[Token, ...]:
    """Return the template in which two gaps with too little text between them are one gap."""
    found: list[Token] = []
    last_gap: int | None = None
    for token in template:
        if isinstance(token, _Field):
            last_gap = None
        elif token is _GAP:
            if last_gap is not None and _letters(found[last_gap:]) < _ISLAND_CHARACTERS:
                del found[last_gap:]
            last_gap = len(found)
        found.append(token)
    return tuple(found)


def _is_one_template(group: _MessageGroup, new: _MessageGroup, template: Sequence[Token]) -> bool:
    """Return whether two groups have one template.

    template: the tokens that both have in common.
    """
    smaller = min(_letters(group.template), _letters(new.template))
    common = _letters(template)
    if common >= _LEAST_CHARACTERS and common >= _ALIKE * smaller:
        return True
    return bool(group.places & new.places) and _longest_run(template) >= _LEAST_RUN


def _letters(tokens: Iterable[Token]) -> int:
    """Return the number of letters and digits in a template's fixed text."""
    return sum(len(token) for token in tokens if isinstance(token, str) and token[0].isalnum())


def _longest_run(tokens: Iterable[Token]) -> int:
    """Return the number of characters of a template's longest piece of fixed text."""
    longest = run = 0
    for token in tokens:
        run = run + len(token) if isinstance(token, str) else 0
        longest = max(longest, run)
    return longest


# ---- a template of a group -----------------------------------------------------------------------


def _prompt_of(group: _MessageGroup) -> ExtractedPrompt | None:
    """Return the prompt of a group; None if its messages have too little in common."""
    slots = [token for token in group.template if not isinstance(token, str)]
    values = [_values_in(group.template, each) for each in group.members]
    by_slot = list(zip(*values, strict=True)) if slots else []
    sources = [_source(slot, texts, group.members) for slot, texts in zip(slots, by_slot, strict=True)]
    names, placeholders = _placeholders(sources, by_slot)
    numbers, parts, letters = iter(range(len(slots))), list[str](), 0
    for token in group.template:
        if isinstance(token, str):
            text, name = token, None
        else:
            number = next(numbers)
            text, name = by_slot[number][0], names[number]
        parts.append(PromptTemplate.escape(text) if name is None else f"{{{name}}}")
        letters += sum(map(str.isalnum, text)) if name is None else 0
    if letters < _LEAST_CHARACTERS:
        return None
    return ExtractedPrompt(
        name="",
        role=group.members[0].message.role,
        template=PromptTemplate(template="".join(parts)),
        placeholders=placeholders,
        rollouts=tuple(sorted({each.conversation for each in group.members})),
        call=min(each.message.call for each in group.members),
    )


def _values_in(template: Sequence[Token], member: _Masked) -> list[str]:
    """Return the text that a message has in the place of each field and each gap of its template.

    A gap ends where the text after it is first found.
    """
    pieces = [""]
    for token in template:
        if isinstance(token, _Gap):
            pieces.append("")
        else:
            pieces[-1] += member.fields[token] if isinstance(token, _Field) else token
    text, at, gaps = member.message.text, len(pieces[0]), list[str]()
    for piece in pieces[1:-1]:
        begins = text.index(piece, at)
        gaps.append(text[at:begins])
        at = begins + len(piece)
    if len(pieces) > 1:
        gaps.append(text[at : len(text) - len(pieces[-1])])
    in_gaps = iter(gaps)
    return [
        member.fields[token] if isinstance(token, _Field) else next(in_gaps)
        for token in template
        if not isinstance(token, str)
    ]


def _source(slot: Token, texts: Sequence[str], members: Sequence[_Masked]) -> _Field | _Gap | None:
    """Return what a field or a gap of a template stands for: a field of the input, a gap for a
    computed value, or None if its text is always the same.

    slot: the field or gap that the comparison of the messages has found.
    texts: the text in its place in each message.
    members: the messages, in the same order.
    """
    if len(set(texts)) == 1:
        return None
    if isinstance(slot, _Field):
        return slot
    fitting = [
        name
        for name in members[0].fields
        if all(each.fields.get(name) == text for each, text in zip(members, texts, strict=True))
    ]
    return fitting[0] if fitting else _GAP


def _placeholders(
    sources: Sequence[_Field | _Gap | None], by_slot: Sequence[Sequence[str]]
) -> tuple[list[str | None], dict[str, Placeholder]]:
    """Return the name of each slot's placeholder, None for a slot with fixed text, and the
    placeholders by name.

    sources: what each slot stands for (`_source`).
    by_slot: for each slot its text in each message.
    """
    names: list[str | None] = []
    found: dict[str, Placeholder] = {}
    for source, texts in zip(sources, by_slot, strict=True):
        if source is None:
            names.append(None)
            continue
        is_field = isinstance(source, _Field)
        expression, description = (
            (source.expression, source.description) if is_field else (None, "computed by the agent")
        )
        wanted = source.name if is_field else "value_1"
        name, number = wanted, 1
        while name in found and (not is_field or found[name].description != description):
            number += 1
            name = f"{wanted}_{number}" if is_field else f"value_{number}"
        names.append(name)
        found[name] = Placeholder(expression, description, tuple(dict.fromkeys(texts))[:3])
    return names, found


def _named(prompts: Sequence[ExtractedPrompt]) -> list[ExtractedPrompt]:
    """Return the prompts with names of their own."""
    if len(prompts) == 1:
        return [replace(prompts[0], name="prompt")]
    counts: dict[str, int] = {}
    named: list[ExtractedPrompt] = []
    for prompt in prompts:
        counts[prompt.role] = number = counts.get(prompt.role, 0) + 1
        named.append(replace(prompt, name=f"{prompt.role}_prompt" + (f"_{number}" if number > 1 else "")))
    return named
