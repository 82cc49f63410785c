"""Record the spans of what runs inside a context, each in its own attempt.

Lives here: `Tracer`, `OtelTracer` (OpenTelemetry, the default), `DummyTracer` (only what is emitted by hand), and the context itself, a
contextvar: hundreds of async rollouts run in one process, and none sees another's. It knows spans and the store's protocol; it does not
know agents. To add a tracer, subclass `Tracer` and implement `create_span`, and `open`/`close` where it has something to install.
"""

from leyden.tracer.base import DummyTracer, Tracer
from leyden.tracer.context import AttemptTrace, current_trace
from leyden.tracer.otel import OtelTracer

__all__ = ["AttemptTrace", "DummyTracer", "OtelTracer", "Tracer", "current_trace"]
