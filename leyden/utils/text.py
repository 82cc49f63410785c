"""Text of things that other people wrote: exceptions and values of agents, which may be huge,
unprintable, or raise when asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from leyden.redaction import redact

_LIMIT = 10_000
"""Characters that are kept of a message: enough for a person, harmless in a database."""


def storable(text: str, *, limit: int = _LIMIT) -> str:
    """Return `text` as any file or database takes it, and as anyone may read it.

    Lone surrogates are written out, passwords in addresses are hidden, and the middle of a very
    long text is left out.
    """
    text = redact(text)
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"


def describe_error(error: BaseException) -> str:
    """Return the error's message, whatever its `__str__` does; empty if it has none."""
    return text_of(str, error)


def shown(value: object, *, limit: int = 200) -> str:
    """Return the `repr` of a value and its type, whatever its `__repr__` does."""
    return f"{text_of(repr, value)[:limit]} (a {type(value).__name__})"


def text_of(function: Callable[[Any], str], value: object) -> str:
    """Return `str` or `repr` of a user's object as storable text, or which error it raised."""
    try:
        return storable(function(value))
    except Exception as error:  # noqa: BLE001 -- a user's own class, which may do anything
        return f"(its __{function.__name__}__ raised {type(error).__name__})"


def as_json(value: Any, *, default: Callable[[Any], Any] = repr) -> str:
    """Return any value as JSON. default: makes a substitute for a part that JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, default=default)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, circles
        return json.dumps(repr(value), ensure_ascii=False)
