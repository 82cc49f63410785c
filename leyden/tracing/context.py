"""Open and close a trace, with `with` or `async with`, here or in a process to which it was carried.

Opening makes it the current trace of this context. Closing delivers all of its spans. This module joins a trace with
its outbox, with the address for other processes, and with what carries it into threads and processes. It makes no
spans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from leyden.errors import ConfigError, LeydenError
from leyden.tracing import carry
from leyden.tracing.current import current_trace
from leyden.tracing.delivery import SpanDestination, background_loop, open_outbox
from leyden.tracing.instrumentation.route import MODEL_HOSTS, ROUTE_KEY
from leyden.tracing.remote import RemoteDestination, below
from leyden.tracing.trace import CURRENT, LOCAL, OTEL_KEY, SPANS_URL, Address, Trace
from leyden.types import Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LAST: ContextVar[Trace | None] = ContextVar("leyden_last_trace", default=None)
"""The last trace that this context opened, whether it is closed or not."""


class TraceContext:
    """A context manager that opens one trace. Enter it once.

    `async with` delivers the spans in the running loop; `with` blocks its thread until all are delivered. Leaving the
    block raises the error that kept spans from the store. If the block itself was cancelled or interrupted, that error
    is only logged.
    """

    def __init__(
        self,
        name: str | None,
        store: SpanDestination | None,
        rollout_id: str | None,
        attempt_id: str | None,
        *,
        prepare: Callable[[], None] | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        model_hosts: Sequence[str] = MODEL_HOSTS,
        url: str | None = None,
    ) -> None:
        """
        name: the trace's name; None: the rollout id.
        store: where the spans go; None: they stay in the trace.
        prepare: makes another process record its steps, before carried work runs there.
        around: makes a context that stays open as long as the trace.
        model_hosts: the hosts whose requests are model calls.
        url: where other processes send spans of this trace; None: to a new address.
        Raise ConfigError for one id without the other, or for a store without ids.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError(
                f"a trace needs rollout_id and attempt_id or neither, got {rollout_id!r} and {attempt_id!r}"
            )
        if store is not None and not (rollout_id and attempt_id):
            raise ConfigError(
                f"a trace that goes to the store {store.url} needs rollout_id and attempt_id, got {rollout_id!r} and "
                f"{attempt_id!r}; without a store the spans stay local"
            )
        self._name = name
        self._store, self._rollout_id, self._attempt_id = store, rollout_id, attempt_id
        self._prepare, self._around, self._model_hosts, self._url = prepare, around, model_hosts, url
        self._entered: AbstractContextManager[object] | None = None
        """The context that `around` made."""
        self._trace: Trace | None = None
        self._tokens: tuple[Token[Trace | None], Token[otel_context.Context]] | None = None

    def __enter__(self) -> Trace:
        return self._open(background_loop() if self._store is not None else None)

    async def __aenter__(self) -> Trace:
        return self._open(asyncio.get_running_loop())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outbox = self._close().outbox
        if outbox is not None:
            try:
                outbox.close_blocking()
            except LeydenError as failure:
                _raise_or_log(failure, error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outbox = self._close().outbox
        if outbox is not None:
            try:
                await outbox.close()
            except LeydenError as failure:
                _raise_or_log(failure, error)

    def _open(self, loop: asyncio.AbstractEventLoop | None) -> Trace:
        """Make the trace and set it as the current one, here and for OpenTelemetry.

        loop: the loop that delivers spans to the store; None keeps them in the trace. Raise ConfigError if it was
        opened before.
        """
        if self._trace is not None:
            raise ConfigError(
                f"the trace {self._trace.name!r} was opened before; make another trace_context for each block"
            )
        rollout_id, attempt_id = self._rollout_id or LOCAL, self._attempt_id or LOCAL
        outbox = None
        entered = self._around()
        entered.__enter__()
        if self._store is not None and loop is not None:
            outbox = open_outbox(self._store, loop, f"attempt {attempt_id!r} of rollout {rollout_id!r}")
        self._entered = entered
        self._trace = trace = Trace(
            self._name or rollout_id,
            rollout_id,
            attempt_id,
            outbox,
            url=self._url,
            open_address=_open_address,
            pack=Carried.of,
        )
        trace.route.model_hosts = self._model_hosts
        trace.prepare = self._prepare or trace.prepare
        context = otel_context.set_value(ROUTE_KEY, trace.route, otel_context.set_value(OTEL_KEY, trace))
        if current_trace() is not None:  # the step under way outside belongs to another trace and is no parent here
            context = otel_trace.set_span_in_context(otel_trace.INVALID_SPAN, context)
        self._tokens = CURRENT.set(trace), otel_context.attach(context)
        _LAST.set(trace)
        carry.hold()
        return trace

    def _close(self) -> Trace:
        """End the recording, and restore the trace that was current before. Return this trace."""
        assert self._trace is not None and self._tokens is not None and self._entered is not None
        carry.release()
        self._entered.__exit__(None, None, None)
        self._trace.close_address()
        current, attached = self._tokens
        otel_context.detach(attached)
        try:
            CURRENT.reset(current)
        except ValueError:
            # The trace was opened in another context, as in a generator that another task finishes. That context ends
            # with its task, so there is nothing to restore.
            logger.debug("the trace %r was closed in another context than it was opened in", self._trace.name)
        _LAST.set(self._trace)
        return self._trace


@dataclass(frozen=True, slots=True)
class Carried:
    """A picklable form of a trace, for another process. Implements `CarriedTrace`."""

    name: str
    rollout_id: str
    attempt_id: str
    environment: dict[str, str]
    """The trace's environment variables, among them the address for its spans."""
    model_hosts: tuple[str, ...]
    route: tuple[str | None, str | None]
    """The base URL and the key of the attempt's gateway, if there is one."""
    prepare: bytes | None
    """The pickled `Trace.prepare`; None if it cannot be pickled."""

    @classmethod
    def of(cls, trace: Trace) -> Carried:
        """Pack a trace, with the current step as the parent of later ones."""
        try:
            prepare = pickle.dumps(trace.prepare)
        except Exception:  # noqa: BLE001 -- a tracer of the user's may be anything; the emitters work without it
            prepare = None
        route = trace.route
        return cls(
            trace.name,
            trace.rollout_id,
            trace.attempt_id,
            trace.environment(),
            tuple(route.model_hosts),
            (route.base_url, route.api_key),
            prepare,
        )

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Call a function in the trace. All spans that it recorded are delivered when this returns."""
        with _variables(self.environment), self._trace():
            return function(*args, **kwargs)

    @contextmanager
    def _trace(self) -> Generator[None]:
        """Open the carried trace in this process, below the span that was current where it was packed."""
        url = self.environment[SPANS_URL]
        # `prepare` is mostly a tracer's bound method, with the tracer as its `__self__`. Then this trace opens the same
        # contexts (`while_open`) as the tracer's traces.
        prepare: Any = None if self.prepare is None else pickle.loads(self.prepare)
        around = getattr(getattr(prepare, "__self__", None), "while_open", nullcontext)
        if prepare is not None:
            prepare()
        with TraceContext(
            self.name,
            RemoteDestination(url),
            self.rollout_id,
            self.attempt_id,
            prepare=prepare,
            around=around,
            model_hosts=self.model_hosts,
            url=url,
        ) as trace:
            trace.route.base_url, trace.route.api_key = self.route
            token = otel_context.attach(below(self.environment["TRACEPARENT"], trace))
            try:
                yield
            finally:
                otel_context.detach(token)


@contextmanager
def _variables(environment: dict[str, str]) -> Generator[None]:
    """Set environment variables of this process during the block."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _open_address(trace: Trace) -> Address:
    from leyden.tracing.receiver import Receiver  # loads a server, which few traces need

    return Receiver(trace)


def last_trace() -> list[Span]:
    """Return the spans of the current trace, or of the last one that this context opened, or []."""
    trace = current_trace() or _LAST.get()
    return [] if trace is None else list(trace.spans)


def _raise_or_log(failure: LeydenError, error: BaseException | None) -> None:
    """Raise `failure`, or only log it if `error`, which the block raised, is a cancellation or an interrupt."""
    if error is None or isinstance(error, Exception):
        raise failure
    logger.error("a trace that was interrupted is incomplete in the store: %s", failure)
