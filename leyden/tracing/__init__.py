"""Record what an agent does, in the right attempt: traces, the sources of their spans, and the delivery of spans to the
store.

`Tracer.trace_context` opens a `Trace`, which becomes the current one of its context. `OtelTracer` collects
OpenTelemetry's spans. `AgentOpsTracer` and `WeaveTracer` collect the calls that these libraries trace (both are
optional). `DummyTracer` collects only what the agent's code emits. The package knows the store's protocol and no
runner, agent or model. For a new source of spans see `tracer.py`; for other processes see `carry.py`; for a client or
framework see `instrumentation/`.
"""

from leyden.tracing.agentops import AgentOpsTracer as AgentOpsTracer
from leyden.tracing.context import TraceContext as TraceContext
from leyden.tracing.current import active_trace as active_trace
from leyden.tracing.current import current_trace as current_trace
from leyden.tracing.otel_tracer import LightningSpanProcessor as LightningSpanProcessor
from leyden.tracing.otel_tracer import OtelTracer as OtelTracer
from leyden.tracing.otel_tracer import from_readable_span as from_readable_span
from leyden.tracing.trace import LOCAL as LOCAL
from leyden.tracing.trace import OpenSpan as OpenSpan
from leyden.tracing.trace import Trace as Trace
from leyden.tracing.trace import checked_attributes as checked_attributes
from leyden.tracing.trace import exception_attributes as exception_attributes
from leyden.tracing.tracer import DummyTracer as DummyTracer
from leyden.tracing.tracer import Tracer as Tracer
from leyden.tracing.weave import WeaveTracer as WeaveTracer
