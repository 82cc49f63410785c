"""Call an agent so that neither its exceptions, of any kind, nor its hanging can hurt the other agents of this process.

An async agent runs as a task of the runner's loop and is cancelled when its time is over or its rollout is cancelled;
one that swallows the cancellation is abandoned. A sync agent runs in a daemon thread of its own and is abandoned, since
a thread cannot be stopped. A child that an agent forks ends where the agent ends, because it must not go on as a second
runner.
"""

from __future__ import annotations

import asyncio
import bdb
import contextlib
import contextvars
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

from leyden._lib.text import error_line, inner_errors

logger = logging.getLogger(__name__)

_CANCEL_GRACE_SECONDS = 1.0
"""The seconds that a cancelled agent may take to end, before it is abandoned."""
_ENDS: dict[asyncio.Future[Any], float] = {}
"""The monotonic time at which the time limit of each running async agent ends."""
AGENTS_ARE_DAEMONS: ContextVar[bool] = ContextVar("leyden_agents_are_daemons", default=True)
"""Whether sync agents run in daemon threads, so that the program can end without them."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ENDS.clear)  # the parent's agents do not run in the child


class AgentTimeout(Exception):
    """The agent did not return within its time limit."""


class AgentCancelled(Exception):
    """The agent was ended because its rollout was cancelled."""


class _Escaped(Exception):
    """Carries a BaseException that is no Exception (SystemExit, KeyboardInterrupt) out of the agent's task, because
    asyncio would end the event loop on it.
    """

    def __init__(self, original: BaseException) -> None:
        super().__init__(error_line(original))
        self.original = original


def overdue_seconds() -> float:
    """Return how many seconds ago the earliest time limit of the running async agents passed; negative if none has
    passed. Safe from any thread.

    More than a few seconds mean that the event loop is blocked, so that no task can cancel the agent.
    """
    return time.monotonic() - min(_ENDS.copy().values(), default=float("inf"))


async def call_async(
    agent: Callable[[], Awaitable[Any]],
    timeout_seconds: float | None,
    *,
    cancelled: asyncio.Future[None] | None = None,
) -> Any:
    """Return the async agent's result. Cancelling this call cancels the agent.

    timeout_seconds: then the agent is cancelled and AgentTimeout is raised; None: no limit.
    cancelled: once the caller resolves this future, the agent is cancelled and AgentCancelled is raised.
    Raise the agent's Exception as it is, and RuntimeError around anything else that it raised, such as SystemExit.
    """
    pid = os.getpid()

    async def contained() -> Any:
        """Run the agent. Wrap an error that would end the event loop, and end a process that the agent has forked."""
        try:
            return await agent()
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise _Escaped(error) from error
        finally:
            _end_if_forked(pid, sys.exception())

    task = asyncio.ensure_future(contained())
    if timeout_seconds is not None:
        _ENDS[task] = time.monotonic() + timeout_seconds
    try:
        await _wait(task, timeout_seconds, cancelled)
        if not task.done():
            await _cancel(task)
            raise _why_ended(cancelled)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    finally:
        _ENDS.pop(task, None)
    return _result(task)


async def _wait(
    agent: asyncio.Future[Any], timeout_seconds: float | None, cancelled: asyncio.Future[None] | None
) -> None:
    either = {agent} if cancelled is None else {agent, cancelled}
    await asyncio.wait(either, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)


def _why_ended(cancelled: asyncio.Future[None] | None) -> AgentCancelled | AgentTimeout:
    """Return the error for an agent that was stopped: a cancellation, or else its timeout."""
    return AgentCancelled() if cancelled is not None and cancelled.done() else AgentTimeout()


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel the agent's task. Leave it running, with a warning, if it does not end in a second."""
    task.cancel()
    await asyncio.wait({task}, timeout=_CANCEL_GRACE_SECONDS)
    if not task.done():
        logger.warning(
            "an agent did not end within %.1f s of its cancellation and is left running", _CANCEL_GRACE_SECONDS
        )
        task.add_done_callback(_retrieve)
    else:
        _retrieve(task)


def _end_if_forked(pid: int, error: BaseException | None) -> None:
    """End this process if an agent of process `pid` forked it, with the exit code of an uncaught `error`."""
    # GeneratorExit: not the agent's end, but a coroutine of the parent that the child collects.
    if os.getpid() == pid or isinstance(error, GeneratorExit):
        return
    code = error.code if isinstance(error, SystemExit) else error and 1  # None, like success, without an error
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Read the task's error, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def _result(task: asyncio.Future[Any]) -> Any:
    """Return the result of an agent's task. Raise its error, as a RuntimeError where it would end the runner."""
    if task.cancelled():
        raise RuntimeError(_CANCELLED_ITSELF)
    error = task.exception()
    if isinstance(error, _Escaped):
        if _holds(error.original, asyncio.CancelledError):
            raise RuntimeError(_CANCELLED_ITSELF) from error.original
        raise RuntimeError(f"the agent raised {error}") from error.original
    return task.result()


