"""Run a coroutine on an event loop of its own in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_thread(work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Run the coroutine and return its result or raise its error. Cancelling waits for its end."""
    here, outcome = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(work, context=contextvars.copy_context())

    strays: list[BaseException] = []
    """An exception of another task that ends the loop (SystemExit)."""

    def settle() -> None:
        if strays:
            outcome.set_exception(strays[0])
        elif task.cancelled():
            outcome.cancel()
        elif error := task.exception():
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def run() -> None:
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
            with contextlib.suppress(RuntimeError):  # the program ends, and nothing waits for it
                here.call_soon_threadsafe(settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # it has ended meanwhile
            loop.call_soon_threadsafe(task.cancel)
        await asyncio.wait({outcome})
        raise
