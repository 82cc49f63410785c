"""Bring finished spans to the store in batches, off the agent's path.

One `Delivery` for each store and event loop serves all of their contexts. A small attempt is one write, at its end. While an attempt
runs, its spans are written at most 0.2 s after they ended, all attempts' together, since a span is a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import weakref

from leyden.errors import LeydenError
from leyden.store.base import LightningStore
from leyden.tracer.context import AttemptTrace
from leyden.types import Span

__all__ = ["Delivery", "delivery_for"]

logger = logging.getLogger(__name__)

_DELAY_SECONDS = 0.2


class Delivery:
    """Writes spans of any number of traces to one store, from one event loop."""

    def __init__(self, store: LightningStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._loop = store, loop
        self._waiting: set[AttemptTrace] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def notice(self, trace: AttemptTrace) -> None:
        """`trace` has something to deliver. From any thread."""
        if trace in self._waiting:
            return
        self._waiting.add(trace)
        if self._timer is None:
            try:
                self._loop.call_soon_threadsafe(self._schedule)
            except RuntimeError:
                logger.warning("a span of attempt %s ended after its event loop and is lost", trace.attempt_id)

    def _schedule(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = self._loop.call_later(_DELAY_SECONDS, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        if self._writing is None or self._writing.done():
            self._writing = self._loop.create_task(self._write_waiting())
        else:
            self._schedule()

    async def _write_waiting(self) -> None:
        traces, self._waiting = self._waiting, set()
        taken = [(trace, trace.take_undelivered()) for trace in traces]
        try:
            await self._write([span for _, spans in taken for span in spans])
        except LeydenError as error:
            # Said again, and raised, when each trace ends: only there can somebody act on it.
            logger.warning("spans could not be written yet: %s", error)
            for trace, spans in taken:
                trace.put_back(spans)

    async def finish(self, trace: AttemptTrace) -> None:
        """Write all that `trace` has; raises what kept it from the store."""
        self._waiting.discard(trace)
        if self._writing is not None and not self._writing.done():
            await asyncio.shield(self._writing)
        await self._write(trace.take_undelivered())

    async def _write(self, spans: list[Span]) -> None:
        if spans:
            await self._store.add_many_spans(spans)


_deliveries: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakKeyDictionary[LightningStore, Delivery]]
_deliveries = weakref.WeakKeyDictionary()


def delivery_for(store: LightningStore) -> Delivery:
    """The delivery of the running loop to `store`."""
    loop = asyncio.get_running_loop()
    of_loop = _deliveries.setdefault(loop, weakref.WeakKeyDictionary())
    if store not in of_loop:
        of_loop[store] = Delivery(store, loop)
    return of_loop[store]
