"""Describe a rollout as text for a person: its steps, its conversation, its rewards and its tokens.

`leyden show RUN ROLLOUT` prints it. The module knows spans, no store and no terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from leyden._lib.json import Json
from leyden.adapter.attributes import as_dict, as_list
from leyden.adapter.calls import model_calls
from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView
from leyden.adapter.roles import call_roles
from leyden.adapter.trajectory import TraceToTrajectory
from leyden.adapter.tree import TraceTree
from leyden.types import Span, get_rewards_from_span, semconv

_INDENT = "  "
_STACK_LINES = 8
"""How many of the last lines of a stack trace are shown if texts are cut."""
_FRAME = re.compile(r'\s*File "')
_LIBRARY = re.compile(
    rf"site-packages|dist-packages|[/\\]leyden_compat[/\\]|[/\\]lib[/\\]python\d|\"<|{re.escape(str(Path(__file__).parent.parent))}[/\\]"
)
"""Frames of installed packages, of Python itself and of Leyden."""


def step_lines(spans: Sequence[Span]) -> list[str]:
    """Return the names of an attempt's spans, one line each, indented below their parents."""
    return [f"{_INDENT * depth}{span.name}" for span, depth in _placed(spans)]


def token_lines(spans: Sequence[Span]) -> list[str]:
    """Return a line for each trajectory of an attempt, such as `recorded: 499 tokens, 83 of them the model's`."""
    return [
        f"recorded: {len(trajectory.token_ids):,} tokens, {trajectory.n_trained:,} of them the model's"
        for trajectory in TraceToTrajectory().adapt(spans)
    ]


def transcript_lines(spans: Sequence[Span], *, max_characters: int | None = 2000) -> list[str]:
    """Return the lines of a transcript: the steps of an attempt with their durations, errors and rewards, each message
    once, and the tokens recorded.

    A model call is followed by the messages that no earlier call had, and by the answer.
    max_characters: longer texts are cut; None shows all of each.
    """
    shown: list[list[str]] = []
    lines: list[str] = []
    for span, depth, call, role in _steps(spans):
        indent = _INDENT * depth
        lines.append(f"{indent}{_headline(span, call)}{_INDENT + role if role not in ('', 'agent') else ''}")
        if span.status.status_code == "ERROR":
            lines += _indented(f"failed: {span.status.description or 'no reason was recorded'}", indent, max_characters)
        if stacktrace := str(span.attributes.get(semconv.EXCEPTION_STACKTRACE, "")):
            shown_trace = stacktrace.rstrip() if max_characters is None else _excerpt(stacktrace)
            lines += _indented(shown_trace, indent, None)
        if span.name == semconv.MESSAGE:
            lines += _indented(str(span.attributes.get(semconv.MESSAGE_BODY, "")), indent, max_characters)
        if call is not None:
            for message in _new_messages(call, shown):
                role, text = message.get("role") or "assistant", message_text(message.get("content"))
                calls_made = "".join(f"\n{_INDENT}calls {each}" for each in _tool_calls(message))
                lines += _indented(f"{role}: {text}".rstrip() + calls_made, indent, max_characters)
    return lines + token_lines(spans)


def conversation(spans: Sequence[Span]) -> list[Json]:
    """Return what happened in an attempt as JSON, for viewers: its messages in order, each once, and between them its
    errors, rewards and the agent's own messages.

    Each has `role` (that of a chat message, or `error`, `reward`, `note`), `text`, `tool_calls` (each with `name` and
    `arguments`) and `call`, the role of its model call if that is not the agent's.
    """
    shown: list[list[str]] = []
    found: list[Json] = []

    def add(role: str, text: str, *, tool_calls: Sequence[Json] = (), call: str = "") -> None:
        found.append({"role": role, "text": text, "tool_calls": list(tool_calls), "call": call})

    for span, _, call, role in _steps(spans):
        for message in () if call is None else _new_messages(call, shown):
            functions = [as_dict(as_dict(each).get("function")) for each in as_list(message.get("tool_calls"))]
            made = [{"name": str(each.get("name")), "arguments": each.get("arguments") or ""} for each in functions]
            text = message_text(message.get("content"))
            add(str(message.get("role") or "assistant"), text, tool_calls=made, call="" if role == "agent" else role)
        if span.status.status_code == "ERROR":
            add("error", f"{span.name}: {span.status.description or 'no reason was recorded'}")
        if span.name == semconv.MESSAGE:
            add("note", str(span.attributes.get(semconv.MESSAGE_BODY, "")))
        if rewards := get_rewards_from_span(span):
            names = {name: "" if name == semconv.PRIMARY_REWARD else f"{name} " for name in rewards}
            add("reward", ", ".join(f"{names[name]}{value:g}" for name, value in rewards.items()))
    return found


