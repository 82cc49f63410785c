"""The event loop that agents live on: one for the process, the same for every run in it.

An agent's clients (a module-level `AsyncOpenAI`, a session) keep connections that belong to the loop on which they were
first used; on another loop they fail. So a second `fit`, or two trainers at once, must not bring loops of their own.
The loop runs in a daemon thread from the first run on. This module knows nothing of runners.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

from leyden._lib.event_loops import end_tasks, new_own_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEFTOVER_SECONDS = 1.0
"""Seconds that tasks which agents left running may take to end once they are cancelled."""
_EXIT_SECONDS = 0.5
"""Seconds that agents may take to end when the program exits."""

_RESIDENCE: ContextVar[Residence | None] = ContextVar("leyden_residence", default=None)


class Residence:
    """One coroutine on the agents' loop, with every task that it or its agents start, so that none outlives it."""

    def __init__(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the coroutine. Safe from any thread.

        loop: the loop to use; None: the agents' loop of this process.
        """
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._home = AgentLoop.of_this_process() if loop is None else None
        self._loop = AgentLoop.of_this_process().loop if loop is None else loop
        self._work: asyncio.Task[None] | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._move_in, work, context=contextvars.copy_context())

    async def wait(self) -> None:
        """Return when the coroutine and the tasks it left have ended, or after `abandon`. Raise its error."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def cancel(self) -> None:
        """Cancel the coroutine. Safe from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._work and self._work.cancel())

    def abandon(self) -> None:
        """Let `wait` return, because an agent blocks the loop. The agent runs on; the next run gets another loop."""
        logger.warning(
            "an agent blocks the event loop of the runners and is left running; make it a sync agent, or call what "
            "blocks with asyncio.to_thread"
        )
        if self._home is not None:
            self._home.give_up()
        if not self._ended.done():
            self._ended.set_result(None)

    def add(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

    def _move_in(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the coroutine, in the loop's thread. Its tasks find this residence in their context."""
        _RESIDENCE.set(self)
        self._work = asyncio.get_running_loop().create_task(work)
        finished = asyncio.get_running_loop().create_task(self._finish_work(self._work))
        finished.add_done_callback(lambda _: self._settle())

    async def _finish_work(self, work: asyncio.Task[None]) -> None:
        """Wait for the coroutine, then cancel the tasks that its agents left behind."""
        await asyncio.wait({work})
        left = {task for task in self._tasks if not task.done()} - {asyncio.current_task()}
        if stubborn := await end_tasks(left, _LEFTOVER_SECONDS):
            logger.warning(
                "%d tasks that agents left behind ignore their cancellation: %s",
                len(stubborn),
                ", ".join(sorted({str(task.get_coro()) for task in stubborn})),
            )

    def _settle(self) -> None:
        """Let `wait` return, or raise the coroutine's error."""
        work = self._work
        assert work is not None
        if self._ended.done():
            return  # abandoned
        if (
            not work.done() or work.cancelled()
        ):  # not done: a second Ctrl-C cancelled `_finish_work` before the work ended
            self._ended.cancel()
        elif error := work.exception():
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class AgentLoop:
    """The event loop of this process's agents, and the thread that runs it."""

    _current: AgentLoop | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._finished = False
        self._turn = threading.Lock()
        """Held by the thread that runs the loop."""
        self._not_lent = threading.Event()
        """Cleared while `run_here` runs the loop in another thread."""
        self._not_lent.set()
        self.loop = new_own_loop()
        self.loop.set_task_factory(_new_task)
        self._thread = threading.Thread(target=self._run, name="leyden-agents", daemon=True)
        contextvars.Context().run(self._thread.start)  # from an empty context: the thread belongs to no trace
        atexit.register(self._finish)

    @classmethod
    def of_this_process(cls) -> AgentLoop:
        """Return this process's one loop; a forked child gets its own."""
        with cls._lock:
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            return cls._current

    def run_here(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the loop in the calling thread until `work` is done, and return its result. The loop's own thread rests
        meanwhile.

        Ctrl-C raises KeyboardInterrupt in the code that is running, as an agent at a breakpoint expects. Then `work` is
        cancelled and the interrupt is raised.
        """
        self._not_lent.clear()
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
            with self._turn:
                task = self.loop.create_task(work)
                task.add_done_callback(lambda _: self.loop.stop())
                try:
                    self._run_until_done(task)
                except (KeyboardInterrupt, SystemExit):
                    task.cancel()
                    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the first is the one to raise
                        self._run_until_done(task)
                    raise
                return task.result()
        finally:
            self._not_lent.set()

    def _run_until_done(self, task: asyncio.Task[Any]) -> None:
        while not task.done():  # an agent may call `loop.stop()`, and the stop that `run_here` requests may come late
            self.loop.run_forever()

    def give_up(self) -> None:
        """Abandon the loop, so that the next run gets a new one."""
        with self._lock:
            if AgentLoop._current is self:
                AgentLoop._current = None

    def _run(self) -> None:
        """Run the agents' loop, in its thread, until the program exits. An agent's `loop.stop()` or SystemExit does not
        end it. Waits while the loop is lent to another thread.
        """
        asyncio.set_event_loop(self.loop)
        while not self._finished:
            self._not_lent.wait()
            try:
                with self._turn:
                    self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio raises these out of `run_forever`
                logger.error("a task that an agent started raised %s; the others go on", type(error).__name__)

    def _finish(self) -> None:
        """End the loop and its thread at the exit of the program."""
        if self._pid != os.getpid():
            return  # a forked child, which has no such thread
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        self._thread.join(2 * _EXIT_SECONDS)  # an agent that blocks the loop ends with the process
        if not self.loop.is_running():
            self.loop.close()

    async def _end(self) -> None:
        """Cancel all tasks, so that agents leave their `with` blocks, and stop the loop."""
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()}, _EXIT_SECONDS)
        await self.loop.shutdown_asyncgens()  # they close clients and sessions that belong to the loop
        self._finished = True
        self.loop.stop()


def _new_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    residence = _RESIDENCE.get()
    if residence is not None:
        residence.add(task)
    return task
