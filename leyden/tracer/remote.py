"""A trace in another process than its own: what travels there, and the way of its spans back.

Spans go to the address of the trace (`Trace.address`), in the batches in which they would go to a store, and all of them are there when the
work that was carried ends, or the process does. It knows traces and their addresses, and not how a process is started (`carry.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import pickle
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import TypeAdapter

from leyden.errors import LeydenError, StoreError, UnknownAttempt
from leyden.tracer.context import TraceContext
from leyden.tracer.delivery import Outbox, background_loop, open_outbox
from leyden.tracer.trace import SPANS, SPANS_URL, Trace
from leyden.types import Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SPANS = TypeAdapter(list[Span])
_BATCH = 200
"""Spans in one request; the receiver has a limit for its size."""
_SECONDS = 30.0


class _SpansAt:
    """Brings spans to the address of a trace."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def add_many_spans(self, spans: Sequence[Span], /) -> Sequence[Span]:
        """Take all. Raises UnknownAttempt where the attempt is over, StoreError where nobody answers; safe to repeat."""
        for start in range(0, len(spans), _BATCH):
            body = _SPANS.dump_json(list(spans[start : start + _BATCH]))
            try:
                async with asyncio.timeout(_SECONDS):
                    status, answer = await _post(f"{self.url}{SPANS}", body)
            except (OSError, EOFError, ValueError) as error:
                raise StoreError(f"spans of another process cannot be sent to {self.url}: {error!r}") from error
            if status != 200:
                raise UnknownAttempt(f"spans of another process are refused: {answer}")
        return spans


async def _post(url: str, body: bytes) -> tuple[int, str]:
    """By hand: it works at a process's very end, where no thread can be started, and costs such a process no import."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status_line = await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        return int(status_line.split()[1]), (await reader.read()).decode(errors="replace")
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Carried:
    """What another process needs to go on with a trace; can be pickled."""

    name: str
    rollout_id: str
    attempt_id: str
    environment: dict[str, str]
    model_hosts: tuple[str, ...]
    route: tuple[str | None, str | None]
    prepare: bytes | None

    @classmethod
    def of(cls, trace: Trace) -> Carried:
        """Of a trace, at the step that is under way here."""
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
        """Call a function in the trace, in the process where this has arrived; what it recorded is delivered when this returns."""
        with _variables(self.environment), self._trace():
            return function(*args, **kwargs)

    @contextmanager
    def _trace(self) -> Generator[None]:
        url = self.environment[SPANS_URL]
        # A tracer's own `prepare`, of which the tracer is `__self__`; what it keeps open around its traces is kept open here too.
        prepare: Any = None if self.prepare is None else pickle.loads(self.prepare)
        around = getattr(getattr(prepare, "__self__", None), "while_open", nullcontext)
        if prepare is not None:
            prepare()
        with TraceContext(
            self.name,
            _SpansAt(url),
            self.rollout_id,
            self.attempt_id,
            prepare=prepare,
            around=around,
            model_hosts=self.model_hosts,
            url=url,
        ) as trace:
            trace.route.base_url, trace.route.api_key = self.route
            token = otel_context.attach(_below(self.environment["TRACEPARENT"], trace))
            try:
                yield
            finally:
                otel_context.detach(token)


def _below(traceparent: str, trace: Trace) -> otel_context.Context:
    """The current context, with a step of another process as the one under way."""
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    step = otel_trace.get_current_span(context).get_span_context()
    if step.is_valid:
        trace.trace_id, trace.parent_id = f"{step.trace_id:032x}", f"{step.span_id:016x}"
    return context


@contextmanager
def _variables(environment: dict[str, str]) -> Generator[None]:
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


class _ProcessTrace:
    """The trace of a process that was started in one, by the variables that it was started with."""

    current: Trace | None = None
    pid = 0
    lock = threading.Lock()


def process_trace() -> Trace | None:
    """The trace of this whole process, opened by the first call; delivered at the process's end. None where a variable is missing."""
    if _ProcessTrace.pid != os.getpid():
        with _ProcessTrace.lock:
            if _ProcessTrace.pid != os.getpid():
                _ProcessTrace.current = _open_process_trace()
                _ProcessTrace.pid = os.getpid()
    return _ProcessTrace.current


def _open_process_trace() -> Trace | None:
    wanted = (SPANS_URL, "LEYDEN_ROLLOUT_ID", "LEYDEN_ATTEMPT_ID")
    url, rollout_id, attempt_id = (os.environ.get(name) for name in wanted)
    if not url or not rollout_id or not attempt_id:
        return None
    outbox = open_outbox(_SpansAt(url), background_loop(), f"attempt {attempt_id!r} of rollout {rollout_id!r}")
    trace = Trace(rollout_id, rollout_id, attempt_id, outbox, url=url)
    _below(os.environ.get("TRACEPARENT", ""), trace)
    atexit.register(_close, outbox, os.getpid())
    return trace


def _close(outbox: Outbox, pid: int) -> None:
    if pid != os.getpid():
        return
    try:
        outbox.close_blocking()
    except LeydenError as error:
        logger.error("what this process recorded is incomplete: %s", error)
