"""Tracers with Agent Lightning's additions: an active tracer, `lifespan`, recording contexts.

A trace of these tracers also has the methods of an OpenTelemetry tracer, so that `async with tracer.trace_context() as
t: t.start_as_current_span(...)` records a step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace as otel_trace

from leyden import tracing as native
from leyden._lib.extras import how_to_install
from leyden._lib.logs import notice
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.tracing import LOCAL, OpenSpan, Trace, TraceContext, current_trace
from leyden.types import SpanStatus
from leyden_compat.agentlightning.interfaces import ParallelWorkerBase, users_store
from leyden_compat.agentlightning.otel import format_exception_attributes
from leyden_compat.agentlightning.own_store import as_native
from leyden_compat.agentlightning.types import Span, SpanCoreFields, StatusCode, TraceStatus, old_status

logger = logging.getLogger("leyden.compat.agentlightning.tracer")

STORE_WRITE_TIMEOUT_SECONDS = 10.0


class RecordingContext:
    """Records attributes and errors of a step under way."""

    def __init__(self, span: OpenSpan, start_time: float | None = None) -> None:
        self._span = span
        self.name, self.attributes = span.name, span.attributes
        self.start_time = time.time() if start_time is None else start_time
        self.end_time: float | None = None
        span.status = TraceStatus("OK")

    @property
    def status(self) -> SpanStatus:
        """The status of the step so far."""
        return self._span.status

    def record_exception(self, exception: BaseException) -> None:
        """Record the exception, and set the status of the step to ERROR."""
        self.record_attributes(format_exception_attributes(exception))
        self.record_status("ERROR", str(exception))

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes."""
        self._span.set(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status of the step."""
        self._span.status = TraceStatus(status_code, description)

    def finalize(self, end_time: float | None = None) -> None:
        """End the step now, or at the time given."""
        self.end_time = time.time() if end_time is None else end_time

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the recorded span. Raise ValueError while the step is under way."""
        if self.end_time is None:
            raise ValueError(f"the step {self.name!r} has not ended yet")
        return SpanCoreFields(
            name=self.name,
            status=old_status(self.status),
            attributes=dict(self.attributes),
            start_time=self.start_time,
            end_time=self.end_time,
        )


class _OldTraceContext(TraceContext):
    """A trace context whose `as` variable is also an OpenTelemetry tracer."""

    def __enter__(self) -> Trace:
        return _as_otel_tracer(super().__enter__())

    async def __aenter__(self) -> Trace:
        return _as_otel_tracer(await super().__aenter__())


class _SessionContext(_OldTraceContext):
    """A trace context whose steps are all below one step, which AgentOps calls the session."""

    def _open(self, loop: asyncio.AbstractEventLoop | None) -> Trace:
        trace = super()._open(loop)
        self._session = trace.operation(f"{trace.name}.session", {"agentops.span.kind": "session"})
        self._session.__enter__()
        return trace

    def _close(self) -> Trace:
        self._session.__exit__(None, None, None)
        return super()._close()


def _as_otel_tracer(trace: Trace) -> Trace:
    tracer = otel_trace.get_tracer("agentlightning")
    for method in ("start_span", "start_as_current_span"):
        setattr(trace, method, getattr(tracer, method))
    return trace


class Tracer(native.Tracer, ParallelWorkerBase):
    """The base of tracers. Override `prepare`, or `trace_context` as a whole."""

    _context_class: type[_OldTraceContext] = _OldTraceContext
    _status_of_events: StatusCode = "OK"
    """The status of a span without duration, if none is given."""
    worker_id: int | None = None
    _store: Any = None
    """The worker's store, as a tracer of the program's own finds it."""

    def prepare(self) -> None:
        """Do nothing, because there is no library to prepare."""

    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        """Bind the worker's store, if there is one."""
        self.worker_id, self._store = worker_id, users_store(store)
        if store is not None:
            super().init_worker(worker_id, as_native(store))

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Release the worker's store."""
        self._store = None
        super().teardown_worker(worker_id)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all but the worker's store, which belongs to this process."""
        return {name: value for name, value in super().__getstate__().items() if name != "_store"}

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Release everything."""
        super().teardown()

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> TraceContext:
        """Return a context manager that opens a trace. Its `as` variable is the trace, which also has the methods of an
        OpenTelemetry tracer.

        store: the store that receives the spans; None: that of the worker, if there is a rollout id.
        """
        if store is None and rollout_id is not None:
            store = self._workers_store()
        self.prepare()
        return self._context_class(
            name,
            as_native(store),
            rollout_id,
            attempt_id,
            prepare=self.prepare,
            around=self.while_open,
            model_hosts=self.model_hosts,
        )

    def get_last_trace(self) -> list[Any]:
        """Return the spans of the open or last trace, under Agent Lightning's names."""
        return [Span.of(span) for span in super().get_last_trace()]

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: SpanStatus | StatusCode | None = None,
    ) -> Any:
        """Record a span without duration in the open trace, if there is one, and return its fields."""
        done = TraceStatus(self._status_of_events) if status is None else status
        span = Span.of(self._here().create_span(name, attributes, timestamp=timestamp, status=done))
        return SpanCoreFields(**{name: getattr(span, name) for name in SpanCoreFields.model_fields})

    def _here(self) -> Trace:
        """Return the open trace; without one, a trace that goes nowhere."""
        return current_trace() or _local_trace()

    @contextmanager
    def _recorded(
        self, name: str, attributes: Mapping[str, Any] | None, start_time: float | None, end_time: float | None
    ) -> Generator[RecordingContext]:
        """Record the block as one step, with the given times instead of the clock's."""
        with self._here().operation(name, attributes) as span:
            recording = RecordingContext(span, start_time)
            try:
                yield recording
            finally:
                recording.finalize(end_time)

    def operation_context(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Any:
        """Return a context manager that records its block as one step of the open trace. Without a trace, nothing is
        recorded.

        start_time, end_time: Unix seconds that replace the times of the block; None: the clock's.
        """
        return self._recorded(name, attributes, start_time, end_time)

    def trace_run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in its own trace."""
        with self.trace_context(func.__name__):
            return func(*args, **kwargs)

    async def trace_run_async(self, func: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Await a coroutine function in its own trace."""
        async with self.trace_context(func.__name__):
            return await func(*args, **kwargs)

    def get_langchain_handler(self, tags: list[str] | None = None) -> None:
        """Return None: LangChain's steps are recorded without a handler, and so without tags."""

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Generator[None]:
        """Set the tracer up for the block, as worker 0."""
        self.init()
        try:
            self.init_worker(0, store)
            try:
                yield
            finally:
                self.teardown_worker(0)
        finally:
            self.teardown()


def _local_trace() -> Trace:
    return Trace(LOCAL, LOCAL, LOCAL, None)


class DummyTracer(Tracer):
    """Records what the agent's code emits, and touches no library."""


class DetachedTracer(Tracer):
    """Makes spans that belong to no attempt and are recorded nowhere, even inside a trace."""

    def _here(self) -> Trace:
        return _local_trace()


class OtelTracer(Tracer, native.OtelTracer):
    """Collects the spans of any OpenTelemetry instrumentation."""

    _status_of_events = "UNSET"

    def __init__(self, **options: Any) -> None:
        native.OtelTracer.__init__(self, **options)

    def prepare(self) -> None:
        """Collect the spans of OpenTelemetry's global tracer provider from now on."""
        native.OtelTracer.prepare(self)


class AgentOpsTracer(OtelTracer):
    """Records the calls that AgentOps's instrumentation sees. Without the package `agentops`, it records those that
    OpenTelemetry's instrumentation and the gateway see.

    The arguments of Agent Lightning's tracer have no effect, because no AgentOps service is called.
    """

    def __init__(self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True) -> None:
        super().__init__()
        self.agentops_managed, self.instrument_managed, self.daemon = agentops_managed, instrument_managed, daemon
        self._agentops: native.Tracer | None = None
        try:
            self._agentops = native.AgentOpsTracer()
            self._context_class = _SessionContext
        except ConfigError:
            notice(
                logger,
                "agentops is not installed, so only calls through the gateway are recorded; %s",
                how_to_install("agentops"),
            )

    def while_open(self) -> Any:
        """Return the context manager that is entered while a trace is open: AgentOps's instrumentations if the package
        is installed, otherwise OpenTelemetry's.
        """
        return super().while_open() if self._agentops is None else self._agentops.while_open()

    get_langchain_callback_handler = Tracer.get_langchain_handler


class WeaveTracer(Tracer, native.WeaveTracer):
    """Records calls of `@weave.op` and of Weave's integrations.

    Nothing is sent to Weights & Biases.
    """

    def __init__(
        self,
        *,
        project_name: str | None = None,
        wandb_api_key: str | None = None,
        instrument_managed: bool = True,
        **_: Any,
    ) -> None:
        native.WeaveTracer.__init__(self)
        self.project_name, self.instrument_managed = project_name, instrument_managed

    def prepare(self) -> None:
        """Collect the spans of OpenTelemetry's global tracer provider from now on."""
        native.WeaveTracer.prepare(self)


_active: Tracer | None = None
_ACTIVE_HERE: ContextVar[Tracer | None] = ContextVar("leyden_compat_active_tracer", default=None)
"""The tracer whose trace is open in this context."""
_CURRENT = DummyTracer()
"""The tracer of emitters if none is set: it records in the open trace."""


def set_active_tracer(tracer: Tracer) -> None:
    """Make the emitters use this tracer. Raise ValueError if another one is set."""
    global _active
    if _active is not None:
        raise ValueError("there is an active tracer already; call clear_active_tracer() first")
    _active = tracer


def clear_active_tracer() -> None:
    """Make the emitters use the open trace again."""
    global _active
    _active = None


def get_active_tracer() -> Tracer | None:
    """Return the tracer that was set or whose trace is open here, else one that records in the open trace, else
    None.
    """
    active = _active or _ACTIVE_HERE.get()
    if active is not None:
        return active
    return None if current_trace() is None else _CURRENT


def with_active_tracer_context(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that returns an async context manager: the emitters use its tracer within the block."""

    @functools.wraps(func)
    def with_its_tracer(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        return _active_within(self, func(self, *args, **kwargs))

    return with_its_tracer


@asynccontextmanager
async def _active_within(tracer: Tracer, block: AbstractAsyncContextManager[Any]) -> AsyncGenerator[Any]:
    """Make a tracer the active one of this context, so that attempts beside each other have each their own."""
    token = _ACTIVE_HERE.set(tracer)
    try:
        async with block as value:
            yield value
    finally:
        with suppress(ValueError):  # the block was entered in another context, which has ended with it
            _ACTIVE_HERE.reset(token)
