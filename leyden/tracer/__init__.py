"""Record what an agent does, in the right attempt: traces, where their spans come from, and their
way to the store.

`Tracer.trace_context` opens a `Trace`, which is a context variable; `OtelTracer` collects
OpenTelemetry's spans, `AgentOpsTracer` and `WeaveTracer` what these make of an agent's calls (both
are optional), `DummyTracer` only what the agent's code emits. It knows the store's protocol and no
runner, agent or model. For a new source of spans see `base.py`; for other processes `carry.py`.
"""

from leyden.tracer.agentops import AgentOpsTracer
from leyden.tracer.base import DummyTracer, Tracer
from leyden.tracer.context import TraceContext
from leyden.tracer.current import active_trace, current_trace
from leyden.tracer.otel import LightningSpanProcessor, OtelTracer, from_readable_span
from leyden.tracer.trace import (
    LOCAL,
    OpenSpan,
    Trace,
    checked_attributes,
    exception_attributes,
)
from leyden.tracer.weave import WeaveTracer

__all__ = [
    "LOCAL",
    "AgentOpsTracer",
    "DummyTracer",
    "LightningSpanProcessor",
    "OpenSpan",
    "OtelTracer",
    "Trace",
    "TraceContext",
    "Tracer",
    "WeaveTracer",
    "active_trace",
    "checked_attributes",
    "current_trace",
    "exception_attributes",
    "from_readable_span",
]