async def call_sync(
    agent: Callable[[], Any],
    timeout_seconds: float | None,
    *,
    name: str,
    cancelled: asyncio.Future[None] | None = None,
) -> Any:
    """Return the sync agent's result, from a thread called `name` that sees the caller's context variables. Cancelling
    this call abandons the thread.

    timeout_seconds: then the thread is abandoned and AgentTimeout is raised; None: no limit.
    cancelled: once the caller resolves this future, the thread is abandoned and AgentCancelled is raised.
    Raise the agent's Exception as it is, and RuntimeError around anything else that it raised, such as SystemExit or
    StopIteration (which a future cannot hold).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context, pid = contextvars.copy_context(), os.getpid()

    def settle(result: Any, error: BaseException | None) -> None:
        """Resolve the future, in the event loop. Wrap an error that a future cannot hold."""
        if future.done():
            return  # abandoned
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:
            wrapped = RuntimeError(f"the agent raised {error_line(error)}")
            wrapped.__cause__ = error
            future.set_exception(wrapped)

    def work() -> None:
        """Run the agent, in its thread, and pass its result or error to the event loop."""
        result, failure = None, None
        try:
            result = context.run(agent)
        except BaseException as error:  # noqa: BLE001 -- handed to the awaiting runner
            failure = error
        _end_if_forked(pid, failure)
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            pass  # the loop has ended, so no caller waits for this agent any more

    threading.Thread(target=work, name=name, daemon=AGENTS_ARE_DAEMONS.get()).start()
    await _wait(future, timeout_seconds, cancelled)
    if not future.done():
        future.cancel()
        raise _why_ended(cancelled)
    return future.result()


# ---- for someone with a debugger -----------------------------------------------------------------

Debugger = Callable[[Callable[[], Any]], Awaitable[Any]]
"""A function that calls a sync agent on the thread that a debugger expects."""


class QuitDebugging(Exception):
    """Carries the debugger's "quit", or Ctrl-C, out of the agent and to the end of the run."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(error_line(original))
        self.original = original


async def call_here(agent: Callable[[], Any]) -> Any:
    """Call the sync agent on the thread of the running loop, which it blocks. Implements `Debugger`."""
    return _call_beside_loop(agent)


def _call_beside_loop(agent: Callable[[], Any]) -> Any:
    """Call a function on a thread whose event loop is running, so that it may run its own loop (`asyncio.run`). The
    thread's loop is hidden meanwhile.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return agent()
    finally:
        asyncio._set_running_loop(loop)


class CallingThread:
    """Makes an event loop's calls of sync agents on another thread: the one that runs `serve`.

    Implements `Debugger`.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    async def __call__(self, agent: Callable[[], Any]) -> Any:
        """Return the result of the sync agent, called on the thread that runs `serve`."""
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()

        def call() -> None:
            """Call the agent, on the thread of `serve`, and settle the future on its own loop."""
            try:
                result, failure = context.run(_call_beside_loop, agent), None
            except BaseException as error:
                if _holds(error, KeyboardInterrupt):
                    raise KeyboardInterrupt from error  # out of `serve`: Ctrl-C ends the run
                result, failure = None, error
            loop.call_soon_threadsafe(_settle, future, result, failure)

        self._calls.put(call)
        return await future

    def serve(self) -> None:
        """Run the requested calls in this thread until `end`. Raise KeyboardInterrupt, also one of an agent."""
        while (call := self._calls.get()) is not None:
            call()

    def end(self) -> None:
        self._calls.put(None)


def _settle(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    """Set a future to a result or an error, unless its waiter has been cancelled."""
    if future.done():
        return  # cancelled
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure if not isinstance(failure, StopIteration) else RuntimeError(repr(failure)))


async def call_to_debug(agent: Callable[[], Awaitable[Any]]) -> Any:
    """Return the agent's result, without a time limit.

    Raise the agent's Exception as it is, RuntimeError around anything else, and QuitDebugging after Ctrl-C or the
    debugger's "quit". A cancellation of the caller is raised as it is.
    """
    try:
        return await agent()
    except BaseException as error:
        task = asyncio.current_task()
        if _holds(error, asyncio.CancelledError):
            if task is None or task.cancelling():
                raise asyncio.CancelledError from error
            raise RuntimeError(_CANCELLED_ITSELF) from None
        if _holds(error, bdb.BdbQuit, KeyboardInterrupt):
            raise QuitDebugging(error) from error
        if isinstance(error, Exception | GeneratorExit):
            raise
        raise RuntimeError(f"the agent raised {error_line(error)}") from error


def _holds(error: BaseException, *kinds: type[BaseException]) -> bool:
    return any(isinstance(inner, kinds) for inner in inner_errors(error))


_CANCELLED_ITSELF = "the agent cancelled itself (asyncio.CancelledError)"
