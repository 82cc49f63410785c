"""Emit a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden import semconv
from leyden.emitter.emit import emit_span, with_user_attributes
from leyden.errors import InvalidEmission
from leyden.types import Span


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> Span:
    """Record `message`.

    Raises InvalidEmission for anything but a string (see emit_object), NoActiveTrace outside a
    trace.
    """
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are often untyped
        raise InvalidEmission(
            f"a message is a string, not a {type(message).__name__}; use emit_object for other values"
        )
    own = {semconv.MESSAGE_BODY: message}
    return emit_span("emit_message", semconv.MESSAGE, with_user_attributes(own, attributes), propagate=propagate)


def get_message_value(span: Span) -> str | None:
    """Return the text that `emit_message` recorded in this span, or None."""
    value = span.attributes.get(semconv.MESSAGE_BODY)
    return value if isinstance(value, str) else None
