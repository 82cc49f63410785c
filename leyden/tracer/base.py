"""What a tracer is.

A tracer says where spans come from; traces, their delivery to the store and the current trace are the same for all of them. To write
one: implement `prepare`, and where a step ends call `current_trace().add(span)` (or keep the trace from the step's start, which is
right in every thread). It does not know runners or agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from leyden.instrumentation.route import MODEL_HOSTS
from leyden.store.base import LightningStore
from leyden.tracer.context import TraceContext, last_trace
from leyden.tracer.trace import OpenSpan, StatusCode, active_trace
from leyden.types import Span, SpanStatus

__all__ = ["Tracer"]


class Tracer(ABC):
    """Records what runs inside `trace_context`. One tracer serves any number of traces at a time, in any threads and loops."""

    model_hosts: Sequence[str] = MODEL_HOSTS
    """Which services are models; see `leyden.instrumentation.route`."""

    @abstractmethod
    def prepare(self) -> None:
        """Make sure that steps are noticed from now on. Called by `init` and as each trace opens; cheap when there is nothing to do."""

    def while_open(self) -> AbstractContextManager[object]:
        """Entered as each trace opens and left as it closes, any number at a time: for what must be undone afterwards."""
        return nullcontext()

    def init(self) -> None:
        """Once, before any worker."""
        self.prepare()

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        """In each worker, before it works. Each trace names its own store; a tracer that records elsewhere too sets that up here."""

    def teardown_worker(self, worker_id: int) -> None:
        """In each worker, after it has worked."""

    def teardown(self) -> None:
        """Once, at the end. What was recorded has arrived by then: each trace delivers as it closes."""

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> TraceContext:
        """A trace around a block: `async with tracer.trace_context(...) as trace:`, or `with` where nothing can be awaited.

        With `store`, `rollout_id` and `attempt_id` the spans are recorded for that attempt, and leaving the block raises if they could
        not be. Without a store they stay in `trace.spans`. Traces may be nested: a span belongs to the innermost one.
        Raises ConfigError for one id without the other, and for a store without ids.
        """
        context = TraceContext(
            name,
            store,
            rollout_id,
            attempt_id,
            prepare=self.prepare,
            around=self.while_open,
            model_hosts=self.model_hosts,
        )
        self.prepare()
        return context

    def get_last_trace(self) -> list[Span]:
        """The spans of the trace that is open here; outside, of the last one that was opened in this context (or task); else none."""
        return last_trace()

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: SpanStatus | StatusCode | None = None,
    ) -> Span:
        """Record a step of no length in the current trace. See Trace.create_span. Raises NoActiveTrace, InvalidEmission."""
        return active_trace("create_span").create_span(name, attributes, timestamp=timestamp, status=status)

    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[OpenSpan]:
        """Record a block as one step of the current trace. See Trace.operation. Raises NoActiveTrace, InvalidEmission."""
        return active_trace("operation_context").operation(name, attributes)
