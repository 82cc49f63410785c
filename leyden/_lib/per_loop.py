"""Give an object that several event loops use one item for each loop, such as an HTTP session whose connections belong
to one loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One item for each event loop, made at its first use there, and ended when the loop shuts down or at `close`.

    An async generator holds each item, because `asyncio.run` closes the generators of its loop at the end, and with
    them the items.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        """Make nothing yet.

        make: returns a context manager that gives the item. Its entry must not wait, and it must not hold an async
            generator, which the loop would close as well.
        """
        self._make = make
        self._lock = threading.Lock()
        self._items: dict[asyncio.AbstractEventLoop, T] = {}
        self._generators: dict[asyncio.AbstractEventLoop, AsyncGenerator[T, None]] = {}

    async def get(self) -> T:
        return self.get_now()

    def get_now(self) -> T:
        """Return the running loop's item, from code that cannot await. Raise RuntimeError without a running loop."""
        loop = asyncio.get_running_loop()
        if (item := self._items.get(loop)) is not None:
            return item
        generator = self._with_end(loop)
        first_step = generator.__anext__().__await__()  # at which the running loop registers the generator
        try:
            next(first_step)
        except StopIteration as yielded:
            item = yielded.value
        else:
            raise RuntimeError("a PerLoop's context manager waited while it was entered")
        with self._lock:
            for closed in [other for other in self._items if other.is_closed()]:
                del self._items[closed], self._generators[closed]
            self._items[loop], self._generators[loop] = item, generator
        return item

    async def close(self) -> None:
        """End the item of each event loop that is running, such as an HTTP session. A later `get` makes a new one."""
        with self._lock:
            generators, self._generators, self._items = self._generators, {}, {}
        for loop, generator in generators.items():
            if loop is asyncio.get_running_loop():
                await generator.aclose()
            elif loop.is_running():
                with suppress(RuntimeError):  # it stopped this moment, and ends its generators itself
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generator.aclose(), loop))

    async def _with_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        """Yield a new item once. Closing the generator ends the item and forgets it."""
        async with self._make() as item:
            try:
                yield item
            finally:
                with self._lock:
                    self._items.pop(loop, None)
                    self._generators.pop(loop, None)
