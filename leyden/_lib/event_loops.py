"""Event loops beside the caller's: in a thread that serves other threads, for one coroutine, or for a child process.

`LoopThread` runs coroutines for callers in other threads. `LoopWork` runs one coroutine on a loop and a thread that end
with it. `run_on_own_loop` runs the main coroutine of a child process. Every loop here closes its asynchronous
generators before it is closed, and with them the sessions and connections that `PerLoop` keeps for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import selectors
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEFTOVER_SECONDS = 1.0
"""The seconds that remaining tasks have to end after they were cancelled."""


def new_own_loop() -> asyncio.AbstractEventLoop:
    """Return an asyncio event loop for this process alone. A forked child, which would take its parent's events and
    write to its parent's connections, exits with status 0 if it goes on running the loop.
    """
    return asyncio.SelectorEventLoop(_OwnSelector())


class _OwnSelector(selectors.DefaultSelector):
    """A selector that ends a forked child in the place of waiting for its parent's events."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if os.getpid() != self._pid:
            os._exit(0)
        return super().select(timeout)


def run_on_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a new event loop, cancel the remaining tasks, and return the result of `main`.

    `asyncio.run` waits without limit for a task that swallows its cancellation, and for threads of the default
    executor. This function abandons both, the tasks after a second, so use it only in a process that ends afterwards.
    """

    async def end() -> None:
        if stubborn := await end_tasks(asyncio.all_tasks() - {asyncio.current_task()}, _LEFTOVER_SECONDS):
            logger.warning("%d tasks ignored their cancellation and are left behind", len(stubborn))
        await asyncio.wait({asyncio.ensure_future(loop.shutdown_asyncgens())}, timeout=_LEFTOVER_SECONDS)

    loop = new_own_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            loop.run_until_complete(end())
        finally:
            loop.close()


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None], seconds: float | None = None) -> set[asyncio.Task[Any]]:
    """Cancel tasks of the running loop, wait for their end, `seconds` at most, and return the unfinished ones."""
    left = {task for task in tasks if task is not None}
    for task in left:
        task.cancel()
    return (await asyncio.wait(left, timeout=seconds))[1] if left else set()


class LoopThread:
    """An event loop in its own thread, which runs coroutines for callers in any other thread, until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        contextvars.Context().run(self._thread.start)  # from an empty context: the thread belongs to no trace

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread. Block until it ends, and return its result or raise its error.

        Ctrl-C in the calling thread cancels the coroutine.
        """
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def stop(self, seconds: float | None = None) -> None:
        """Cancel the tasks that are left, and wait for the thread's end, `seconds` at most. Safe to repeat."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(end_tasks(asyncio.all_tasks(self.loop)))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


class LoopWork(Generic[T]):
    """A coroutine on a new event loop in a new thread, which end with it. It sees the creator's context variables."""

    def __init__(self, work: Coroutine[Any, Any, T], *, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(work)
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        """Done when the loop is closed, with the coroutine's result or error; CancelledError is an error here."""
        self.ended.set_running_or_notify_cancel()  # so that a waiter that gives up does not cancel it
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def cancel(self) -> None:
        """Cancel the coroutine. Safe from any thread, and to repeat."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        """Run the coroutine to its end. A SystemExit in another task of the loop ends the loop early; the coroutine is
        then cancelled and awaited, and that error is the outcome.
        """
        loop, error, result = self._loop, None, None
        try:
            try:
                result = loop.run_until_complete(self._task)
            except BaseException as raised:  # noqa: BLE001 -- the outcome, for the waiter
                error = raised
                if not self._task.done():
                    self._task.cancel()
                    with contextlib.suppress(BaseException):
                        loop.run_until_complete(self._task)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            if error is not None:
                self.ended.set_exception(error)
            else:
                self.ended.set_result(result)  # pyright: ignore[reportArgumentType] -- set unless there is an error


async def run_in_thread(work: Coroutine[Any, Any, T], *, name: str) -> T:
    """Run the coroutine on a new event loop in a new thread. Return its result or raise its error.

    Cancelling this call cancels the coroutine and waits for its end.
    """
    running = LoopWork(work, name=name)
    ended = asyncio.wrap_future(running.ended)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait({ended})
        raise
    finally:
        ended.cancel()  # after a second cancellation the end has no receiver, whose loop may be closed by then
