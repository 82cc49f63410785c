"""Types of parsed JSON, checks that narrow a value to them, lines of JSON, and the work that a JSON text takes."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate, count
from operator import sub
from typing import Any, Final, TypeAlias

from typing_extensions import TypeIs

Json: TypeAlias = dict[str, Any]
"""A parsed JSON object."""

MAX_JSON_PARTS: Final = 500_000
"""The most objects and lists in one JSON text. Each takes two bytes to send and some 500 bytes of memory parsed."""
MAX_JSON_VALUES: Final = 4_000_000
"""The most values in one JSON text: numbers, words, objects and lists count once, strings and keys twice. It is that
many token ids, which take 0.2 s to parse.
"""
MAX_JSON_DEPTH: Final = 200
"""The most objects and lists within each other, which is as deep as pydantic reads."""
PIECE_BYTES: Final = 2**16
"""The size of the pieces in which a text is measured, so that other threads have their turn."""

_ENCODING_BYTES: Final = 4
"""The bytes that show the encoding of a JSON text."""
_STRUCTURE: Final = b'",[]{}'
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(_STRUCTURE))
_STRING: Final = re.compile(rb'"[^"]*+"?')
_STEPS: Final = bytes.maketrans(b"[{]}", b"\2\2\0\0")


def is_object(value: object) -> TypeIs[Json]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeIs[list[Any]]:
    return isinstance(value, list)


def object_or_empty(value: object) -> Json:
    return value if is_object(value) else {}


def unique_object(pairs: list[tuple[str, Any]]) -> Json:
    """Return a parsed object. Raise ValueError for a name that it has twice, of which parsers keep the last in silence.
    Give it to `json.loads` as `object_pairs_hook`.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the name {next(name for name in names if names.count(name) > 1)!r} stands twice in one object"
        )
    return made


def json_line(content: Json) -> str:
    """Return an object as a line of JSON: NaN and infinity become null, objects that JSON lacks their `str`."""
    return json.dumps(_finite(content), allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_object(value):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if is_list(value) else value


class TooMuchJson(ValueError):
    """A JSON text takes more work to parse than the limits allow; the message names the limit."""


class JsonMeter:
    """Counts the work of parsing a JSON text before it is parsed, at some 300 MB/s and in little memory.

    What strings hold does not count, so an image in base64 is little work. A text that is not UTF-8, whose strings
    cannot be told from structure by bytes, is counted as if it had no strings.
    """

    def __init__(self, *, times: int = 1) -> None:
        """times: multiplies the limits, except that of the depth."""
        self._max_parts, self._max_values = times * MAX_JSON_PARTS, times * MAX_JSON_VALUES
        self._is_utf8: bool | None = None
        self._rest = b""
        """What precedes the next piece: a backslash, or a text too short to show its encoding."""
        self._in_string = False
        self.parts = self.values = 0
        self._depth = 0

    def add(self, piece: bytes) -> None:
        """Count the next piece of the text. Raise TooMuchJson beyond a limit."""
        for start in range(0, len(piece), PIECE_BYTES):
            part = self._rest + piece[start : start + PIECE_BYTES]
            if self._is_utf8 is None:
                if len(part) < _ENCODING_BYTES:
                    self._rest = part
                    continue
                self._is_utf8, self._rest = json.detect_encoding(part).startswith("utf-8"), b""
            part = self._without_strings(part) if self._is_utf8 else part.translate(None, _NO_STRUCTURE)
            opened = part.count(b"[") + part.count(b"{")
            self.parts += opened
            self.values += opened + part.count(b",")
            if self.parts > self._max_parts:
                raise TooMuchJson(f"it has more than {self._max_parts:,} objects and lists")
            if self.values > self._max_values:
                raise TooMuchJson(
                    f"it has more than {self._max_values:,} values, of which strings and keys count twice"
                )
            if self._depth + opened > MAX_JSON_DEPTH:
                depths = map(sub, accumulate(part.translate(_STEPS, b'",')), count(1))
                if self._depth + max(depths) > MAX_JSON_DEPTH:
                    raise TooMuchJson(f"it nests objects and lists more than {MAX_JSON_DEPTH} deep")
            self._depth += opened - part.count(b"]") - part.count(b"}")

    def _without_strings(self, piece: bytes) -> bytes:
        """Return the commas and brackets of a piece that stand outside of strings."""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._rest = piece[-1:] if piece.endswith(b"\\") else b""
        else:
            self._rest = b""
        piece = piece.translate(None, _NO_STRUCTURE)
        if self._in_string:
            piece = b'"' + piece
        quotes = piece.count(b'"')
        self._in_string = quotes % 2 == 1
        self.values += quotes // 2
        return _STRING.sub(b"", piece) if quotes else piece


def check_json_work(text: bytes, *, times: int = 1) -> None:
    """Raise TooMuchJson for a JSON text that takes more work to parse than the limits allow.

    times: multiplies the limits, except that of the depth.
    """
    # Two counts of a small text take 3 microseconds, and it cannot have too many of anything else.
    if len(text) > PIECE_BYTES or text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH:
        JsonMeter(times=times).add(text)
