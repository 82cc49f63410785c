"""Things that belong to one event loop (a session, its connections), for objects that are used from
many.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One item for each event loop that asks: made at its first use there, and ended when the loop
    shuts down or at `close`.

    The loop itself ends it: it is held by an async generator, and `asyncio.run` closes those of its
    loop.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        """make: a context manager that enters without waiting, and holds no async generator (the
        loop would close that one too).
        """
        self._make = make
        self._lock = threading.Lock()
        self._items: dict[asyncio.AbstractEventLoop, T] = {}
        self._generators: dict[asyncio.AbstractEventLoop, AsyncGenerator[T, None]] = {}

    async def get(self) -> T:
        """Return the running loop's item."""
        return self.get_now()

    def get_now(self) -> T:
        """Return the running loop's item, from code that cannot await.

        Raise RuntimeError without a running loop.
        """
        loop = asyncio.get_running_loop()
        item = self._items.get(loop)
        return self._add(loop) if item is None else item

    async def close(self) -> None:
        """End the items of all loops. A later `get` makes a new one."""
        with self._lock:
            generators, self._generators, self._items = self._generators, {}, {}
        for loop, generator in generators.items():
            if loop is asyncio.get_running_loop():
                await generator.aclose()
            elif loop.is_running():
                with suppress(RuntimeError):  # it stopped this moment, and ends its generators itself
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(generator.aclose(), loop))

    def _add(self, loop: asyncio.AbstractEventLoop) -> T:
        generator = self._with_end(loop)
        item = _first(generator)
        with self._lock:
            for closed in [other for other in self._items if other.is_closed()]:
                del self._items[closed], self._generators[closed]
            self._items[loop], self._generators[loop] = item, generator
        return item

    async def _with_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        async with self._make() as item:
            try:
                yield item
            finally:
                with self._lock:
                    self._items.pop(loop, None)
                    self._generators.pop(loop, None)


def _first(generator: AsyncGenerator[T, None]) -> T:
    """Return the first item of a generator that does not wait before it; the running loop registers
    the generator.
    """
    step = generator.__anext__().__await__()
    try:
        next(step)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("a PerLoop's context manager waited while it was entered")
