"""A trace in another process than the one that opened it: how its spans are sent back, and the trace of a whole
process.

Spans are sent to the URL of the trace (`Trace.address`), where the process that opened the trace listens
(`receiver.py`), in the batches in which they would go to a store. All of them have arrived when the carried work ends,
or the process does. This module knows traces and their addresses, and not how a process is started (`carry.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import TypeAdapter

from leyden.errors import InvalidEmission, LeydenError, StoreError, UnknownAttempt
from leyden.tracing.delivery import SpanOutbox, background_loop, open_outbox
from leyden.tracing.trace import SPANS, SPANS_URL, Trace
from leyden.types import Span

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SPANS = TypeAdapter(list[Span])
_BATCH = 200
"""Spans in one request, whose size the receiver limits."""
_SECONDS = 30.0
"""The time limit of one request."""


class RemoteDestination:
    """Sends spans to the process that opened their trace. Implements `SpanDestination`."""

    def __init__(self, url: str) -> None:
        self.url = url  # of `Trace.address`

    async def add_many_spans(self, spans: Sequence[Span], /) -> Sequence[Span]:
        """Send all spans. Safe to repeat. Raise UnknownAttempt if the attempt is over, InvalidEmission if the receiver
        refuses a span, and StoreError, after which a retry may succeed, if it fails or does not respond.
        """
        for start in range(0, len(spans), _BATCH):
            body = _SPANS.dump_json(list(spans[start : start + _BATCH]))
            try:
                async with asyncio.timeout(_SECONDS):
                    status, answer = await _post(f"{self.url}{SPANS}", body)
            except (OSError, EOFError, ValueError) as error:
                raise StoreError(f"spans of another process cannot be sent to {self.url}: {error!r}") from error
            if status != 200:
                kind = StoreError if status >= 500 else UnknownAttempt if status == 404 else InvalidEmission
                raise kind(f"spans of another process are refused with status {status}: {answer}")
        return spans


async def _post(url: str, body: bytes) -> tuple[int, str]:
    """Send one POST request; return the status and the text of the reply. It is written by hand, because no thread can
    be started at a process's very end, and a library costs imports.
    """
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


def below(traceparent: str, trace: Trace) -> otel_context.Context:
    """Make a step of another process the parent of the trace's outermost spans, and return a context within that step.

    traceparent: the step, as a W3C header. If it is malformed, the trace stays as it is.
    """
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    step = otel_trace.get_current_span(context).get_span_context()
    if step.is_valid:
        trace.trace_id, trace.parent_id = f"{step.trace_id:032x}", f"{step.span_id:016x}"
    return context


class _ProcessTrace:
    """The trace of a process that was started in one, made from the process's environment variables."""

    current: Trace | None = None
    pid = 0
    lock = threading.Lock()


def process_trace() -> Trace | None:
    """Return the trace in which this process was started, or None if a variable of `Trace.environment` is missing.

    The first call in a process opens it. The process delivers its spans when it exits.
    """
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
    name = f"attempt {attempt_id!r} of rollout {rollout_id!r}"
    outbox = open_outbox(RemoteDestination(url), background_loop(), name)
    trace = Trace(rollout_id, rollout_id, attempt_id, outbox, url=url)
    below(os.environ.get("TRACEPARENT", ""), trace)
    atexit.register(_close, outbox, os.getpid())
    return trace


def _close(outbox: SpanOutbox, pid: int) -> None:
    if pid != os.getpid():  # a forked child runs its parent's exit functions, too
        return
    try:
        outbox.close_blocking()
    except LeydenError as error:
        logger.error("what this process recorded is incomplete: %s", error)
