"""`OtelTracer`: what any OpenTelemetry instrumentation records inside a trace is recorded in its attempt.

The tracer adds one span processor to the process's provider: the user's own when one is set, else a provider of ours, set as the global
one. A span belongs to the trace in which it started, wherever it ends; spans started outside any trace are none of our business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.trace import SpanContext, Status, StatusCode

from leyden.tracer.base import Tracer
from leyden.tracer.context import AttemptTrace, current_trace
from leyden.types import Attributes, Span, SpanEvent, SpanStatus

__all__ = ["OtelTracer", "span_from_otel"]

_NANOSECONDS = 1e9


class OtelTracer(Tracer):
    """Records every OpenTelemetry span that starts inside a trace."""

    def __init__(self) -> None:
        self._otel: otel.Tracer | None = None

    def init(self) -> None:
        """Make sure that the process's provider tells us of its spans."""
        self._tracer()

    def _tracer(self) -> otel.Tracer:
        if self._otel is None:
            self._otel = _listening_provider().get_tracer("leyden")
        return self._otel

    @contextlib.contextmanager
    def open(self, trace: AttemptTrace) -> Generator[None]:
        """A fresh OpenTelemetry context, so that no span of an attempt has a parent outside of it."""
        self._tracer()
        token = otel_context.attach(otel.set_span_in_context(otel.INVALID_SPAN))
        try:
            yield
        finally:
            otel_context.detach(token)

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: SpanStatus | None = None,
    ) -> None:
        """See Tracer.create_span."""
        moment = None if timestamp is None else int(timestamp * _NANOSECONDS)
        span = self._tracer().start_span(name, attributes=attributes, start_time=moment)
        if status is not None:
            span.set_status(Status(StatusCode[status.status_code], status.description))
        span.end(end_time=moment)

    @contextlib.contextmanager
    def operation_context(self, name: str, attributes: Attributes | None = None) -> Generator[Attributes]:
        """See Tracer.operation_context. Spans that start inside are children of it."""
        recorded: Attributes = dict(attributes or {})
        with self._tracer().start_as_current_span(name) as span:
            try:
                yield recorded
            finally:
                span.set_attributes(recorded)


def _listening_provider() -> TracerProvider:
    provider = otel.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        otel.set_tracer_provider(provider)
    if not getattr(provider, "_leyden_listens", False):
        provider.add_span_processor(_AttemptProcessor())
        provider._leyden_listens = True  # pyright: ignore[reportAttributeAccessIssue] -- a mark, so that it is done once
    return provider


class _AttemptProcessor(SpanProcessor):
    """Remembers the trace in which a span starts, and gives it the span when it ends."""

    def __init__(self) -> None:
        self._started_in: dict[tuple[int, int], AttemptTrace] = {}

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        trace = current_trace.get()
        if trace is not None:
            self._started_in[_key(span.get_span_context())] = trace

    def on_end(self, span: ReadableSpan) -> None:
        trace = self._started_in.pop(_key(span.get_span_context()), None)
        if trace is not None:
            trace.add(span_from_otel(span, trace.rollout_id, trace.attempt_id))


def _key(context: SpanContext | None) -> tuple[int, int]:
    return (context.trace_id, context.span_id) if context else (0, 0)


def span_from_otel(span: ReadableSpan, rollout_id: str, attempt_id: str) -> Span:
    """An ended OpenTelemetry span as a span of an attempt; the store draws its sequence id."""
    context = span.get_span_context()
    return Span.model_construct(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=0,
        trace_id=f"{context.trace_id:032x}" if context else "0" * 32,
        span_id=f"{context.span_id:016x}" if context else "0" * 16,
        parent_id=f"{span.parent.span_id:016x}" if span.parent and span.parent.is_valid else None,
        name=span.name,
        status=SpanStatus.model_construct(
            status_code=span.status.status_code.name, description=span.status.description
        ),
        attributes=_plain(span.attributes),
        events=[
            SpanEvent(name=event.name, timestamp=event.timestamp / _NANOSECONDS, attributes=_plain(event.attributes))
            for event in span.events
        ],
        start_time=None if span.start_time is None else span.start_time / _NANOSECONDS,
        end_time=None if span.end_time is None else span.end_time / _NANOSECONDS,
        resource={},
        tokens=None,
    )


def _plain(attributes: Mapping[str, Any] | None) -> Attributes:
    return {
        key: list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType] -- OTel's values are untyped
        for key, value in (attributes or {}).items()
    }
