"""`Tracer`, the base of tracers.

A tracer decides where spans come from. Traces, their delivery to the store and the current trace are the same for all
tracers. To write one, implement `prepare`, and call `current_trace().add(span)` where a step ends. If steps end in
other threads, remember the trace at the step's start instead. A tracer does not know runners or agents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from leyden._lib.options import NamedOptions
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.tracing.context import TraceContext, last_trace
from leyden.tracing.current import active_trace
from leyden.tracing.instrumentation.route import MODEL_HOSTS
from leyden.tracing.trace import OpenSpan, StatusCode
from leyden.types import Span, SpanStatus


class Tracer(NamedOptions, ABC):
    """Records what runs inside `trace_context`.

    One tracer serves any number of traces at a time, in any threads and loops.
    """

    model_hosts: Sequence[str] = MODEL_HOSTS
    """The hosts whose requests are model calls, as `host` or `host/path`."""
    _worker_stores: Mapping[int, LightningStore] = {}
    """The store of each worker that was set up and not torn down, by worker id."""

    @abstractmethod
    def prepare(self) -> None:
        """Set up whatever notices steps, such as a listener of a library.

        Called by `init` and as each trace opens, so it must be cheap when there is nothing left to do.
        """

    def while_open(self) -> AbstractContextManager[object]:
        """Return a context to hold while a trace is open, of which there may be many at a time.

        Override it for changes that must be undone afterwards.
        """
        return nullcontext()

    def init(self) -> None:
        """Prepare the tracer. Called once, before any worker."""
        self.prepare()

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        """Bind the store of a worker, the default for traces of attempts, before it works."""
        self._worker_stores = {**self._worker_stores, worker_id: store}

    def teardown_worker(self, worker_id: int) -> None:
        """Release the store of a worker, after its work."""
        self._worker_stores = {key: store for key, store in self._worker_stores.items() if key != worker_id}

    def teardown(self) -> None:
        """Release everything. Called once, at the end, when each trace has delivered its spans."""

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> TraceContext:
        """Return a context manager that opens a trace: `async with tracer.trace_context(...) as trace:`, or `with` in
        sync code.

        With `rollout_id` and `attempt_id` the spans are recorded for that attempt in `store`, by default the workers'.
        Leaving the block raises if they could not be recorded. Without ids or a store, the spans stay in `trace.spans`.
        A span belongs to the innermost of nested traces. Raise ConfigError for one id without the other, for a store
        without ids, and for ids without `store` if the workers have different stores.
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
        """Return the store of all workers; None without one. Raise ConfigError if they have different stores."""
        stores = list({id(each): each for each in self._worker_stores.values()}.values())
        if len(stores) > 1:
            raise ConfigError(
                f"the workers of this tracer have different stores ({', '.join(each.url for each in stores)}); say which one a "
                "trace goes to: trace_context(store=..., rollout_id=..., attempt_id=...)"
            )
        return stores[0] if stores else None

    def __getstate__(self) -> dict[str, Any]:
        # without the workers' stores, which belong to this process
        return {name: value for name, value in vars(self).items() if name != "_worker_stores"}

    def get_last_trace(self) -> list[Span]:
        """Return the spans of the current trace, else of the last one that this context opened, else none."""
        return last_trace()

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: SpanStatus | StatusCode | None = None,
    ) -> Span:
        """Record an event in the current trace: a span that ends when it begins.

        timestamp: Unix seconds; None for now.
        Raise NoActiveTrace outside a trace, and InvalidEmission for an attribute that is neither a string, a number, a
        bool nor a list of one of these.
        """
        return active_trace("create_span").create_span(name, attributes, timestamp=timestamp, status=status)

    def operation_context(
        self, name: str, attributes: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[OpenSpan]:
        """Record a block as one step of the current trace. Spans that are made within the block are below it, and an
        exception is recorded and propagates.

        Raise NoActiveTrace outside a trace, and InvalidEmission for an attribute that is neither a string, a number, a
        bool nor a list of one of these.
        """
        return active_trace("operation_context").operation(name, attributes)


class DummyTracer(Tracer):
    """Records only what the agent's code emits. It changes no library and no global state.

    Use it for tests, and for agents whose model calls the gateway records.
    """

    def prepare(self) -> None:
        pass
