"""Text of things that other people wrote: exceptions and values of agents, which may be huge,
unprintable, or raise when asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from leyden.redaction import redact

_LIMIT = 10_000
"""Characters that are kept of a message: enough for a person, harmless in a database."""


def storable(text: str, *, limit: int = _LIMIT) -> str:
    """Return `text` in a form that any file or database accepts and that anyone may read.

    Lone surrogates are written as escapes, secrets are hidden (`leyden.redaction`), and the middle
    of a text longer than `limit` is left out.
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


def fault_reason(fault: Mapping[str, object]) -> str:
    """Return why pydantic refused a value, in Leyden's words: `must be a valid integer`.

    fault: one entry of `ValidationError.errors()`.
    """
    if fault["type"] == "missing":
        return "missing"
    message = str(fault["msg"]).removeprefix("Value error, ").partition(", unable to parse")[0]
    return message.replace("Invalid JSON: ", "not valid JSON: ").replace("Input should ", "must ")


def as_json(value: Any, *, default: Callable[[Any], Any] = repr) -> str:
    """Return any value as JSON. default: makes a substitute for a part that JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, default=default)
    except (TypeError, ValueError, RecursionError):  # a key that is no string, or a reference cycle
        return json.dumps(repr(value), ensure_ascii=False)
