"""`Tracer`: open a trace, make spans in it, read it back."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any

from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.tracer.carry import carrying_threads
from leyden.tracer.context import LOCAL, AttemptTrace, current_trace, last_trace
from leyden.tracer.delivery import delivery_for
from leyden.types import Attributes, Span, SpanStatus
from leyden.utils import ids

__all__ = ["DummyTracer", "TraceContext", "Tracer"]


class Tracer(ABC):
    """Records spans. One tracer serves any number of traces at a time."""

    def init(self) -> None:
        """Once, before any worker. Safe to repeat."""

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        """In each worker, before it works."""

    def teardown_worker(self, worker_id: int) -> None:
        """In each worker, after it has worked."""

    def teardown(self) -> None:
        """Once, at the end. Safe to repeat."""

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> TraceContext:
        """A context, for `async with` or `with`, whose spans belong to the attempt and are in the store when it ends.

        store, rollout_id and attempt_id go together; without them the spans stay in memory. Leaving the context raises what kept a span
        from the store. Raises ConfigError for some of the three.
        """
        given = [store is not None, rollout_id is not None, attempt_id is not None]
        if any(given) and not all(given):
            raise ConfigError(
                "trace_context needs store, rollout_id and attempt_id together, or none of them; "
                f"got store={store!r}, rollout_id={rollout_id!r}, attempt_id={attempt_id!r}"
            )
        return TraceContext(self, AttemptTrace(self, name, rollout_id or LOCAL, attempt_id or LOCAL), store)

    def get_last_trace(self) -> list[Span]:
        """The spans of the current trace, or of the one that ended last in this context; empty when there was none."""
        trace = current_trace.get() or last_trace.get()
        return list(trace.spans) if trace else []

    @contextlib.contextmanager
    def open(self, trace: AttemptTrace) -> Generator[None]:
        """Whatever the tracer needs around a trace."""
        yield

    @abstractmethod
    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: SpanStatus | None = None,
    ) -> None:
        """Record a span that begins and ends at `timestamp` (Unix seconds; None: now). Outside a trace it is recorded nowhere."""

    @contextlib.contextmanager
    @abstractmethod
    def operation_context(self, name: str, attributes: Attributes | None = None) -> Generator[Attributes]:
        """A span around a piece of work. Yields a dict: what is put there becomes attributes. An exception becomes its status."""


class TraceContext:
    """Makes a trace the current one, and delivers it at the end."""

    def __init__(self, tracer: Tracer, trace: AttemptTrace, store: LightningStore | None) -> None:
        self._tracer, self._trace, self._store = tracer, trace, store
        self._stack = contextlib.ExitStack()
        self._token: contextvars.Token[AttemptTrace | None] | None = None

    def _enter(self) -> AttemptTrace:
        self._token = current_trace.set(self._trace)
        self._stack.enter_context(carrying_threads())
        self._stack.enter_context(self._tracer.open(self._trace))
        return self._trace

    def _leave(self) -> None:
        self._stack.close()
        if self._token is not None:
            current_trace.reset(self._token)
        last_trace.set(self._trace)

    async def __aenter__(self) -> AttemptTrace:
        if self._store is not None:
            self._trace.delivery = delivery_for(self._store)
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        if self._trace.delivery is not None:
            await self._trace.delivery.finish(self._trace)

    def __enter__(self) -> AttemptTrace:
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        spans = self._trace.take_undelivered()
        if self._store is not None and spans:
            _run_elsewhere(self._store.add_many_spans(spans))


def _run_elsewhere(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine to its end from synchronous code, on a loop of its own in a thread of its own."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="leyden-deliver", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class DummyTracer(Tracer):
    """Records only what is emitted by hand, without OpenTelemetry: for tests, and for agents that are not instrumented."""

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: SpanStatus | None = None,
    ) -> None:
        """See Tracer.create_span."""
        moment = time.time() if timestamp is None else timestamp
        self._record(name, dict(attributes or {}), moment, moment, status or SpanStatus())

    @contextlib.contextmanager
    def operation_context(self, name: str, attributes: Attributes | None = None) -> Generator[Attributes]:
        """See Tracer.operation_context."""
        recorded: Attributes = dict(attributes or {})
        start, status = time.time(), SpanStatus()
        try:
            yield recorded
        except BaseException as error:
            status = SpanStatus(status_code="ERROR", description=f"{type(error).__name__}: {error}")
            raise
        finally:
            self._record(name, recorded, start, time.time(), status)

    def _record(self, name: str, attributes: Attributes, start: float, end: float, status: SpanStatus) -> None:
        trace = current_trace.get()
        if trace is not None:
            trace.add(
                Span(
                    rollout_id=trace.rollout_id,
                    attempt_id=trace.attempt_id,
                    sequence_id=0,
                    trace_id=ids.trace_id(),
                    span_id=ids.span_id(),
                    name=name,
                    attributes=attributes,
                    start_time=start,
                    end_time=end,
                    status=status,
                )
            )
