"""`Bridge`: lets a thread without an event loop run coroutines in the algorithm's loop.

It knows threads and coroutines, and nothing of prompts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(BaseException):
    """Raised in the thread to end it. It is no Exception, because `gepa` catches Exceptions and continues."""


class Bridge:
    """Runs coroutines in a loop for one other thread, until `stop` is called or a coroutine fails."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._future: concurrent.futures.Future[Any] | None = None
        self._stopped = False
        self.error: Exception | None = None
        """The first error that a coroutine of the algorithm has raised, or None."""

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, block the calling thread, and return the result.

        Raise Stopped after `stop`, and if the coroutine fails; then `error` is its error.
        """
        with self._lock:
            if self._stopped:
                work.close()
                raise Stopped
            self._future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return self._future.result()
        except concurrent.futures.CancelledError:
            raise Stopped from None
        except Exception as error:
            self._stopped, self.error = True, error
            raise Stopped from error

    def stop(self) -> None:
        """Cancel the running call, and refuse further ones. Safe to repeat, from any thread."""
        with self._lock:
            self._stopped = True
            if self._future is not None:
                self._future.cancel()