def _steps(spans: Sequence[Span]) -> Iterator[tuple[Span, int, ModelCallView | None, str]]:
    """Yield the spans depth first with their depths, and with the model call that is shown at the span, and its role.

    A call that several spans recorded is shown at the first of them.
    """
    calls = model_calls(spans)
    roles = call_roles(calls, spans)
    numbers = {span.span_id: number for number, call in enumerate(calls) for span in call.spans}
    left = set(range(len(calls)))
    for span, depth in _placed(spans):
        number = numbers.get(span.span_id)
        if number is None or number not in left:
            yield span, depth, None, ""
        else:
            left.discard(number)
            yield span, depth, calls[number], roles[number].role


def _placed(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield the spans depth first, each with its depth. A virtual root is left out."""
    if not spans:
        return
    root = TraceTree.from_spans(spans)
    is_virtual = root.span.name == semconv.VIRTUAL
    waiting = [(node, 0) for node in reversed(root.children)] if is_virtual else [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node.span, depth
        waiting.extend((child, depth + 1) for child in reversed(node.children))


def _headline(span: Span, call: ModelCallView | None) -> str:
    """Return a span's first line: name, duration, model, tokens (prompt + response) and rewards."""
    parts = [span.name]
    if span.start_time is not None and span.end_time is not None and span.end_time > span.start_time:
        parts.append(f"{span.end_time - span.start_time:.2f} s")
    if call is not None:
        if call.replayed:
            parts.append("replayed")
        if call.model:
            parts.append(call.model)
        if call.tokens is not None:
            parts.append(f"{len(call.tokens.prompt_ids):,} + {len(call.tokens.response_ids):,} tokens")
        elif call.usage is not None:
            parts.append(f"{call.usage[0]:,} + {call.usage[1]:,} tokens")
    rewards = get_rewards_from_span(span)
    if rewards:
        named = (value if name == semconv.PRIMARY_REWARD else (name, value) for name, value in rewards.items())
        parts.append(", ".join(f"{each[0]} {each[1]:g}" if isinstance(each, tuple) else f"{each:g}" for each in named))
    return _INDENT.join(parts)


def _new_messages(call: ModelCallView, shown: list[list[str]]) -> list[Json]:
    """Return a call's answers and the messages before them that no earlier call had at the same index.

    shown: the digests of messages and answer of each earlier call, to which those of this call are added.
    """
    messages = [*call.input_messages, *call.output_messages[:1]]
    digests = [
        json.dumps([message.get("role"), message_text(message.get("content")), _tool_calls(message)], default=str)
        for message in messages
    ]
    known = max((_common_prefix(digests, each) for each in shown), default=0)
    shown.append(digests)
    return [*messages[known:], *call.output_messages[1:]]


def _common_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _tool_calls(message: Json) -> list[str]:
    functions = (as_dict(as_dict(call).get("function")) for call in as_list(message.get("tool_calls")))
    return [f"{function.get('name')}({function.get('arguments') or ''})" for function in functions]


def _excerpt(stacktrace: str) -> str:
    """Return the last lines of a stack trace, after the last frame of the user's own code. Many errors are raised deep
    in a library; the line that the user can change stands far above.
    """
    lines = stacktrace.rstrip().splitlines()
    start = len(lines) - _STACK_LINES
    if start <= 0:
        return "\n".join(lines)
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    start = next((number for number in frames if number >= start), start)  # no part of a frame
    own = max((number for number in frames if not _LIBRARY.search(lines[number])), default=start)
    if own >= start:
        return "\n".join([f"... ({start} earlier lines)", *lines[start:]])
    end = min(number for number in (*frames, start) if number > own)  # a frame ends where the next begins
    between = [f"... ({start - end} lines of libraries)"] if end < start else []
    return "\n".join([f"... ({own} earlier lines)", *lines[own:end], *between, *lines[start:]])


def _indented(text: str, indent: str, max_characters: int | None) -> list[str]:
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[:max_characters]} ... ({len(text):,} characters in all)"
    first, *later = text.splitlines() or [""]
    return [f"{indent}{_INDENT}{first}", *(f"{indent}{_INDENT * 2}{line}" for line in later)]


def answer_of(spans: Sequence[Span]) -> str | None:
    """Return the text with which a rollout ended: the model's last answer that has one, or else the agent's last
    message; None if neither was recorded.
    """
    for call in reversed(model_calls(spans)):
        for message in reversed(call.output_messages):
            if text := message_text(message.get("content")).strip():
                return text
    emitted = [str(span.attributes.get(semconv.MESSAGE_BODY, "")) for span in spans if span.name == semconv.MESSAGE]
    return next((text for text in reversed(emitted) if text.strip()), None)
