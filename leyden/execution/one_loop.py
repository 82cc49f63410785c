"""Call a store that is not safe for threads on one event loop, from any thread.

The wrapper knows none of the store's methods: it hands coroutine functions to that loop, and passes
on everything else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Coroutine
from typing import Any, cast

from leyden.store.base import LightningStore


def on_this_loop(store: LightningStore) -> LightningStore:
    """Return a wrapper of the store for any thread.

    Its methods run on the loop that is running now.
    """
    return cast(LightningStore, _OnOneLoop(store, asyncio.get_running_loop()))


@LightningStore.register
class _OnOneLoop:
    def __init__(self, store: LightningStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._loop = store, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return functools.partial(self._call, found) if inspect.iscoroutinefunction(found) else found

    async def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        work: Coroutine[Any, Any, Any] = method(*args, **kwargs)
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
