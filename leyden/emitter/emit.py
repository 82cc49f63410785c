"""The one way from an emitter to a span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.errors import InvalidEmission
from leyden.tracer import LOCAL, Trace, active_trace
from leyden.types import Span, SpanEvent, SpanStatus


def emit_span(
    what: str,
    name: str,
    attributes: Mapping[str, Any],
    *,
    propagate: bool,
    status: SpanStatus | None = None,
    events: Sequence[SpanEvent] = (),
) -> Span:
    """Record one span in the current trace; with `propagate` false, only make it.

    what: the function the user called, for the message of NoActiveTrace.
    """
    trace = active_trace(what) if propagate else Trace(LOCAL, LOCAL, LOCAL, None)
    return trace.create_span(name, attributes, status=status, events=events)


def with_user_attributes(own: Mapping[str, Any], users: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return own and user's attributes together. Raise InvalidEmission if they share a name."""
    taken = sorted(own.keys() & (users or {}).keys())
    if taken:
        raise InvalidEmission(f"the attributes {taken} say what is emitted and cannot be given; choose other names")
    return {**(users or {}), **own}
