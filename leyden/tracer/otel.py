"""`OtelTracer`: collects every span that OpenTelemetry ends inside a trace, whoever instrumented it.

Instrumentation finds its provider through OpenTelemetry's global one. Where the user has set one, ours only listens to it; where there
is none, ours becomes the global one. Spans outside a trace are ignored. A span belongs to the trace in which it started, wherever it ends.

The sampler, limits and other exporters of the user's own provider stay as they are, so what it does not sample is not collected;
what Leyden's emitters record does not pass through it. A user who sets up OpenTelemetry does so before the first trace.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from opentelemetry import trace as otel_trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Status, StatusCode

from leyden.tracer.base import Tracer
from leyden.tracer.trace import Trace, current_trace, trace_of
from leyden.types import Attributes, Span, SpanEvent, SpanStatus

__all__ = ["OtelTracer", "from_readable_span"]

logger = logging.getLogger(__name__)

_NANOSECONDS = 1e-9


class OtelTracer(Tracer):
    """Collects the spans of any OpenTelemetry instrumentation. It has no state of its own: all of them share one listener."""

    def prepare(self) -> None:
        """Listen to the global provider; set ours where there is none."""
        listen()


class Collector(SpanProcessor):
    """Gives each ended span to the trace in which it started."""

    def __init__(self) -> None:
        # By span id, because OpenTelemetry hands over a copy at the end; weak, because some spans are never ended.
        self._started: weakref.WeakValueDictionary[int, SdkSpan] = weakref.WeakValueDictionary()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        """Note the trace of a span: of the parent context that was given, else of the running code, else of the parent span."""
        trace = None if parent_context is None else trace_of(parent_context)
        if trace is None:
            trace = current_trace() or _trace_of_span(otel_trace.get_current_span(parent_context))
        if trace is not None:
            setattr(span, _MARK, trace)
            self._started[_span_id(span)] = span

    def on_end(self, span: ReadableSpan) -> None:
        """Hand a span of a trace over."""
        started = self._started.pop(_span_id(span), None)
        trace = None if started is None else _trace_of_span(started)
        if trace is not None:
            trace.add(from_readable_span(span, trace.rollout_id, trace.attempt_id))


_MARK = "_leyden_trace"


def _trace_of_span(span: object) -> Trace | None:
    return getattr(span, _MARK, None)


def _span_id(span: ReadableSpan) -> int:
    context = span.context
    assert context is not None
    return context.span_id


class UnseededIds(IdGenerator):
    """Ids that an agent's `random.seed(...)` cannot repeat; spans without a parent share the trace id of their trace."""

    def generate_span_id(self) -> int:
        """64 random bits, not 0."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """The current trace's id; outside a trace 128 random bits, not 0."""
        trace = current_trace()
        return int(trace.trace_id, 16) if trace else secrets.randbits(128) or 1


_lock = threading.Lock()
_heard: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def collector() -> Collector:
    """The one listener of this process."""
    return Collector()


def listen() -> None:
    """Have the global provider tell our collector, once. Safe to repeat; only the first call and a new provider cost anything."""
    with _lock:
        provider: Any = otel_trace.get_tracer_provider()
        if isinstance(provider, otel_trace.ProxyTracerProvider):
            provider = _own_provider()
            otel_trace.set_tracer_provider(provider)
        if provider in _heard:
            return
        _heard.add(provider)
        if hasattr(provider, "add_span_processor"):
            provider.add_span_processor(collector())
        else:
            logger.warning(
                "the global OpenTelemetry provider is a %s, which takes no span processor: spans of instrumentation are not collected, "
                "only what Leyden's emitters and gateway record",
                type(provider).__name__,
            )


def _own_provider() -> TracerProvider:
    # OpenTelemetry's default limit of 128 attributes cuts long conversations.
    unlimited = SpanLimits(
        max_attributes=SpanLimits.UNSET, max_span_attributes=SpanLimits.UNSET, max_events=SpanLimits.UNSET
    )
    return TracerProvider(sampler=ALWAYS_ON, id_generator=UnseededIds(), span_limits=unlimited, shutdown_on_exit=False)


def from_readable_span(span: ReadableSpan, rollout_id: str, attempt_id: str) -> Span:
    """An ended OpenTelemetry span as a span of an attempt, its sequence id left to the store. Links are not kept."""
    context, parent = span.context, span.parent
    assert context is not None
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=0,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=None if parent is None else f"{parent.span_id:016x}",
        name=span.name,
        status=_status(span.status),
        attributes=_attributes(span.attributes),
        events=[_event(event) for event in span.events],
        start_time=_seconds(span.start_time),
        end_time=_seconds(span.end_time),
        resource=_resource(span.resource),
    )


def _status(status: Status) -> SpanStatus:
    if status.status_code is StatusCode.UNSET:
        return SpanStatus()
    return SpanStatus(status_code=status.status_code.name, description=status.description)


_resource_read: tuple[Resource | None, Attributes] = (None, {})


def _resource(resource: Resource) -> Attributes:
    """A process has one resource, or a few: the last one is not read anew for each span."""
    global _resource_read
    last, attributes = _resource_read
    if last is not resource:
        attributes = _attributes(resource.attributes)
        _resource_read = resource, attributes
    return attributes


def _event(event: Event) -> SpanEvent:
    return SpanEvent(name=event.name, timestamp=_seconds(event.timestamp), attributes=_attributes(event.attributes))


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds * _NANOSECONDS


def _attributes(attributes: Mapping[str, Any] | None) -> Attributes:
    if not attributes:
        return {}
    # Reading OpenTelemetry's own mapping takes a lock for each entry; copying it takes none.
    plain = cast(Mapping[str, Any], attributes.copy() if isinstance(attributes, BoundedAttributes) else attributes)
    return {key: value if type(value) in _SCALARS else _listed(value) for key, value in plain.items()}


_SCALARS = frozenset({str, bool, int, float})


def _listed(value: object) -> Any:
    """OpenTelemetry's less common attribute values: tuples (with None for what was invalid), bytes, maps."""
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        elements = list(cast(Iterable[Any], value))
        if all(isinstance(element, bool | int | float) for element in elements):
            return elements
        return ["" if element is None else str(element) for element in elements]
    return str(value)
