"""Emit a JSON value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from leyden import semconv
from leyden.emitter.emit import emit_span, with_user_attributes
from leyden.errors import InvalidEmission
from leyden.types import AttributeValue, Span


def emit_object(value: Any, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> Span:
    """Record a value that JSON can say: None, bool, int, float, str, and lists and dicts (with
    string keys) of these.

    Raises InvalidEmission for any other value, naming what was found in it, NoActiveTrace outside a
    trace.
    """
    own = {semconv.OBJECT_TYPE: _type_name(value), **_content(value)}
    return emit_span("emit_object", semconv.OBJECT, with_user_attributes(own, attributes), propagate=propagate)


def get_object_value(span: Span) -> Any:
    """Return the value that `emit_object` recorded in this span; None if it recorded
    none, or None.
    """
    literal = span.attributes.get(semconv.OBJECT_LITERAL)
    if literal is not None:
        return literal
    text = span.attributes.get(semconv.OBJECT_JSON)
    return json.loads(text) if isinstance(text, str) else None


def _content(value: object) -> dict[str, AttributeValue]:
    if isinstance(value, str | bool | int):
        return {semconv.OBJECT_LITERAL: value}
    try:
        return {semconv.OBJECT_JSON: json.dumps(value, ensure_ascii=False, allow_nan=False)}
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEmission(
            f"{_type_name(value)} {value!r:.200} is not JSON: {error}. Emit what of it matters as a dict, a list or a string"
        ) from error


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
