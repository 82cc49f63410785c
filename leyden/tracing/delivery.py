"""Deliver finished spans to the store, in batches, off the agent's path.

There is one `Delivery` for each store and event loop, however many attempts are open, and at most one `add_many_spans`
of it is under way. Spans that end meanwhile go into the next call. A span waits 0.2 s at most, because it is also a
heartbeat of its attempt; 64 spans do not wait. Closing a `SpanOutbox` delivers all spans of its trace. A span that ends
after that (a late one) goes through a background thread with its own event loop, because the loop of its attempt may be
closed by then. So do the spans of traces that were opened without a loop.

The module knows outboxes and stores, and nothing of agents or OpenTelemetry. After a failure of the store, delivery is
retried every second until the outbox closes, and for a minute for a late span. An error of one attempt (an unknown id,
a value that cannot be stored) never holds up the others.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from leyden._lib.event_loops import LoopThread
from leyden.errors import LeydenError, StoreClosed, StoreError
from leyden.types import Span

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.2
"""How long a span waits for others."""
_FLUSH_SPANS = 64
"""This many pending spans are sent without waiting."""
_MAX_SPANS = 5000
"""The most spans of one request. After an outage of the store, more may wait than a server accepts at once."""
_RETRY_SECONDS = 1.0
"""The time between a failure of the store and the next try."""
_LATE_TRIES = 60
"""How often a late span is tried."""
_EXIT_SECONDS = 2.0
"""How long late spans may delay the end of the process."""

_FINAL = (ValueError, TypeError, StoreClosed)
"""Errors that no retry can cure: the spans are wrong, or the store is closed.

UnknownRollout and similar errors are ValueErrors."""


class SpanDestination(Protocol):
    """A receiver of spans: a store, or an object that forwards them to one."""

    @property
    def url(self) -> str:
        """The receiver's address, which error messages name."""
        ...

    async def add_many_spans(self, spans: Sequence[Span], /) -> Sequence[Span]:
        """Store all spans or none, each once however often it is sent. Return them with the store's sequence ids."""
        ...


class SpanOutbox:
    """The spans of one trace on their way to the store. `put` may be called from any thread."""

    def __init__(self, delivery: Delivery, name: str, *, tries: int | None = None) -> None:
        self._delivery = delivery
        self._late: SpanOutbox | None = None
        self.name = name
        """The trace's name in messages."""
        self.tries = tries
        """How often a store that fails is tried before the spans are given up; None: until the trace closes."""
        self.waiting = 0
        """Spans that were put and are not in the store yet. Changed under the delivery's lock only."""
        self.lost = 0
        """The number of spans that the store refused for good."""
        self.error: Exception | None = None
        """The error of the last try; None once a try has succeeded."""
        self.closed = False

    def put(self, span: Span) -> None:
        """Queue the span for delivery. After `close` it is a late span, which the background thread delivers."""
        if self._delivery.put(self, span):
            return
        logger.debug("span %r of %s ended after its trace was closed; it is delivered late", span.name, self.name)
        if self._late is None:
            store, loop = self._delivery.store, background_loop()
            with _registry_lock:
                delivery = _deliveries.get((id(store), id(loop))) or Delivery(store, loop)
                assert _background is not None
                _background.deliveries.add(delivery)  # which is flushed when the process exits
            self._late = SpanOutbox(delivery, f"{self.name} (late)", tries=_LATE_TRIES)
        self._late.put(span)

    async def close(self) -> None:
        """Deliver every span that was put. Call it in the delivery's own loop. If a span could not be delivered, raise
        the store's error; one that is no LeydenError is raised as a StoreError.
        """
        try:
            await self._delivery.drain(self)
        finally:
            delivery = self._delivery
            with _registry_lock:
                delivery.users -= 1
                if not delivery.users:
                    del _deliveries[id(delivery.store), id(delivery.loop)]
        if self.error is not None:
            undelivered = f"{self.lost or self.waiting} spans of {self.name}"
            if isinstance(self.error, LeydenError):
                self.error.add_note(f"({undelivered} are not in the store)")
                raise self.error
            raise StoreError(
                f"{undelivered} could not be delivered to {self._delivery.store.url}: "
                f"{type(self.error).__name__}: {self.error}"
            ) from self.error

    def close_blocking(self) -> None:
        """Run `close` from sync code. The delivery must be that of the background loop."""
        asyncio.run_coroutine_threadsafe(self.close(), self._delivery.loop).result()


