"""Write and read JSON and server-sent events as bytes, for every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from leyden._lib.json import PIECE_BYTES, Json, check_json_work

DONE = b"[DONE]"
"""The data of the event that ends a stream of chunks."""
_TIMES = 8
"""How many times the work of a request's body an answer may take: 100,000 tokens, each with 20 alternatives, are
4,000,000 objects and lists."""


def dump(value: object) -> bytes:
    """Return a value as compact JSON in UTF-8. NaN and infinity become null, a tuple a list, a date its ISO text."""
    try:
        return to_json(value)
    except PydanticSerializationError:
        # Half of a surrogate pair, which JSON can escape and UTF-8 cannot hold, or deep nesting.
        return json.dumps(value, separators=(",", ":")).encode()


def parse(raw: bytes) -> Any:
    """Parse JSON as `json.loads` does, in half the time. Raise ValueError or RecursionError as it does, and ValueError
    for a text that would take gigabytes of memory.
    """
    if len(raw) > PIECE_BYTES:
        check_json_work(raw, times=_TIMES)
    try:
        return from_json(raw, cache_strings="keys")
    except ValueError:
        # Half of a surrogate pair, another encoding than UTF-8 or deep nesting, which Python's
        # parser accepts; or no JSON at all, for which it raises again.
        return json.loads(raw)


def split_events(buffer: bytearray, *, new_bytes: int | None = None) -> Iterator[tuple[bytes, bytes]]:
    """Remove the complete server-sent events from `buffer`, and yield each as (its bytes, its data).

    The data of several `data:` lines are joined by line feeds; b"" for a comment.
    new_bytes: how many bytes were appended since the last call, so that a long event that arrives in many pieces is
        searched once; None: all of them.
    """
    start = 0 if new_bytes is None else max(0, len(buffer) - new_bytes - 3)  # an end may be cut in two
    while True:
        end, width = buffer.find(b"\n\n", start), 2
        crlf = buffer.find(b"\r\n\r\n", start, end if end >= 0 else len(buffer))
        if crlf >= 0:
            end, width = crlf, 4
        if end < 0:
            return
        event = bytes(buffer[: end + width])
        del buffer[: end + width]
        start = 0
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        yield event, b"\n".join(lines)


def sse_event(data: bytes, *, like: bytes = b"") -> bytes:
    """Return a server-sent event, with the name, id and comments of the event `like`."""
    others = [line + b"\n" for line in like.splitlines() if line and not line.startswith(b"data:")]
    return b"".join(others) + b"data: " + data + b"\n\n"


def named_event(body: Json) -> bytes:
    """Return a server-sent event whose name is the body's `type`, as Anthropic and the Responses API send them."""
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + dump(body) + b"\n\n"
