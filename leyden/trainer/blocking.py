"""Run a coroutine from synchronous code, whether or not an event loop runs in the thread. The first Ctrl-C or SIGTERM
cancels the coroutine; a second one does not wait for its end.
"""

from __future__ import annotations

import asyncio
import copy
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from leyden._lib.event_loops import LoopWork
from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.agent_loop import AgentLoop
from leyden.execution.runner import Runner
from leyden.execution.runner.calls import CallingThread, QuitDebugging, call_here

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Debugged:
    """A run under a debugger: agent code on the calling thread, one rollout at a time, no time limits."""

    strategy: ExecutionStrategy
    runner: Runner[Any]
    _caller: CallingThread | None
    """Calls sync agents on this thread if a loop runs here already, as in a notebook."""

    @classmethod
    def of(cls, runner: Runner[Any]) -> Debugged:
        """Return a strategy and a copy of the runner with which agents run on the calling thread."""
        caller = CallingThread() if _loop_runs_here() else None
        runner = copy.copy(runner)
        runner.debugger = caller or call_here
        return cls(SharedMemoryExecutionStrategy(main_thread="runner"), runner, caller)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a loop of this thread, and return its result.

        If another loop runs here already, the coroutine runs in another thread, and this thread calls the sync agents.
        """
        try:
            if self._caller is None:
                return AgentLoop.of_this_process().run_here(_until_terminated(work))
            return _in_thread(work, self._caller)
        except QuitDebugging as quitting:
            raise quitting.original from None


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, block until it has ended, and return its result.

    Ctrl-C cancels the coroutine, and raises KeyboardInterrupt when it has ended. A second Ctrl-C does not wait. If a
    loop runs in this thread already (a notebook), the coroutine runs in a loop of another thread, and the caller still
    blocks.
    """
    return _in_thread(work) if _loop_runs_here() else asyncio.run(_until_terminated(work))


def _loop_runs_here() -> bool:
    """Return whether an event loop is running in this thread, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine. In the main thread, treat SIGTERM as Ctrl-C.

    Any handler of SIGTERM is replaced meanwhile, also if SIGTERM is ignored, as in programs that a shell starts with
    `&`.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not ours to handle
        return await work
    loop, task, terminated = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task()), False

    def terminate(number: int, frame: object) -> None:
        """Cancel the task at the first SIGTERM; at the second, interrupt whatever runs."""
        nonlocal terminated
        if terminated:
            raise KeyboardInterrupt
        terminated = True
        loop.call_soon_threadsafe(task.cancel)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        return await work
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _in_thread(work: Coroutine[Any, Any, T], caller: CallingThread | None = None) -> T:
    """Run a coroutine in a loop of a new thread, and return its result or raise its error. Ctrl-C cancels the coroutine
    and waits for its end.

    caller: meanwhile runs calls of the coroutine in the calling thread.
    """
    running = LoopWork(work, name="leyden-fit")
    try:
        if caller is not None:
            running.ended.add_done_callback(lambda _: caller.end())
            caller.serve()
        wait([running.ended])
    except KeyboardInterrupt:
        running.cancel()
        wait([running.ended])
        raise
    return running.ended.result()
