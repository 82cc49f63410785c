"""The current trace: the one that is open in this context, or the one in which this process was started.

A context variable holds it, so hundreds of attempts can run in one process, each in its own tasks and threads.
OpenTelemetry's context holds it as well, because some libraries carry only that context into their thread pools.
"""

from __future__ import annotations

import os

from opentelemetry import context as otel_context

from leyden.errors import NoActiveTrace
from leyden.tracing.remote import process_trace
from leyden.tracing.trace import CURRENT, OTEL_KEY, SPANS_URL, Trace


def current_trace() -> Trace | None:
    """Return the trace that is open in this context, else the one in which this process was started, or None."""
    trace = CURRENT.get()
    if trace is None:
        trace = trace_of(otel_context.get_current())
    if trace is None and SPANS_URL in os.environ:
        trace = process_trace()
    return trace


def trace_of(context: otel_context.Context) -> Trace | None:
    """Return the trace that an OpenTelemetry context was made in, or None."""
    trace = context.get(OTEL_KEY)
    return trace if isinstance(trace, Trace) else None


def active_trace(what: str) -> Trace:
    """Return the current trace. Raise NoActiveTrace if there is none.

    what: the name of the caller, for the message.
    """
    trace = current_trace()
    if trace is None:
        raise NoActiveTrace(
            f"{what} was called where no trace is open. A runner opens one for each attempt; elsewhere, open one with "
            "`with OtelTracer().trace_context():` (or `async with`). In a thread that existed before the trace, run the call in a "
            "copy of the agent's context: contextvars.copy_context().run(...); a process made by a bare os.fork() has no trace, one "
            "made by multiprocessing or subprocess has"
        )
    return trace
