"""Run a coroutine from synchronous code, under a running loop or without one, so that Ctrl-C and
SIGTERM cancel it once.
"""

from __future__ import annotations

import asyncio
import copy
import signal
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.agent_loop import AgentLoop
from leyden.runner import Runner
from leyden.runner.calls import CallingThread, QuitDebugging, call_here

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Debugged:
    """A run under a debugger: agent code on the calling thread, one rollout at a time, no time
    limits.
    """

    strategy: ExecutionStrategy
    runner: Runner[Any]
    _caller: CallingThread | None
    """Calls the sync agents if this thread already runs a loop, as in a notebook."""

    @classmethod
    def of(cls, runner: Runner[Any]) -> Debugged:
        """Return a strategy, and a copy of the runner, that suit a debugger in the calling
        thread.
        """
        caller = CallingThread() if _loop_runs_here() else None
        runner = copy.copy(runner)
        runner.debugger = caller or call_here
        return cls(SharedMemoryExecutionStrategy(main_thread="runner"), runner, caller)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result.

        Its loop runs in this thread. If another loop runs here already, the coroutine runs in
        another thread, and this thread calls the sync agents.
        """
        try:
            if self._caller is None:
                return AgentLoop.of_this_process().run_here(_until_terminated(work))
            return _in_thread(work, self._caller)
        except QuitDebugging as quitting:
            raise quitting.original from None


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result.

    Ctrl-C cancels it, and raises KeyboardInterrupt when it has ended. A second Ctrl-C does not
    wait. If a loop runs in this thread already (a notebook), the coroutine runs on a loop of its
    own in another thread, and the caller blocks all the same.
    """
    return _in_thread(work) if _loop_runs_here() else asyncio.run(_until_terminated(work))


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    """Await the work. In the main thread, treat SIGTERM as Ctrl-C.

    This replaces any handler of SIGTERM for the time of the work, and works where SIGTERM is
    ignored, as in programs that a shell starts with `&`.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not ours to handle
        return await work
    loop, task, terminated = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task()), False

    def terminate(number: int, frame: object) -> None:
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
    """Run the coroutine in a loop of a new thread, and return its result or raise its error.

    caller: runs work for the coroutine in the calling thread meanwhile. Ctrl-C cancels the
    coroutine and waits for its end.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def run() -> None:
        try:
            results.append(loop.run_until_complete(task))
        except BaseException as error:  # noqa: BLE001 -- raised again in the caller's thread
            errors.append(error)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            if caller is not None:
                caller.end()

    thread = threading.Thread(target=run, name="leyden-fit", daemon=True)
    thread.start()
    try:
        if caller is not None:
            caller.serve()
        thread.join()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
