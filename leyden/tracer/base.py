"""`Tracer`, the base of tracers.

A tracer says where spans come from; traces, their delivery to the store and the current trace are
the same for all of them. To write one: implement `prepare`, and where a step ends call
`current_trace().add(span)` (or keep the trace from the step's start, which is right in every
thread). It does not know runners or agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from leyden.errors import ConfigError
from leyden.instrumentation.route import MODEL_HOSTS
from leyden.options import NamedOptions
from leyden.store.base import LightningStore
from leyden.tracer.context import TraceContext, last_trace
from leyden.tracer.current import active_trace
from leyden.tracer.trace import OpenSpan, StatusCode
from leyden.types import Span, SpanStatus


class Tracer(NamedOptions, ABC):
    """Records what runs inside `trace_context`.

    One tracer serves any number of traces at a time, in any threads and loops.
    """

    model_hosts: Sequence[str] = MODEL_HOSTS
    """The hosts whose requests are model calls; see `leyden.instrumentation.route`."""
    _worker_stores: Mapping[int, LightningStore] = {}
    """The store of each worker that was set up and not torn down, by worker id."""

    @abstractmethod
    def prepare(self) -> None:
        """Make sure that steps are noticed from now on.

        Called by `init` and as each trace opens; cheap when there is nothing to do.
        """

    def while_open(self) -> AbstractContextManager[object]:
        """Return a context that is entered as each trace opens and left as it closes.

        Any number may be open at a time. Override it for changes that must be undone afterwards.
        """
        return nullcontext()

    def init(self) -> None:
        """Prepare the tracer. Called once, before any worker."""
        self.prepare()

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        """Bind the worker's store, the default for traces of attempts.

        Each worker calls this before it works.
        """
        self._worker_stores = {**self._worker_stores, worker_id: store}

    def teardown_worker(self, worker_id: int) -> None:
        """Release the worker's store. Each worker calls this after its work."""
        self._worker_stores = {key: store for key, store in self._worker_stores.items() if key != worker_id}

    def teardown(self) -> None:
        """Release everything. Called once, at the end.

        What was recorded has arrived by then: each trace delivers as it closes.
        """

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> TraceContext:
        """Return a trace around a block: `async with tracer.trace_context(...) as trace:`, or
        `with` in sync code.

        With `rollout_id` and `attempt_id` the spans are recorded for that attempt in `store`, by
        default the store that `init_worker` was given. Leaving the block raises if they could not
        be recorded. Without ids, or without any store, the spans stay in `trace.spans`. Traces may
        be nested: a span belongs to the innermost one. Raise ConfigError for one id without the
        other, for a store without ids, and for ids without `store` where the workers of this tracer
        have different stores.
        """
        if store is None and rollout_id is not None:
            store = self._workers_store()
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

    def _workers_store(self) -> LightningStore | None:
        stores = list({id(store): store for store in self._worker_stores.values()}.values())
        if len(stores) > 1:
            raise ConfigError(
                f"the workers of this tracer have different stores ({', '.join(store.url for store in stores)}); say which one a trace "
                "goes to: trace_context(store=..., rollout_id=..., attempt_id=...)"
            )
        return stores[0] if stores else None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the workers' stores, which belong to this process."""
        return {name: value for name, value in vars(self).items() if name != "_worker_stores"}

    def get_last_trace(self) -> list[Span]:
        """Return the spans of the trace that is open here.

        Outside a trace, return those of the last trace that was opened in this context or task, or
        an empty list.
        """
        return last_trace()

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: SpanStatus | StatusCode | None = None,
    ) -> Span:
        """Record an event, a span that ends when it begins, in the current trace.

        timestamp: Unix seconds; None for now. Raise NoActiveTrace or InvalidEmission.
        """
        return active_trace("create_span").create_span(name, attributes, timestamp=timestamp, status=status)

    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[OpenSpan]:
        """Record a block as one step of the current trace. See Trace.operation.

        Raise NoActiveTrace or InvalidEmission.
        """
        return active_trace("operation_context").operation(name, attributes)


class DummyTracer(Tracer):
    """Records what the agent's code emits, and touches no library and no global state.

    For tests, and for agents whose calls the gateway records anyway.
    """

    def prepare(self) -> None:
        """Do nothing, because there is no library to prepare."""
