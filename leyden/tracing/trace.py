"""`Trace`: the record of one attempt while it is made.

Spans of Leyden's emitters are made here, without OpenTelemetry's SDK, so that no sampler, limit or switch of the user's
can lose a reward. A trace knows its attempt, its outbox, and the environment variables that other processes need to
record in it. It does not know which tracer opened it, how it is carried into another process, or how its address is
served; `context.py` passes functions for that.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, Protocol, cast
from urllib.parse import quote

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from leyden._lib import ids
from leyden._lib.numbers import as_number, finite_number
from leyden._lib.text import describe_error, inner_errors, storable
from leyden.errors import InvalidEmission, NoActiveTrace
from leyden.tracing.delivery import SpanOutbox
from leyden.tracing.instrumentation.route import CallRoute, traceparent
from leyden.types import Attributes, Span, SpanEvent, SpanStatus, get_reward_value, semconv

logger = logging.getLogger(__name__)

LOCAL: Final = "local"
"""The rollout and attempt id of spans of a trace that belongs to no attempt."""

SPANS_URL: Final = "LEYDEN_SPANS_URL"
"""The environment variable with the address to which a process sends its attempt's spans."""
SPANS: Final = "/spans"
"""The path at that address that takes spans as JSON."""

StatusCode = Literal["UNSET", "OK", "ERROR"]

CURRENT: ContextVar[Trace | None] = ContextVar("leyden_current_trace", default=None)
OTEL_KEY: Final = otel_context.create_key("leyden-trace")


class OpenSpan:
    """A step under way, made by `Trace.operation`. Its attributes are recorded when it ends."""

    def __init__(self, name: str, attributes: Attributes) -> None:
        self.name = name
        self.attributes = attributes
        self.status = SpanStatus()

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes. Raise InvalidEmission for a value that has no attribute form."""
        self.attributes.update(checked_attributes(attributes))

    def fail(self, error: BaseException) -> None:
        """Record that the step failed, and why."""
        self.attributes.update(exception_attributes(error))
        description = storable("".join(traceback.format_exception_only(error)).strip())
        self.status = SpanStatus(status_code="ERROR", description=description)


class Address(Protocol):
    """The address to which other processes send the spans of one trace."""

    url: str

    def close(self) -> None:
        """Refuse further spans."""
        ...


class CarriedTrace(Protocol):
    """A trace in a form that travels to another process, where work is then recorded in it."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function in the trace, in the process that received this object."""
        ...


