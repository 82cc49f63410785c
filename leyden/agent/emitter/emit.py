"""Emit messages, objects, exceptions and annotations; `emit_span` makes every emitter's span."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from leyden._lib.text import describe_error
from leyden.errors import InvalidEmission
from leyden.tracing import LOCAL, Trace, active_trace, exception_attributes
from leyden.types import AttributeValue, Span, SpanEvent, SpanStatus, semconv


def emit_span(
    what: str,
    name: str,
    attributes: Mapping[str, Any],
    *,
    propagate: bool,
    status: SpanStatus | None = None,
    events: Sequence[SpanEvent] = (),
) -> Span:
    """Record one span in the current trace and return it.

    what: the function that the user called, for the message of NoActiveTrace.
    propagate: False makes the span without recording it, and needs no trace.
    """
    trace = active_trace(what) if propagate else Trace(LOCAL, LOCAL, LOCAL, None)
    return trace.create_span(name, attributes, status=status, events=events)


def with_user_attributes(own: Mapping[str, Any], users: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an emitter's own attributes together with the user's. Raise InvalidEmission if they share a name."""
    taken = sorted(own.keys() & (users or {}).keys())
    if taken:
        raise InvalidEmission(f"the attributes {taken} say what is emitted and cannot be given; choose other names")
    return {**(users or {}), **own}


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> Span:
    """Record a text in the attempt, and return the span that holds it.

    propagate: False makes the span without recording it, and needs no trace.
    Raise InvalidEmission for a value that is no string, for which `emit_object` is. Raise NoActiveTrace outside a
    trace.
    """
    if not isinstance(message, str):
        raise InvalidEmission(
            f"a message is a string, not a {type(message).__name__}; use emit_object for other values"
        )
    own = {semconv.MESSAGE_BODY: message}
    return emit_span("emit_message", semconv.MESSAGE, with_user_attributes(own, attributes), propagate=propagate)


def get_message_value(span: Span) -> str | None:
    """Return the text that `emit_message` recorded in this span, or None."""
    value = span.attributes.get(semconv.MESSAGE_BODY)
    return value if isinstance(value, str) else None


def emit_object(value: Any, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> Span:
    """Record a JSON value in the attempt, and return the span that holds it.

    value: None, bool, int, float, str, or a list or dict of these; keys of dicts are strings.
    propagate: False makes the span without recording it, and needs no trace.
    Raise InvalidEmission, which names the first part that is not JSON, for any other value. Raise NoActiveTrace outside
    a trace.
    """
    kind = type(cast(object, value))
    kind_name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    own: dict[str, AttributeValue] = {semconv.OBJECT_TYPE: kind_name}
    if isinstance(value, str | bool | int):
        own[semconv.OBJECT_LITERAL] = value
    else:
        try:
            own[semconv.OBJECT_JSON] = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidEmission(
                f"{kind_name} {value!r:.200} is not JSON: {error}. Emit the parts that you need, as a dict, a list or a string"
            ) from error
    return emit_span("emit_object", semconv.OBJECT, with_user_attributes(own, attributes), propagate=propagate)


def get_object_value(span: Span) -> Any:
    """Return the value that `emit_object` recorded in this span; None for any other span."""
    literal = span.attributes.get(semconv.OBJECT_LITERAL)
    if literal is not None:
        return literal
    text = span.attributes.get(semconv.OBJECT_JSON)
    return json.loads(text) if isinstance(text, str) else None


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True
) -> Span:
    """Record an exception's type, message and stack trace, and return the span, whose status is ERROR.

    The attempt goes on; the exception is not raised.
    propagate: False makes the span without recording it, and needs no trace.
    Raise InvalidEmission for a value that is no exception, and NoActiveTrace outside a trace.
    """
    if not isinstance(exception, BaseException):
        raise InvalidEmission(f"{exception!r:.200} is a {type(exception).__name__}, not an exception")
    own = exception_attributes(exception)
    status = SpanStatus(status_code="ERROR", description=describe_error(exception))
    attributes = with_user_attributes(own, attributes)
    return emit_span("emit_exception", semconv.EXCEPTION, attributes, propagate=propagate, status=status)


def emit_annotation(annotation: Mapping[str, Any], *, propagate: bool = True) -> Span:
    """Record the entries of `annotation` as attributes of one span, and return the span.

    annotation: values by name. Nested dicts become dotted keys: `{"a": {"b": 1}}` is `a.b = 1`. A number is also a
        metric of the run, `annotation/a.b`: its mean over rollouts.
    propagate: False makes the span without recording it, and needs no trace.
    Raise InvalidEmission for an empty annotation, for two entries with the same dotted key, for a number that is not
    finite, and for a value that has no attribute form. Raise NoActiveTrace outside a trace.
    """
    attributes: dict[str, Any] = {}
    for key, value in _flat("", annotation):
        if key in attributes:
            raise InvalidEmission(f"the annotation has {key!r} twice, once as a dotted key and once as a nested one")
        attributes[key] = value
    if not attributes:
        raise InvalidEmission(f"the annotation {annotation!r} is empty; it needs at least one key with a value")
    return emit_span("emit_annotation", semconv.ANNOTATION, attributes, propagate=propagate)


def _flat(prefix: str, mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(f"{key}.", cast(Mapping[str, Any], value))
        else:
            yield key, value
