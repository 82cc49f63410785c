"""A gate that opens once, and that threads and event loops can both wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Latch:
    """A gate that is closed at first, and open for ever once `set` is called from any thread, event
    loop or signal handler. Waiters are woken; they never poll.
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
        """Return whether it is open."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until it is open or `timeout` seconds have passed.

        Return `is_set()`.
        """
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
