"""`LoopThread`: an event loop in a thread of its own, for objects whose methods do not use `await`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers in any other thread, until `stop`."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        name: the thread's name.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread. Block until it ends, and return its result or raise its error.

        Ctrl-C in the calling thread cancels the coroutine.
        """
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def stop(self) -> None:
        """Cancel the tasks that are left and end the thread. Safe to repeat."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        """Run the event loop until `stop`, then cancel its tasks and close it. This is the body of the thread."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            # Closes the store's connections of this loop.
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
