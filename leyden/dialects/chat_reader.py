"""Read answers and chunks of chat servers, whose forms vary, into the one form that OpenAI defines.

Servers of OpenAI's API differ: some send content as a list of parts, arguments as an object, tool calls without an
index or two of them under one index. `ChatReader` returns what they mean. A value that it cannot read is left out and
reported as an `Untranslatable`, which names the field: a translation refuses the answer for it, and a record notes it.
It knows no other dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json

from leyden._lib.json import Json, is_list, is_object
from leyden.dialects.fields import REASONING, shown
from leyden.errors import Untranslatable

_MAX_CALLS = 1024
"""The most tool calls in one answer, and the highest index: more come from a broken server, and must not fill the
memory."""
_LISTS = ("token_ids", "policy_versions", "prompt_token_ids")
_MAX_NAMED = 5
"""How many different problems `Unread` names."""


class Unread:
    """Counts the events of one answer that could not be read, and names the first problems."""

    def __init__(self) -> None:
        self._n_events = 0
        self._named: dict[str, None] = {}

    def add(self, problems: list[Untranslatable] | list[Exception]) -> None:
        """Count one event with these problems; nothing without any."""
        self._n_events += bool(problems)
        for problem in problems:
            if len(self._named) < _MAX_NAMED:
                text = str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
                self._named[text[:200]] = None

    @property
    def text(self) -> str | None:
        """The number of events and the first problems, in one line; None if all could be read."""
        if not self._n_events:
            return None
        named = "; ".join(self._named)
        return named if self._n_events == 1 else f"{self._n_events} events: {named}"


@dataclass(slots=True)
class StreamedCall:
    """One tool call of a stream, as far as it has arrived."""

    number: int
    """The number of calls of the choice that began before it."""
    index: int
    """The server's index, or the number if it sent none."""
    legacy: bool = False
    """Whether it came as a `function_call`."""
    id: str | None = None
    name: str = ""
    fields: Json = field(default_factory=dict[str, Any])
    """Other fields of the call, such as its type."""
    pieces: list[str] = field(default_factory=list[str])
    """The arguments so far."""
    whole: bool = False
    """Whether the arguments came as an object, which no text can continue."""

    @property
    def arguments(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    @property
    def complete(self) -> bool:
        """Whether the arguments so far are a JSON object, to which nothing can be added."""
        return self.whole or (
            bool(self.pieces) and self.pieces[-1].rstrip()[-1:] == "}" and _is_json_object(self.arguments)
        )

    def is_ended_by(self, call_id: str | None, name: str, arguments: str, *, has_index: bool) -> bool:
        """Return whether a piece that seems to continue this call begins another one.

        A piece without a name continues. One with a name begins another call if its id differs, or if the arguments so
        far are complete. Some servers repeat the name in each piece, some with a new id each time, and others send the
        name itself in pieces. `has_index`: whether the piece names the call by its index.
        """
        if not name or not self.name:
            return False
        begun = bool(self.arguments.strip())
        if call_id and self.id and call_id != self.id:
            return not (name == self.name and begun and not self.complete and not arguments.lstrip().startswith("{"))
        if not begun:
            return not has_index and name != self.name
        if name == self.name and not arguments.strip():
            return False
        return name != self.name or self.complete

    def add(self, call_id: str | None, name: str, arguments: str) -> None:
        """Add a piece. The name may come whole, repeated, longer each time or in pieces."""
        self.id = self.id or call_id
        if name.startswith(self.name):
            self.name = name
        elif name and not self.arguments.strip():
            self.name += name
        if arguments:
            self.pieces.append(arguments)

    def as_json(self) -> Json:
        """Return the call in the form of a whole answer."""
        if self.legacy:
            return {"name": self.name, "arguments": self.arguments}
        call: Json = {"id": self.id, "type": "function", **self.fields}
        return call if "custom" in call else {**call, "function": {"name": self.name, "arguments": self.arguments}}


class ChatReader:
    """Reads the whole answer of one call, or the chunks of its stream in their order."""

    def __init__(self) -> None:
        self.problems: list[Untranslatable] = []
        """What could not be read in the last answer or chunk."""
        self._calls: dict[int, list[StreamedCall]] = {}
        """The tool calls that a stream has brought so far, by choice."""
        self._begun: set[int] = set()
        """The choices of a stream that have had a delta."""

    def calls(self, choice_index: int) -> list[StreamedCall]:
        """Return the tool calls of a choice so far, in the order in which they began."""
        return self._calls.setdefault(choice_index, [])

    def answer(self, answer: Any) -> Json:
        """Return a whole answer of chat or completions in OpenAI's form."""
        return self._body(answer, self._whole_choice)

    def chunk(self, chunk: Any) -> Json:
        """Return a chunk in OpenAI's form. The index of a tool call is its number in the choice."""
        if (index := _index_if_usual(chunk)) is not None:
            self.problems = []
            self._begun.add(index)
            return chunk
        return self._body(chunk, self._choice_of_chunk)

    def _body(self, body: Any, read_choice: Callable[[Any, str], Json | None]) -> Json:
        self.problems = []
        if not is_object(body):
            self._problem("the event", f"must be an object, got {shown(body)}")
            return {}
        found = dict(body)
        if "usage" in found:
            found["usage"] = self._usage(found["usage"], "usage")
        self._check_lists(found, "")
        if "choices" in found:
            choices = self._list(found["choices"], "choices")
            read = (
                read_choice(choice, f"choices[{index}]") for index, choice in enumerate(choices) if choice is not None
            )
            found["choices"] = [choice for choice in read if choice is not None]
        return found

    def _problem(self, where: str, why: str) -> None:
        self.problems.append(Untranslatable(where, why))

    def _typed(self, value: Any, kind: type, where: str) -> Any:
        """Return the value if it is of this type or None; else None, with a problem."""
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        noun = {str: "a string", dict: "an object", list: "a list", int: "a whole number"}[kind]
        self._problem(where, f"must be {noun}, got {shown(value)}")
        return None

    def _list(self, value: Any, where: str) -> list[Any]:
        return self._typed(value, list, where) or []

    def _check_lists(self, fields: Json, where: str) -> None:
        for name in _LISTS:
            if name in fields:
                fields[name] = self._typed(fields[name], list, where + name)

    def _number(self, value: Any, where: str) -> int | None:
        """Return a whole number, also from its text; None without one."""
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 12:
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self._typed(value, int, where)

    def _usage(self, value: Any, where: str) -> Json | None:
        """Return token counts. Under the names that OpenAI defines, only whole numbers are kept."""
        usage = cast("Json | None", self._typed(value, dict, where))
        if usage is None:
            return None
        found = dict(usage)
        for name, count in usage.items():
            if name.endswith("_tokens_details"):
                found[name] = self._usage(count, f"{where}.{name}")
            elif name.endswith("_tokens"):
                found[name] = self._number(count, f"{where}.{name}")
        return found

    # ---- choices ---------------------------------------------------------------------------------

    def _choice(self, value: Any, where: str) -> Json | None:
        """Return a choice without its message or delta; None, with a problem, if it is none."""
        if not is_object(value):
            self._problem(where, f"must be an object, got {shown(value)}")
            return None
        choice = dict(value)
        for name, kind in (("finish_reason", str), ("text", str), ("logprobs", dict)):
            if name in choice:
                choice[name] = self._typed(choice[name], kind, f"{where}.{name}")
        self._check_lists(choice, f"{where}.")
        if "index" in choice and (index := self._number(choice.pop("index"), f"{where}.index")) is not None:
            choice["index"] = index
        return choice

    def _whole_choice(self, value: Any, where: str) -> Json | None:
        choice = self._choice(value, where)
        if choice is not None and "message" in choice:
            message = self._message(choice["message"], f"{where}.message")
            if is_object(choice["message"]) and "tool_calls" in choice["message"]:
                calls = self._tool_calls(choice["message"], f"{where}.message")
                message["tool_calls"] = [self._whole_call(call, path) for call, path in calls]
            choice["message"] = message
        return choice

    def _choice_of_chunk(self, value: Any, where: str) -> Json | None:
        choice = self._choice(value, where)
        if choice is None:
            return None
        index = choice.setdefault("index", 0)
        given, path = choice.pop("delta", None), f"{where}.delta"
        if given is None and "message" in choice:  # some servers send the whole message in the last chunk
            given, path = choice.pop("message"), f"{where}.message"
            if given and index in self._begun:
                self._problem(path, "comes after deltas of the same choice")
                given = None
        delta = self._message(given, path)
        if is_object(given):
            calls = self.calls(index)
            pieces = [self._piece(calls, piece, at) for piece, at in self._tool_calls(given, path)]
            if is_object(given.get("function_call")):
                legacy = {"function": delta.pop("function_call", None)}
                pieces.append(self._piece(calls, legacy, f"{path}.function_call", legacy=True))
            if found := [piece for piece in pieces if piece is not None]:
                delta["tool_calls"] = found
        if delta:
            self._begun.add(index)
        if given is not None:
            choice["delta"] = delta
        return choice

    # ---- messages --------------------------------------------------------------------------------

    def _message(self, value: Any, where: str) -> Json:
        """Return a message or a delta without its tool calls."""
        found: Json = {}
        fields: Json = self._typed(value, dict, where) or {}
        for name, given in fields.items():
            if name == "content":
                self._content(found, given, f"{where}.content")
            elif name in REASONING:
                text = self._text(given, f"{where}.{name}")
                found[name] = f"{found.get(name) or ''}{text}" if text and found.get(name) else text
            elif name in ("role", "refusal"):
                found[name] = self._typed(given, str, f"{where}.{name}")
            elif name == "thinking_blocks":
                blocks = self._list(given, f"{where}.{name}")
                found[name] = [block for block in blocks if self._is_thinking(block, f"{where}.{name}")]
            elif name == "function_call":
                function, _ = self._function(given, f"{where}.{name}")
                found[name] = function if given is not None else None
            elif name != "tool_calls":
                found[name] = given
        return found

    def _content(self, message: Json, value: Any, where: str) -> None:
        """Add content, a text or a list of parts, to a message: texts, refusals and thinking."""
        if not is_list(value):
            message["content"] = self._typed(value, str, where)
            return
        message["content"] = None
        for index, part in enumerate(value):
            path, kind = f"{where}[{index}]", "text"
            if is_object(part):
                kind = part.get("type", "text")
                part = part.get("text") if kind in ("text", "output_text") else part.get(str(kind))
            name = {"text": "content", "output_text": "content", "refusal": "refusal"}.get(str(kind))
            if kind in ("thinking", "reasoning"):
                name = REASONING[0]
            if name is None:
                self._problem(f"{path}.type", f"is {shown(kind)}, which is no text")
            elif text := self._text(part, path):
                message[name] = (message.get(name) or "") + text

    def _text(self, value: Any, where: str) -> str | None:
        """Return a text, also from a list of text parts; None without one."""
        if not is_list(value):
            return self._typed(value, str, where)
        parts = [part.get("text") if is_object(part) else part for part in value]
        return "".join(self._typed(part, str, f"{where}[{index}]") or "" for index, part in enumerate(parts))

    def _is_thinking(self, block: Any, where: str) -> bool:
        texts = [block.get(name) for name in ("thinking", "signature", "data")] if is_object(block) else [block]
        if is_object(block) and all(text is None or isinstance(text, str) for text in texts):
            return True
        self._problem(where, f"must hold blocks of thinking, got {shown(block)}")
        return False

    # ---- tool calls ------------------------------------------------------------------------------

    def _tool_calls(self, message: Json, where: str) -> list[tuple[Json, str]]:
        """Return the tool calls of a message, or their pieces in a delta, each with its path."""
        given, path = message.get("tool_calls"), f"{where}.tool_calls"
        if is_object(given):
            given = [given]
        found: list[tuple[Json, str]] = []
        for index, call in enumerate(self._list(given, path)):
            if checked := self._typed(call, dict, f"{path}[{index}]"):
                found.append((checked, f"{path}[{index}]"))
        return found

    def _function(self, value: Any, where: str) -> tuple[Json, bool]:
        """Return name and arguments of a function call, both as text, and whether the arguments came as an object."""
        function = dict(cast(Json, self._typed(value, dict, where) or {}))
        if "name" in function:
            function["name"] = self._typed(function["name"], str, f"{where}.name")
        arguments, whole = function.get("arguments"), False
        if is_object(arguments):
            arguments, whole = json.dumps(arguments, ensure_ascii=False), True
        if "arguments" in function:
            function["arguments"] = self._typed(arguments, str, f"{where}.arguments") or ""
        return function, whole

    def _whole_call(self, call: Json, where: str) -> Json:
        """Return a tool call of a whole answer, with its arguments as text."""
        found = dict(call)
        if "id" in found:
            found["id"] = self._call_id(found["id"], f"{where}.id")
        if "custom" not in found:
            found["function"], _ = self._function(found.get("function"), f"{where}.function")
        return found

    def _call_id(self, value: Any, where: str) -> str | None:
        number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if number else self._typed(value, str, where)

    def _piece(self, calls: list[StreamedCall], piece: Json, where: str, *, legacy: bool = False) -> Json | None:
        """Add a piece to the call that it belongs to. Return it as a piece of the call's number; None, with a problem,
        if it belongs to none.
        """
        index = self._number(piece.get("index"), f"{where}.index")
        if index is not None and not 0 <= index < _MAX_CALLS:
            return self._problem(f"{where}.index", f"is {index}; an answer has no such tool call")
        call_id = self._call_id(piece.get("id"), f"{where}.id") or None
        function, whole = self._function(piece.get("function"), f"{where}.function")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        # A piece seems to continue a call of its index, and of those the one of its id or else the last. Without an
        # index it is the one of its id or else the last of all.
        found = [call for call in calls if call.legacy == legacy and index in (None, call.index)]
        same = [call for call in found if call_id and call.id == call_id]
        call = (same or found or [None])[-1]
        if call is None or call.is_ended_by(call_id, name, arguments, has_index=index is not None):
            if len(calls) == _MAX_CALLS:
                return self._problem(where, f"is one of more than {_MAX_CALLS} tool calls")
            call = StreamedCall(len(calls), len(calls) if index is None else index, legacy)
            calls.append(call)
        if arguments and (call.whole or (whole and call.pieces)):
            self._problem(f"{where}.function.arguments", "go on after a whole object, or with one")
            arguments, whole = "", False
        call.add(call_id, name, arguments)
        call.whole |= whole
        for key, value in piece.items():
            if value and key not in ("index", "id", "function"):
                call.fields[key] = merged(call.fields.get(key), value) if key == "custom" else value
        return {"index": call.number, "function": {"arguments": arguments}}


def _is_json_object(text: str) -> bool:
    try:
        return is_object(from_json(text))
    except ValueError:
        return False


_USUAL_TEXTS = frozenset(("role", "content", "refusal", *REASONING))
_LISTS_AND_LOGPROBS: tuple[tuple[str, type], ...] = (*((name, list) for name in _LISTS), ("logprobs", dict))


def _index_if_usual(chunk: Any) -> int | None:
    """Return the index of the choice of a chunk that is in OpenAI's form already and holds nothing but text and tokens;
    None for any other chunk. Nearly all chunks are such, and each token has one.
    """
    if not is_object(chunk) or chunk.get("usage") is not None or "prompt_token_ids" in chunk:
        return None
    choices: Any = chunk.get("choices")
    if not is_list(choices) or len(choices) != 1 or not is_object(choice := choices[0]) or "text" in choice:
        return None
    delta, index, reason = choice.get("delta"), choice.get("index"), choice.get("finish_reason")
    if not is_object(delta) or type(index) is not int or not (reason is None or isinstance(reason, str)):
        return None
    for name, text in delta.items():
        if name not in _USUAL_TEXTS or not (text is None or isinstance(text, str)):
            return None
    for name, kind in _LISTS_AND_LOGPROBS:
        if name in choice and not (choice[name] is None or isinstance(choice[name], kind)):
            return None
    return index


_REPLACED = frozenset(("role", "id", "type", "index", "name", "format", "status"))
"""Fields of a delta that are sent whole."""


def merged(so_far: Any, more: Any) -> Any:
    """Return the value of a field that no translation reads after one more delta: texts and lists are continued,
    objects field by field, and other values are replaced.
    """
    if isinstance(so_far, str) and isinstance(more, str):
        return so_far + more
    if is_list(so_far) and is_list(more):
        return [*so_far, *more]
    if is_object(so_far) and is_object(more):
        found = dict(so_far)
        merge_fields(found, more)
        return found
    return so_far if more is None else more


def merge_fields(fields: Json, more: Json) -> None:
    """Add the fields of one more delta to an object."""
    for name, value in more.items():
        replace = name in _REPLACED and value is not None
        fields[name] = value if replace else merged(fields.get(name), value)
