"""`Trace`: the record of one attempt while it is made, and which trace is the current one.

The current trace is a context variable, so hundreds of attempts run in one process, each in its own tasks and threads. It is kept in
OpenTelemetry's context as well, which code that carries that context by hand (into a thread pool of its own) brings along.

What Leyden's emitters record is made here, without OpenTelemetry's SDK: no sampler, limit or switch of the user's can lose a reward.
A trace knows its attempt and its way to the store; it does not know which tracer opened it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, cast

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from leyden import semconv
from leyden.errors import InvalidEmission, NoActiveTrace
from leyden.tracer.delivery import Outbox
from leyden.types import Attributes, Span, SpanStatus
from leyden.utils import ids
from leyden.utils.text import describe_error, storable

__all__ = ["LOCAL", "OpenSpan", "Trace", "active_trace", "checked_attributes", "current_trace", "exception_attributes"]

LOCAL: Final = "local"
"""The rollout and attempt id of spans of a trace that belongs to no attempt."""

StatusCode = Literal["UNSET", "OK", "ERROR"]

CURRENT: ContextVar[Trace | None] = ContextVar("leyden_current_trace", default=None)
OTEL_KEY: Final = otel_context.create_key("leyden-trace")


class OpenSpan:
    """A step under way (`Trace.operation`): what is set here is recorded when it ends."""

    def __init__(self, name: str, attributes: Attributes) -> None:
        self.name = name
        self.attributes = attributes
        self.status = SpanStatus()

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes. Raises InvalidEmission for a value that has no attribute form."""
        self.attributes.update(checked_attributes(attributes))

    def fail(self, error: BaseException) -> None:
        """Record that the step failed, and why."""
        self.attributes.update(exception_attributes(error))
        self.status = SpanStatus(status_code="ERROR", description=_one_line(error))


class Trace:
    """The spans of one attempt, in the order in which they ended."""

    def __init__(self, name: str, rollout_id: str, attempt_id: str, outbox: Outbox | None) -> None:
        self.name = name
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = ids.trace_id()
        """The OpenTelemetry trace id of the spans that have no parent elsewhere."""
        self.spans: list[Span] = []
        """What has ended so far. `sequence_id` is 0 until the store has drawn one; a local trace counts by itself."""
        self.outbox = outbox

    def add(self, span: Span) -> None:
        """Keep a finished span and have it delivered. From any thread; a span after the trace was closed still arrives."""
        self.spans.append(span)
        if self.outbox is None:
            span.sequence_id = len(self.spans)
        else:
            self.outbox.put(span)

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        timestamp: float | None = None,
        status: SpanStatus | StatusCode | None = None,
    ) -> Span:
        """Record a step of no length at `timestamp` (Unix seconds; None: now), below the step that is under way here.

        Raises InvalidEmission for an attribute that is neither a string, a number, a bool nor a list of one of these.
        """
        moment = time.time() if timestamp is None else timestamp
        checked = checked_attributes(attributes or {})
        if isinstance(status, str):
            status = SpanStatus(status_code=status)
        span = self._span(name, checked, status or SpanStatus(), moment, moment, ids.span_id(), self._parent())
        self.add(span)
        return span

    @contextmanager
    def operation(self, name: str, attributes: Mapping[str, Any] | None = None) -> Generator[OpenSpan]:
        """Record the block as one step, with all that is recorded within it, by OpenTelemetry too, below it.

        An exception is recorded and goes on. Raises InvalidEmission as `create_span` does.
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

    def _parent(self) -> tuple[str, str | None]:
        """The trace id and span id of the step under way here; this trace's own id and None where there is none."""
        context = otel_trace.get_current_span().get_span_context()
        if not context.is_valid:
            return self.trace_id, None
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


def current_trace() -> Trace | None:
    """The trace that is open here, None where there is none."""
    trace = CURRENT.get()
    if trace is None:
        trace = trace_of(otel_context.get_current())
    return trace


def trace_of(context: otel_context.Context) -> Trace | None:
    """The trace that an OpenTelemetry context was made in, None where there was none."""
    trace = context.get(OTEL_KEY)
    return trace if isinstance(trace, Trace) else None


def active_trace(what: str) -> Trace:
    """The trace that is open here. Raises NoActiveTrace, which says that `what` needs one and how to open it."""
    trace = current_trace()
    if trace is None:
        raise NoActiveTrace(
            f"{what} was called where no trace is open. A runner opens one for each attempt; elsewhere, open one with "
            "`with OtelTracer().trace_context():` (or `async with`). In a thread that existed before the trace, run the call in a "
            "copy of the agent's context: contextvars.copy_context().run(...)"
        )
    return trace


def checked_attributes(attributes: Mapping[str, Any]) -> Attributes:
    """A copy with lists for tuples. Raises InvalidEmission, naming the key, for a value that has no attribute form."""
    return {_checked_key(key): _checked_value(key, value) for key, value in attributes.items()}


def exception_attributes(error: BaseException) -> Attributes:
    """What OpenTelemetry says of an exception: type, message, stack trace."""
    kind = type(error)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        semconv.EXCEPTION_TYPE: f"{prefix}{kind.__qualname__}",
        semconv.EXCEPTION_MESSAGE: describe_error(error),
        semconv.EXCEPTION_STACKTRACE: storable("".join(traceback.format_exception(error))),
    }


def _one_line(error: BaseException) -> str:
    return storable("".join(traceback.format_exception_only(error)).strip())


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise InvalidEmission(f"the attribute key {key!r} is not a string with at least one character")
    return key


def _checked_value(key: str, value: object) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        elements = cast(Sequence[Any], value)
        for kind in (str, bool, int, float):
            if all(isinstance(element, kind) for element in elements):
                return list(elements)
        if all(isinstance(element, int | float) and not isinstance(element, bool) for element in elements):
            return [float(element) for element in elements]
    kind = type(cast(object, value)).__name__
    raise InvalidEmission(
        f"attribute {key!r} is {value!r:.200}, a {kind}; possible: str, bool, int, float, or a list of one of these. "
        "Record anything else with emit_object"
    )
