"""`OtelTracer`: collects every span that OpenTelemetry ends inside a trace, from any library.

Instrumentation finds its provider through OpenTelemetry's global one. Where the user has set one,
ours only listens to it; where there is none, ours becomes the global one. Spans outside a trace are
ignored. A span belongs to the trace in which it started, wherever it ends.

While a trace is open the clients of `leyden.instrumentation` are instrumented, those that are
installed: a model call of an agent that knows nothing of Leyden brings the trace context along, and
goes to the gateway where the attempt has one.

The sampler, limits and other exporters of the user's own provider stay as they are, so what it does
not sample is not collected; what Leyden's emitters record does not pass through it. A user who sets
up OpenTelemetry does so before the first trace.
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
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Status, StatusCode

from leyden import semconv
from leyden.instrumentation import MODEL_HOSTS, in_use, instrument
from leyden.store.base import LightningStore
from leyden.tracer.base import Tracer
from leyden.tracer.current import current_trace, trace_of
from leyden.tracer.trace import Trace
from leyden.types import Attributes, Span, SpanEvent, SpanStatus
from leyden.utils.otel import attribute_value, links_text, seconds

logger = logging.getLogger(__name__)


class OtelTracer(Tracer):
    """Collects the spans of any OpenTelemetry instrumentation.

    All tracers of a process share one listener.

    instrumentation: which of `leyden.instrumentation.names()` to install while a trace is open;
        None: HTTP clients, and every library that is imported by the time the trace opens (none is
        imported only to be instrumented).
    model_hosts: which services are models, as `host` or `host/path`; in place of MODEL_HOSTS.
    Raise ConfigError for an unknown instrumentation.
    """

    def __init__(
        self, *, instrumentation: Sequence[str] | None = None, model_hosts: Sequence[str] = MODEL_HOSTS
    ) -> None:
        self._instrumentation = None if instrumentation is None else tuple(instrumentation)
        instrument(*(self._instrumentation or ()))
        self.model_hosts = tuple(model_hosts)

    def prepare(self) -> None:
        """Listen to the global tracer provider. Set Leyden's if there is none."""
        listen()

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        """Bind the worker's store, and import what instrumentation needs before the first rollout
        waits for it.
        """
        super().init_worker(worker_id, store)
        with self.while_open():
            pass

    def while_open(self) -> AbstractContextManager[object]:
        """See Tracer.while_open."""
        return instrument(*(in_use() if self._instrumentation is None else self._instrumentation))


class LightningSpanProcessor(SpanProcessor):
    """Gives each ended span to the trace in which it started, which delivers it in batches, off the
    agent's thread.

    Leaving a trace waits for what has ended in it. A span that ends later goes to the same attempt
    by itself.
    """

    def __init__(self) -> None:
        # By span id, because OpenTelemetry hands over a copy at the end; weak, because some spans
        # are never ended.
        self._started: weakref.WeakValueDictionary[int, SdkSpan] = weakref.WeakValueDictionary()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        """Note the trace of a span: of the parent context that was given, else of the running code,
        else of the parent span.
        """
        trace = None if parent_context is None else trace_of(parent_context)
        if trace is None:
            trace = current_trace() or _trace_of_span(otel_trace.get_current_span(parent_context))
        if trace is not None:
            setattr(span, _MARK, trace)
            self._started[_span_id(span)] = span

    def on_end(self, span: ReadableSpan) -> None:
        """Record the span in the trace that it belongs to, if any."""
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
    """Ids that an agent's `random.seed(...)` cannot repeat; spans without a parent share the trace
    id of their trace.
    """

    def generate_span_id(self) -> int:
        """Return 64 random bits, not all 0."""
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return the current trace's id, or 128 random bits outside a trace."""
        trace = current_trace()
        return int(trace.trace_id, 16) if trace else secrets.randbits(128) or 1


_lock = threading.Lock()
_heard: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def collector() -> LightningSpanProcessor:
    """Return the one span processor of this process."""
    return LightningSpanProcessor()


def listen() -> None:
    """Have the global provider tell our collector, once.

    Safe to repeat; only the first call and a new provider cost anything.
    """
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
    """Return an ended OpenTelemetry span as a span of an attempt.

    The store assigns its sequence id. A span received over OTLP has the same form.
    """
    context, parent = span.context, span.parent
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
        status=_status(span.status),
        attributes=attributes,
        events=[_event(event) for event in span.events],
        start_time=seconds(span.start_time),
        end_time=seconds(span.end_time),
        resource=_resource(span.resource),
    )


def _status(status: Status) -> SpanStatus:
    if status.status_code is StatusCode.UNSET:
        return SpanStatus()
    return SpanStatus(status_code=status.status_code.name, description=status.description or None)


_resource_read: tuple[Resource | None, Attributes] = (None, {})


def _resource(resource: Resource) -> Attributes:
    """Return a resource's attributes, cached for the last resource, since a process has one or a
    few.
    """
    global _resource_read
    last, attributes = _resource_read
    if last is not resource:
        attributes = _attributes(resource.attributes)
        _resource_read = resource, attributes
    return attributes


def _event(event: Event) -> SpanEvent:
    return SpanEvent(name=event.name, timestamp=seconds(event.timestamp), attributes=_attributes(event.attributes))


def _attributes(attributes: Mapping[str, Any] | None) -> Attributes:
    if not attributes:
        return {}
    # Reading OpenTelemetry's own mapping takes a lock for each entry; copying it takes none.
    plain = cast(Mapping[str, Any], attributes.copy() if isinstance(attributes, BoundedAttributes) else attributes)
    return {key: value if type(value) in _PLAIN else attribute_value(value) for key, value in plain.items()}


_PLAIN = frozenset({str, bool, int})
