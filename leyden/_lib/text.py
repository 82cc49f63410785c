"""Text of things that other people wrote: exceptions and values, perhaps huge, unprintable, or raising when asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from leyden.errors import redact

_LIMIT = 10_000
"""Characters that are kept of a message: enough for a person, harmless in a database."""
_MAX_INNER = 5
"""The most errors of an exception group that a message names."""
_MAX_CAUSES = 20
"""The most causes of an error that are searched for a group."""
_MAX_DEPTH = 3
"""The most groups within each other, or behind each other's errors, that are described. They may form a cycle."""


def storable(text: str, *, limit: int = _LIMIT) -> str:
    """Return `text` in a form that any file or database accepts and that anyone may read.

    Lone surrogates are written as escapes, secrets are hidden (`leyden.errors`), and the middle of a text longer than
    `limit` is left out.
    """
    text = redact(text)
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"


def describe_error(error: BaseException) -> str:
    """Return the error's message, whatever its `__str__` does; empty if it has none.

    An exception group is described by the errors in it, because its own message only counts them. So is an error that a
    group has caused, after its own message.
    """
    return _described(error, depth=0)


def error_line(error: BaseException) -> str:
    """Return the error's type and message, such as "ConnectionError: refused". Equal failures have equal lines, also if
    an exception group holds them.
    """
    return _line(error, depth=0)


def inner_errors(error: BaseException) -> list[BaseException]:
    """Return the errors in an exception group and in the groups in it, or the error itself if it is no group. A
    cancellation is left out if there is another error, which it follows from.
    """
    waiting, found = [error], list[BaseException]()
    while waiting:
        one = waiting.pop()
        if (group := _as_group(one)) is None:
            found.append(one)
        else:
            waiting += group.exceptions[::-1]
    from asyncio import CancelledError  # not above: `leyden --help` does without asyncio

    return [inner for inner in found if not isinstance(inner, CancelledError)] or found


def _described(error: BaseException, *, depth: int) -> str:
    group = _as_group(error) or _group_behind(error)
    if group is None or depth == _MAX_DEPTH:
        return text_of(str, error)
    # Each line once, in an order that does not depend on which error came first.
    lines = sorted({_line(inner, depth=depth + 1) for inner in inner_errors(group)})
    more = f"; and {len(lines) - _MAX_INNER} more" if len(lines) > _MAX_INNER else ""
    inner = storable("; ".join(lines[:_MAX_INNER]) + more)
    if group is error:
        return inner
    text, counted = text_of(str, error), text_of(str, group)
    return text.replace(counted, inner) if counted in text else f"{text} ({inner})".lstrip()


def _line(error: BaseException, *, depth: int) -> str:
    text = _described(error, depth=depth)
    if _as_group(error) is not None and depth < _MAX_DEPTH:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _group_behind(error: BaseException) -> BaseExceptionGroup[BaseException] | None:
    """Return the first exception group among the causes of an error. A group that the error only followed, without
    `from`, counts if the error repeats its message.
    """
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            break
        if cause.__cause__ is None and (followed := _as_group(cause.__context__)) is not None:
            return followed if text_of(str, followed) in text_of(str, error) else None
        cause = cause.__cause__
        if (group := _as_group(cause)) is not None:
            return group
    return None


def _as_group(error: BaseException | None) -> BaseExceptionGroup[BaseException] | None:
    return cast("BaseExceptionGroup[BaseException]", error) if isinstance(error, BaseExceptionGroup) else None


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
    """Return any value as JSON, with the `default` of a part that JSON cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False, default=default)
    except (TypeError, ValueError, RecursionError):  # a key that is no string, or a reference cycle
        return json.dumps(repr(value), ensure_ascii=False)
