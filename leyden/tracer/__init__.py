"""Record what an agent does, in the right attempt: traces, the sources of their spans, and the
delivery of spans to the store.

`Tracer.trace_context` opens a `Trace`, which becomes the current one of its context. `OtelTracer`
collects OpenTelemetry's spans. `AgentOpsTracer` and `WeaveTracer` collect the calls that these
libraries trace (both are optional). `DummyTracer` collects only what the agent's code emits. The
package knows the store's protocol and no runner, agent or model. For a new source of spans see
`base.py`; for other processes see `carry.py`.
"""

from leyden.tracer.agentops import AgentOpsTracer as AgentOpsTracer
from leyden.tracer.base import DummyTracer as DummyTracer
from leyden.tracer.base import Tracer as Tracer
from leyden.tracer.context import TraceContext as TraceContext
from leyden.tracer.current import active_trace as active_trace
from leyden.tracer.current import current_trace as current_trace
from leyden.tracer.otel import LightningSpanProcessor as LightningSpanProcessor
from leyden.tracer.otel import OtelTracer as OtelTracer
from leyden.tracer.otel import from_readable_span as from_readable_span
from leyden.tracer.trace import LOCAL as LOCAL
from leyden.tracer.trace import OpenSpan as OpenSpan
from leyden.tracer.trace import Trace as Trace
from leyden.tracer.trace import checked_attributes as checked_attributes
from leyden.tracer.trace import exception_attributes as exception_attributes
from leyden.tracer.weave import WeaveTracer as WeaveTracer
