"""A store that one event loop owns, for other threads and loops.

The wrapper names no method of a store: it runs every coroutine method on the owning loop, and passes on every other
attribute.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Coroutine
from typing import Any, cast

from leyden.store.base import LightningStore


def on_this_loop(store: LightningStore) -> LightningStore:
    """Return a wrapper of the store that any thread may use. The store's coroutine methods run on the event loop that
    is running now.
    """
    return cast(LightningStore, _OnOneLoop(store, asyncio.get_running_loop()))


def on_the_loop_of(wrapped: object, store: LightningStore) -> LightningStore:
    """Return a wrapper of `store` for the event loop that owns `wrapped`; `store` itself if `wrapped` is no wrapper of
    `on_this_loop`.
    """
    return cast(LightningStore, _OnOneLoop(store, wrapped.loop)) if isinstance(wrapped, _OnOneLoop) else store


@LightningStore.register
class _OnOneLoop:
    """Passes every attribute of a store on; coroutine methods run on the store's loop."""

    def __init__(self, store: LightningStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self.loop = store, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return functools.partial(self._call, found) if inspect.iscoroutinefunction(found) else found

    async def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method on the wrapped store's own event loop."""
        work: Coroutine[Any, Any, Any] = method(*args, **kwargs)
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