class Trace:
    """The spans of one attempt, in the order in which they ended. Safe in any thread."""

    def __init__(
        self,
        name: str,
        rollout_id: str,
        attempt_id: str,
        outbox: SpanOutbox | None,
        *,
        url: str | None = None,
        open_address: Callable[[Trace], Address] | None = None,
        pack: Callable[[Trace], CarriedTrace] | None = None,
    ) -> None:
        """
        outbox: delivers the spans; None: they stay in `spans`.
        url: where other processes send spans of this trace; None: to a new address.
        open_address: opens that address when the first process needs it.
        pack: makes the form that is sent to another process. A trace without it is not carried.
        """
        self.name = name
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = ids.trace_id()
        """The OpenTelemetry trace id of the spans that have no parent elsewhere."""
        self.parent_id: str | None = None
        """The id of the other process's step that is the parent of this trace's outermost spans."""
        self.spans: list[Span] = []
        """The spans that have ended so far.

        `sequence_id` is 0 until the store has assigned one; a local trace counts by itself."""
        self.outbox = outbox
        self.route = CallRoute(rollout_id, attempt_id)
        """The address and key for model calls of code that does not know Leyden."""
        self.prepare: Callable[[], None] = _nothing  # by name, because it may be pickled
        """A function that makes another process record its steps.

        One that cannot be pickled is left out."""
        self._root_id = self.trace_id[:16]
        """The id that stands for the trace in a `traceparent` header, which must name a step, while none is under way.
        No span has this id."""
        self._url, self._open_address, self._pack = url, open_address, pack
        self._address: Address | None = None
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Keep a finished span, and queue it for delivery. Safe in any thread. A span that is added after the trace was
        closed is still delivered.
        """
        if span.parent_id == self._root_id:
            span.parent_id = None
        self.spans.append(span)
        if self.outbox is None:
            span.sequence_id = len(self.spans)
            return
        if logger.isEnabledFor(logging.DEBUG):
            milliseconds = 1000 * ((span.end_time or 0.0) - (span.start_time or 0.0))
            outcome = span.status.status_code if (reward := get_reward_value(span)) is None else f"reward {reward:g}"
            logger.debug("rollout %s: span %s, %.0f ms, %s", span.rollout_id, span.name, milliseconds, outcome)
        self.outbox.put(span)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        timestamp: float | None = None,
        status: SpanStatus | StatusCode | None = None,
        events: Sequence[SpanEvent] = (),
    ) -> Span:
        """Record an event (a span that ends when it begins) below the step that is under way here.

        timestamp: Unix seconds; None: now.

        Raise InvalidEmission for an attribute that is neither a string, a number, a bool nor a list of one of these.
        """
        moment = time.time() if timestamp is None else timestamp
        checked = checked_attributes(attributes or {})
        if isinstance(status, str):
            status = SpanStatus(status_code=status)
        span = self._span(name, checked, status or SpanStatus(), moment, moment, ids.span_id(), self._parent())
        span.events = [event.model_copy(update={"timestamp": event.timestamp or moment}) for event in events]
        self.add(span)
        return span

    @contextmanager
    def operation(self, name: str, attributes: Mapping[str, Any] | None = None) -> Generator[OpenSpan]:
        """Record the block as one step. Spans that are made within the block, also by OpenTelemetry, are below it.

        An exception is recorded and propagates. Raise InvalidEmission for an attribute that is neither a string, a
        number, a bool nor a list of one of these.
        """
        step = OpenSpan(name, checked_attributes(attributes or {}))
        span_id, start, parent = ids.span_id(), time.time(), self._parent()
        trace_id = parent[0]
        handle = otel_trace.NonRecordingSpan(
            otel_trace.SpanContext(
                int(trace_id, 16), int(span_id, 16), False, otel_trace.TraceFlags(otel_trace.TraceFlags.SAMPLED)
            )
        )
        token = otel_context.attach(otel_trace.set_span_in_context(handle))
        try:
            yield step
        except BaseException as error:
            step.fail(error)
            raise
        finally:
            otel_context.detach(token)
            self.add(self._span(step.name, step.attributes, step.status, start, time.time(), span_id, parent))

    def environment(self) -> dict[str, str]:
        """Return the variables with which a child process records in this trace and calls the gateway."""
        attempt = {semconv.ROLLOUT_ID: self.rollout_id, semconv.ATTEMPT_ID: self.attempt_id}
        others = os.environ.get("OTEL_RESOURCE_ATTRIBUTES")
        listed = [
            *([others] if others else []),
            *(f"{name}={quote(value, safe='')}" for name, value in attempt.items()),
        ]
        address = self.address()
        return {
            **self.route.environment(),
            "LEYDEN_ROLLOUT_ID": self.rollout_id,
            "LEYDEN_ATTEMPT_ID": self.attempt_id,
            SPANS_URL: address,
            "TRACEPARENT": traceparent() or f"00-{self.trace_id}-{self._root_id}-01",
            "BAGGAGE": self.route.baggage(),
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_RESOURCE_ATTRIBUTES": ",".join(listed),
        }

    def close_address(self) -> None:
        """Refuse further spans of other processes."""
        with self._lock:
            if self._address is not None:
                self._address.close()
                self._address = None

    def address(self) -> str:
        """Return the URL that takes spans of other processes, as OTLP or in Leyden's form, until the trace is closed.
        Raise NoActiveTrace for a trace that no `TraceContext` opened.
        """
        with self._lock:
            if self._url is not None:
                return self._url
            if self._address is None:
                if self._open_address is None:
                    raise NoActiveTrace(
                        f"the trace {self.name!r} takes no spans of other processes; open it with trace_context"
                    )
                self._address = self._open_address(self)
            return self._address.url

    def packed(self) -> CarriedTrace:
        """Return the trace as a picklable object. Raise NoActiveTrace unless a `TraceContext` opened it."""
        if self._pack is None:
            raise NoActiveTrace(f"the trace {self.name!r} cannot be carried; open it with trace_context")
        return self._pack(self)

    def _parent(self) -> tuple[str, str | None]:
        """Return the trace id and span id of the step under way; outside any step this trace's own."""
        context = otel_trace.get_current_span().get_span_context()
        if not context.is_valid:
            return self.trace_id, self.parent_id
        return f"{context.trace_id:032x}", f"{context.span_id:016x}"

    def _span(
        self,
        name: str,
        attributes: Attributes,
        status: SpanStatus,
        start: float,
        end: float,
        span_id: str,
        parent: tuple[str, str | None],
    ) -> Span:
        """Make a span below `parent`: its trace id, and the span id of the parent or None."""
        return Span(
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            sequence_id=0,
            trace_id=parent[0],
            span_id=span_id,
            parent_id=parent[1],
            name=name,
            status=status,
            attributes=attributes,
            start_time=start,
            end_time=end,
        )


def _nothing() -> None:
    """Do nothing, for tracers that need no preparation."""


def checked_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """Return a copy of the attributes in which tuples are lists. Raise InvalidEmission, naming the key, for a value
    that is neither a string, a finite number, a bool nor a list of one of these.
    """
    return {key: _checked_value(key, value) for key, value in attributes.items()}


def exception_attributes(error: BaseException) -> Attributes:
    """Return OpenTelemetry's attributes of an exception. A group of one error has that one's type and message."""
    inner = inner_errors(error)
    named = inner[0] if len(inner) == 1 else error
    kind = type(named)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        semconv.EXCEPTION_TYPE: f"{prefix}{kind.__qualname__}",
        semconv.EXCEPTION_MESSAGE: describe_error(named),
        semconv.EXCEPTION_STACKTRACE: storable("".join(traceback.format_exception(error))),
    }


def _checked_value(key: object, value: object) -> Any:
    """Return an attribute's value as the store keeps it. Raise InvalidEmission for a wrong key or value."""
    if not isinstance(key, str) or not key:
        raise InvalidEmission(f"the attribute key {key!r} is not a string with at least one character")
    elements = cast(Sequence[Any], value) if isinstance(value, list | tuple) else None
    if any(
        isinstance(number, float) and not math.isfinite(number)
        for number in cast("Sequence[object]", elements or (value,))
    ):
        raise InvalidEmission(f"attribute {key!r} is {value!r:.200}, a number that JSON does not have; leave it out")
    if isinstance(value, str) or type(cast(object, value)) in (bool, int, float):
        return cast(Any, value)
    if elements is not None:
        for kind in (str, bool, int, float):
            if all(isinstance(element, kind) for element in elements):
                return list(elements)
        if all(isinstance(element, int | float) and not isinstance(element, bool) for element in elements):
            return [float(element) for element in elements]
    try:
        if elements is not None:  # of numbers of other libraries, perhaps
            return [finite_number(element) for element in elements]
        number = as_number(cast(object, value))
        finite_number(number)
        return number
    except ValueError as error:
        raise InvalidEmission(
            f"attribute {key!r} {error}; possible: str, bool, int, float, or a list of one of these. "
            "Record anything else with emit_object"
        ) from error
