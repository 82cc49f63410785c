"""Emit an exception that the agent has dealt with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden import semconv
from leyden.emitter.emit import emit_span, with_user_attributes
from leyden.errors import InvalidEmission
from leyden.tracer import exception_attributes
from leyden.types import Span, SpanStatus
from leyden.utils.text import describe_error


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True
) -> Span:
    """Record an exception's type, message and stack trace, as a span with status ERROR.

    The attempt goes on.
    Raises InvalidEmission for what is no exception, NoActiveTrace outside a trace.
    """
    if not isinstance(exception, BaseException):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are often untyped
        raise InvalidEmission(f"{exception!r:.200} is a {type(exception).__name__}, not an exception")
    own = exception_attributes(exception)
    status = SpanStatus(status_code="ERROR", description=describe_error(exception))
    attributes = with_user_attributes(own, attributes)
    return emit_span("emit_exception", semconv.EXCEPTION, attributes, propagate=propagate, status=status)
