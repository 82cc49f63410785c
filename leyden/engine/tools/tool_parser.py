"""`ToolParser`, the protocol of a parser of tool calls, and `Reader`, which applies a parser to a response that arrives
in pieces.

A parser knows the form in which one family of models writes a call. It is a pure function of text: no tokens, no
templates, no requests. `Reader` does the work that all forms share: it finds where a call may begin, holds back text
that may still become a call, and returns all other text as content.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from leyden._lib.json import Json
from leyden.engine.text import begun_length

Schemas = Mapping[str, Json]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, with its arguments by name."""

    name: str
    arguments: Json

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text, for OpenAI's wire format."""
        text = json.dumps(self.arguments, ensure_ascii=False)
        return text if _is_unicode(text) else json.dumps(self.arguments)  # escapes a lone surrogate


@dataclass(frozen=True, slots=True)
class Found:
    """The calls that a parser has found at the beginning of a text."""

    calls: tuple[ToolCall, ...]
    length: int
    """The number of characters that the calls take, the marker included."""


Outcome = Found | Literal["unfinished", "not a call"]
"""The result of reading the text at a marker. "unfinished": later text decides whether it is a call."""


class ToolParser(ABC):
    """A model family's way of writing tool calls in its text."""

    name: ClassVar[str]
    """The parser's name in the registry."""
    markers: ClassVar[tuple[str, ...]]
    """The texts by which a call begins: each call begins with one of them."""
    tokens: ClassVar[tuple[str, ...]]
    """The tokens that the form uses. They stay in the decoded text even if the tokenizer counts them as special."""
    end: ClassVar[str]
    """A text that every complete call contains, at or near its end."""
    call_id_length: ClassVar[int | None] = None
    """The length that the form requires of a call's id; None: any."""
    at_start_only: ClassVar[bool] = False
    """Whether calls are possible only at the beginning of a response."""

    @abstractmethod
    def read(self, text: str, schemas: Schemas, *, final: bool) -> Outcome:
        """Read the calls at the beginning of `text`, which begins with a marker.

        schemas: the JSON schemas of the tools' arguments.
        final: whether no text follows. If not, an outcome other than "unfinished" must be true whatever follows.
        """

    def grammar(
        self, arguments: Mapping[str, str], literal: Callable[[str], str], *, many: bool
    ) -> dict[str, str] | None:
        """Return Lark rules by name for a response that consists only of calls; None if the form has no grammar. The
        first rule is `calls`.

        arguments: the rule of each tool's arguments, by the tool's name.
        literal: returns a text as a literal of the grammar.
        many: whether the response may hold several calls.
        """
        return None


class Reader:
    """Parses a response while it arrives: `feed` returns the content and the calls that later text cannot change.

    Content is the text around the calls, without the white space between content and calls. Text that looks like a call
    and is none is content. The result does not depend on how the response is divided into pieces.
    """

    def __init__(self, parser: ToolParser, schemas: Schemas) -> None:
        self._parser = parser
        self._schemas = schemas
        self._rest = ""
        """Text that may still turn out to be a call or content."""
        self._space = ""
        """White space that belongs to the content only if content follows."""
        self._at_start = True
        """Whether neither content nor a call has been found."""
        self.n_calls = 0

    def feed(self, piece: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """Add a piece of text, and return the content and the calls that are now certain.

        final: whether it is the last piece.
        """
        self._rest += piece
        content, calls = "", list[ToolCall]()
        while (at := self._marker()) is not None:
            outcome = self._parser.read(self._rest[at:], self._schemas, final=final)
            if outcome == "unfinished" and not final:
                content += self._take(at)
                return content, calls
            if isinstance(outcome, Found):
                content += self._take(at)
                self._space, self._rest = "", self._rest[outcome.length :]
                self._at_start = False
                calls += outcome.calls
                self.n_calls += len(outcome.calls)
            else:  # no call begins here: the marker's first character is content, and the search goes on
                content += self._take(at + 1)
        content += self._take(len(self._rest) if final else self._certain_length())
        if final and not self.n_calls:
            content += self._space
        return content, calls

    def _marker(self) -> int | None:
        """Return the index of the next marker in the rest; None if there is none."""
        if self._parser.at_start_only:
            start = len(self._rest) - len(self._rest.lstrip())
            found = self._at_start and self._rest.startswith(self._parser.markers, start)
            return start if found else None
        found = [at for marker in self._parser.markers if (at := self._rest.find(marker)) >= 0]
        return min(found, default=None)

    def _certain_length(self) -> int:
        """Return the length of the rest that is certainly content: without an end that may begin a marker."""
        if self._parser.at_start_only:
            text = self._rest.lstrip()
            may_begin = self._at_start and any(marker.startswith(text) for marker in self._parser.markers)
            return 0 if may_begin else len(self._rest)
        return len(self._rest) - begun_length(self._rest, self._parser.markers)

    def _take(self, length: int) -> str:
        """Remove `length` characters of content from the rest, and return them without white space at their end, which
        is kept until more content follows.
        """
        taken, self._rest = self._rest[:length], self._rest[length:]
        text = taken.rstrip()
        if not text:
            self._space += taken
            return ""
        content = self._space + text
        self._space = taken[len(text) :]
        self._at_start = False
        return content


def parse(text: str, parser: ToolParser, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    """Return the content and the tool calls of a whole response."""
    return Reader(parser, schemas).feed(text, final=True)


def decode_json(text: str, start: int) -> tuple[Any, int] | None:
    """Return the JSON value that begins at `start`, or after white space there, and the index of its end; None if there
    is no complete value.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def call_of(value: Any, *names: str) -> ToolCall | None:
    """Return the call that a JSON value describes; None unless the value is an object with a "name" and, under one of
    `names`, an object of arguments.
    """
    if not isinstance(value, dict):
        return None
    described = cast(Json, value)
    name = described.get("name")
    arguments: Any = next((described[field] for field in names if field in described), None)
    if not isinstance(name, str) or not name or not _is_unicode(name) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, cast(Json, arguments))


def json_calls(arguments: Mapping[str, str], field: str) -> dict[str, str]:
    """Return Lark rules for `call`: a JSON object with the name of a tool and, under `field`, its arguments."""
    rules = {"call": " | ".join(f"call_{index}" for index in range(len(arguments)))}
    for index, (name, rule) in enumerate(arguments.items()):
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "{field}": ')
        rules[f"call_{index}"] = f'{begin} arguments_{index} "}}"'
        rules[f"arguments_{index}"] = rule
    return rules


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