class Delivery:
    """Sends the spans of all outboxes to one store, in one event loop.

    `put` may be called from any thread; everything else runs in the loop.
    """

    def __init__(self, store: SpanDestination, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self.loop = loop
        self.users = 0
        """Open outboxes; changed under `_registry_lock`."""
        self._lock = threading.Lock()
        self._pending: list[tuple[SpanOutbox, Span]] = []
        self._armed = False
        """Whether a timer that will flush the pending spans is running or about to start."""
        self._batch: asyncio.Task[None] | None = None
        """The call of the store that is under way."""

    def put(self, outbox: SpanOutbox, span: Span) -> bool:
        """Queue a span for delivery. Return False if the outbox or the delivery's event loop is closed.

        Once the store has refused spans of an outbox, further ones are only counted as lost.
        """
        with self._lock:
            if outbox.closed or self.loop.is_closed():
                return False
            if outbox.lost:
                outbox.lost += 1
                return True
            self._pending.append((outbox, span))
            outbox.waiting += 1
            full = len(self._pending) == _FLUSH_SPANS
            arm = not self._armed
            self._armed = True
        if arm:
            self._in_loop(self._arm)
        if full:
            self._in_loop(self._start)
        return True

    async def drain(self, outbox: SpanOutbox) -> None:
        """Close the outbox, and wait until its spans are in the store, or are refused, or failed once more."""
        with self._lock:
            outbox.closed = True
        # The first round may join a batch that was taken before the last spans ended; the second one has all of them;
        # the third is one more try for a batch that failed or was cancelled (asyncio.run cancels every task of its loop
        # at its end).
        for _ in range(3):
            if not outbox.waiting:
                return
            await asyncio.wait({self._batch or self._start()})
        with self._lock:
            self._pending = [entry for entry in self._pending if entry[0] is not outbox]
        if outbox.waiting and outbox.error is None:
            outbox.error = StoreError(f"delivery to {self.store.url} was cancelled")

    def _in_loop(self, call: Callable[[], object]) -> None:
        """Run a function in the delivery's loop: now if this is the loop's thread, else soon."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self.loop:
            call()
        else:
            with contextlib.suppress(RuntimeError):  # the loop closed this very moment; the process ends
                self.loop.call_soon_threadsafe(call, context=contextvars.Context())

    def _arm(self, seconds: float = _FLUSH_SECONDS) -> None:
        self.loop.call_later(seconds, self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        with self._lock:
            self._armed = False
        if self._pending:
            self._start()

    async def flush(self) -> None:
        """Return when every pending span has been sent once, with or without success."""
        if self._batch or self._pending:
            await asyncio.wait({self._batch or self._start()})

    def _start(self) -> asyncio.Task[None]:
        """Return the batch under way, or start one with everything that is pending."""
        if self._batch is None:
            with self._lock:
                batch, self._pending = self._pending, []
            # An empty context: the store's own work must not be traced as a part of the attempt that woke us.
            self._batch = self.loop.create_task(self._deliver(batch), context=contextvars.Context())
        return self._batch

    async def _deliver(self, batch: Sequence[tuple[SpanOutbox, Span]]) -> None:
        """Send a batch, queue what was not delivered again, also after a cancellation, and schedule the next batch."""
        undelivered = batch
        try:
            undelivered = await self._send(batch)
        finally:
            self._batch = None
            with self._lock:
                self._pending[:0] = undelivered
                full = len(self._pending) >= _FLUSH_SPANS and not undelivered
                arm = bool(self._pending) and not full and not self._armed
                self._armed = self._armed or arm
            if full:
                self._start()
            elif arm:
                self._arm(_RETRY_SECONDS if undelivered else _FLUSH_SECONDS)

    async def _send(self, batch: Sequence[tuple[SpanOutbox, Span]]) -> Sequence[tuple[SpanOutbox, Span]]:
        """Send a batch to the store, and return the spans to retry. If the store refuses the batch, send the spans of
        each outbox alone, to find whose spans are wrong.
        """
        if len(batch) > _MAX_SPANS:
            parts = [batch[start : start + _MAX_SPANS] for start in range(0, len(batch), _MAX_SPANS)]
            return [entry for part in parts for entry in await self._send(part)]
        outboxes = dict.fromkeys(outbox for outbox, _ in batch)
        try:
            added = await self.store.add_many_spans([span for _, span in batch])
        except _FINAL as error:
            if len(outboxes) > 1:
                parts = [[entry for entry in batch if entry[0] is outbox] for outbox in outboxes]
                return [entry for part in parts for entry in await self._send(part)]
            self._refuse(next(iter(outboxes)), len(batch), error)
            return ()
        except Exception as error:  # noqa: BLE001 -- any store, any network: kept for another try, raised when the trace closes
            for outbox in outboxes:
                if outbox.tries is not None:
                    outbox.tries -= 1
                if outbox.error is None:  # the first failure in a row
                    logger.warning("spans of %s wait: %s: %s", outbox.name, type(error).__name__, error)
                outbox.error = error
            for outbox in (outbox for outbox in outboxes if outbox.tries == 0):
                self._refuse(outbox, sum(entry[0] is outbox for entry in batch), error)
            return [entry for entry in batch if entry[0].tries != 0]
        drawn = {(span.rollout_id, span.attempt_id, span.span_id): span.sequence_id for span in added}
        for _, span in batch:
            span.sequence_id = drawn.get((span.rollout_id, span.attempt_id, span.span_id), span.sequence_id)
        with self._lock:
            for outbox, _ in batch:
                outbox.waiting -= 1
                if not outbox.lost:
                    outbox.error = None
        return ()

    def _refuse(self, outbox: SpanOutbox, count: int, error: Exception) -> None:
        logger.error("%d spans of %s are refused: %s", count, outbox.name, error)
        with self._lock:
            outbox.waiting -= count
            outbox.lost += count
            outbox.error = error


# ---- which deliveries there are ------------------------------------------------------------------

_registry_lock = threading.Lock()
_deliveries: dict[tuple[int, int], Delivery] = {}


def open_outbox(store: SpanDestination, loop: asyncio.AbstractEventLoop, name: str) -> SpanOutbox:
    """Return a new outbox for a trace, on the delivery that its store and loop share.

    name: the trace's name in messages.
    """
    with _registry_lock:
        delivery = _deliveries.setdefault((id(store), id(loop)), Delivery(store, loop))
        delivery.users += 1
    return SpanOutbox(delivery, name)


class _Background:
    """The thread that delivers late spans, for this process only: a fork starts its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.thread = LoopThread("leyden-delivery")
        self.deliveries: weakref.WeakSet[Delivery] = weakref.WeakSet()
        """Deliveries that may hold late spans when the process ends."""
        atexit.register(self._finish)

    def _finish(self) -> None:
        """Give late spans a moment to arrive, at the end of the process."""
        if self.pid != os.getpid():
            return

        async def flush() -> None:
            for delivery in list(self.deliveries):
                await delivery.flush()

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(flush(), self.thread.loop).result(_EXIT_SECONDS)
        self.thread.stop(_EXIT_SECONDS)


_background: _Background | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the background thread. The first call starts it."""
    global _background
    with _registry_lock:
        if _background is None or _background.pid != os.getpid():
            _background = _Background()
        return _background.thread.loop
