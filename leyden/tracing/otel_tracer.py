"""`OtelTracer`: collects every span that OpenTelemetry ends inside a trace, from any library.

Instrumentation makes its spans with OpenTelemetry's global provider. If the user has set one, Leyden only listens to
it; otherwise Leyden sets one. Spans outside a trace are ignored. A span belongs to the trace in which it started,
wherever it ends.

While a trace is open, the installed clients of `leyden.tracing.instrumentation` are instrumented: a model call of an
agent that knows nothing of Leyden carries the trace context, and goes to the attempt's gateway if there is one.

The sampler, limits and other exporters of the user's own provider stay as they are, so spans that it does not sample
are not collected. What Leyden's emitters record does not pass through it. A user who sets up OpenTelemetry must do so
before the first trace.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from opentelemetry import trace as otel_trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import StatusCode

from leyden._lib.otel import attribute_value, links_text, seconds
from leyden.store.base import LightningStore
from leyden.tracing.current import current_trace, trace_of
from leyden.tracing.instrumentation import MODEL_HOSTS, in_use, instrument
from leyden.tracing.trace import Trace
from leyden.tracing.tracer import Tracer
from leyden.types import Attributes, Span, SpanEvent, SpanStatus, semconv

logger = logging.getLogger(__name__)


class OtelTracer(Tracer):
    """Collects the spans of any OpenTelemetry instrumentation. All tracers of a process share one listener.

    instrumentation: which of `leyden.tracing.instrumentation.names()` to install while a trace is open; None: HTTP
        clients, and every library that is imported by the time the trace opens (none is imported only to be
        instrumented).
    model_hosts: the services that are models, as `host` or `host/path`. They replace MODEL_HOSTS.
    Raise ConfigError for an unknown instrumentation.
    """

    def __init__(
        self, *, instrumentation: Sequence[str] | None = None, model_hosts: Sequence[str] = MODEL_HOSTS
    ) -> None:
        self._instrumentation = None if instrumentation is None else tuple(instrumentation)
        instrument(*(self._instrumentation or ()))  # raises ConfigError for an unknown name
        self.model_hosts = tuple(model_hosts)

    def prepare(self) -> None:
        listen()

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        super().init_worker(worker_id, store)
        with self.while_open():  # imports what instrumentation needs, so that the first rollout does not wait for it
            pass

    def while_open(self) -> AbstractContextManager[object]:
        return instrument(*(in_use() if self._instrumentation is None else self._instrumentation))


class LightningSpanProcessor(SpanProcessor):
    """Adds each ended span to the trace in which it started, which delivers it in batches, off the agent's thread.

    Leaving a trace waits until the spans that have ended in it are delivered. A span that ends later is delivered to
    the same attempt afterwards.
    """

    def __init__(self) -> None:
        # By span id, because `on_end` gets a copy of the span. Weak, because some spans are never ended.
        self._started: weakref.WeakValueDictionary[int, SdkSpan] = weakref.WeakValueDictionary()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        """Remember the span's trace: the parent context's, else the running code's, else the parent span's."""
        trace = None if parent_context is None else trace_of(parent_context)
        if trace is None:
            trace = current_trace() or _trace_of_span(otel_trace.get_current_span(parent_context))
        if trace is not None:
            setattr(span, _MARK, trace)
            self._started[_span_id(span)] = span

    def on_end(self, span: ReadableSpan) -> None:
        started = self._started.pop(_span_id(span), None)
        trace = None if started is None else _trace_of_span(started)
        if trace is not None:
            trace.add(from_readable_span(span, trace.rollout_id, trace.attempt_id))


_MARK = "_leyden_trace"
"""The attribute of an OpenTelemetry span that holds its trace."""


def _trace_of_span(span: object) -> Trace | None:
    return getattr(span, _MARK, None)


def _span_id(span: ReadableSpan) -> int:
    context = span.context
    assert context is not None
    return context.span_id


class UnseededIds(IdGenerator):
    """Makes ids that an agent's `random.seed(...)` cannot repeat. A root span gets the trace id of its trace."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return the current trace's id, or 128 random bits outside a trace."""
        trace = current_trace()
        return int(trace.trace_id, 16) if trace else secrets.randbits(128) or 1


_lock = threading.Lock()
_heard: weakref.WeakSet[Any] = weakref.WeakSet()
"""The providers that the collector listens to."""


@functools.cache
def collector() -> LightningSpanProcessor:
    """Return the one span processor of this process."""
    return LightningSpanProcessor()


def listen() -> None:
    """Register the collector with the global provider, and set one if there is none. Safe to repeat: only the first
    call and a new provider cost anything.
    """
    with _lock:
        provider: Any = otel_trace.get_tracer_provider()
        if isinstance(provider, otel_trace.ProxyTracerProvider):
            # OpenTelemetry's default limit of 128 attributes cuts long conversations.
            none = SpanLimits.UNSET
            limits = SpanLimits(max_attributes=none, max_span_attributes=none, max_events=none)
            provider = TracerProvider(
                sampler=ALWAYS_ON, id_generator=UnseededIds(), span_limits=limits, shutdown_on_exit=False
            )
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


def from_readable_span(span: ReadableSpan, rollout_id: str, attempt_id: str) -> Span:
    """Return an ended OpenTelemetry span as a span of an attempt. Its sequence id is 0 until the store assigns one.

    A span that is received over OTLP has the same form.
    """
    context, parent, status = span.context, span.parent, span.status
    assert context is not None
    attributes = _attributes(span.attributes)
    if span.links:
        attributes[semconv.LINKS] = links_text(
            (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}", _attributes(link.attributes))
            for link in span.links
        )
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=0,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=None if parent is None else f"{parent.span_id:016x}",
        name=span.name,
        kind=span.kind.name,
        status=SpanStatus()
        if status.status_code is StatusCode.UNSET
        else SpanStatus(status_code=status.status_code.name, description=status.description or None),
        attributes=attributes,
        events=[
            SpanEvent(name=each.name, timestamp=seconds(each.timestamp), attributes=_attributes(each.attributes))
            for each in span.events
        ],
        start_time=seconds(span.start_time),
        end_time=seconds(span.end_time),
        resource=_resource(span.resource),
    )


_resource_read: tuple[Resource | None, Attributes] = (None, {})
"""The last resource and its attributes."""


def _resource(resource: Resource) -> Attributes:
    """Return a resource's attributes. The last result is cached, because a process has one resource or a few."""
    global _resource_read
    last, attributes = _resource_read
    if last is not resource:
        attributes = _attributes(resource.attributes)
        _resource_read = resource, attributes
    return attributes


def _attributes(attributes: Mapping[str, Any] | None) -> Attributes:
    if not attributes:
        return {}
    # Reading OpenTelemetry's own mapping takes a lock for each entry; copying it takes none.
    plain = cast(Mapping[str, Any], attributes.copy() if isinstance(attributes, BoundedAttributes) else attributes)
    return {key: value if type(value) in _PLAIN else attribute_value(value) for key, value in plain.items()}


_PLAIN = frozenset({str, bool, int})
"""Types of attributes that need no conversion."""
