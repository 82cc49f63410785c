"""Work that crosses event loops: a coroutine on a loop of its own, and a store that one loop owns.

The store's wrapper names no method of a store: it runs every coroutine method on the owning loop, and passes on every
other attribute.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from leyden.store.base import LightningStore

T = TypeVar("T")


async def run_in_thread(work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Run the coroutine on a new event loop in a new thread. Return its result or raise its error.

    Cancelling this call cancels the coroutine and waits for its end.
    """
    here, outcome = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(work, context=contextvars.copy_context())

    strays: list[BaseException] = []
    """The exceptions of other tasks that end the loop, such as SystemExit."""

    def settle() -> None:
        """Set the outcome, in the caller's loop."""
        if strays:
            outcome.set_exception(strays[0])
        elif task.cancelled():
            outcome.cancel()
        elif error := task.exception():
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def run() -> None:
        """Run the task to its end on the new loop, then settle the outcome on the caller's loop.

        A SystemExit in another task ends the loop early; `task` is then cancelled and awaited.
        """
        try:
            try:
                loop.run_until_complete(task)
            except BaseException as error:  # noqa: BLE001 -- `settle` says what it was
                if not task.done():
                    strays.append(error)
                    task.cancel()
                    with contextlib.suppress(BaseException):
                        loop.run_until_complete(task)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: the program ends
                here.call_soon_threadsafe(settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the task has ended meanwhile
            loop.call_soon_threadsafe(task.cancel)
        await asyncio.wait({outcome})
        raise


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
