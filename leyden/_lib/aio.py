"""Helpers for event loops: wait for the first of several awaitables, wait for one event from threads and loops alike,
and collect garbage less often.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

_NEW_OBJECTS = 20_000
"""The garbage collector's threshold for the youngest generation. Python's default is 700."""


@asynccontextmanager
async def first_done(
    *work: Awaitable[Any], timeout_seconds: float | None = None
) -> AsyncGenerator[Sequence[asyncio.Future[Any]]]:
    """Run awaitables at the same time. Yield their futures, in order, as soon as one of them is done or the time is
    over. At the end of the block, cancel the unfinished ones, and wait for their end.
    """
    futures = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(futures, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        yield futures
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


class Latch:
    """A gate that is closed at first, and open for ever once `set` is called from any thread, event loop or signal
    handler. Waiters are woken; they never poll.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.RLock()
        self._wake: set[Callable[[], None]] = set()

    def set(self) -> None:
        """Open the latch and wake every waiting thread and task. Safe to repeat."""
        with self._lock:
            self._event.set()
            waiting, self._wake = self._wake, set()
        for wake in waiting:
            wake()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is open or `timeout` seconds have passed. Return `is_set()`."""
        return self._event.wait(timeout)

    async def wait_async(self) -> None:
        """Wait on the running loop until it is open."""
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))
            except RuntimeError:
                pass  # that loop has ended, and its waiter with it

        with self._lock:
            if self._event.is_set():
                return
            self._wake.add(wake)
        try:
            await future
        finally:
            with self._lock:
                self._wake.discard(wake)


def look_for_cycles_rarely() -> None:
    """Let the garbage collector run once for many responses, not several times for each.

    A response with log-probabilities consists of hundreds of containers, none of them in a cycle, which live until it
    is recorded. Each collection visits them in vain, which takes a tenth of the gateway's CPU time for a call. Use it
    only in a process that runs no user code, which may rely on Python's thresholds.
    """
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
