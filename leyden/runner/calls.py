"""Call an agent so that nothing it does can hurt its siblings: not an exception of any kind, not a hang.

An async agent runs as a task of the runner's loop and is cancelled when its time is over; one that swallows the cancellation is
abandoned. A sync agent runs in a daemon thread of its own and is abandoned, since a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from leyden.utils.text import describe_error

__all__ = ["AgentTimeout", "call_async", "call_sync"]

logger = logging.getLogger(__name__)

_CANCEL_GRACE_SECONDS = 1.0


class AgentTimeout(Exception):
    """The agent did not return in its time."""


class _Escaped(Exception):
    """Carries SystemExit, KeyboardInterrupt and their like out of the agent without ending the event loop."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(f"{type(original).__name__}: {describe_error(original)}")
        self.original = original


async def call_async(agent: Callable[[], Awaitable[Any]], timeout_seconds: float | None) -> Any:
    """The async agent's result. Raises what it raised, or AgentTimeout; cancelling the caller cancels the agent."""

    async def contained() -> Any:
        try:
            return await agent()
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise _Escaped(error) from error

    task = asyncio.ensure_future(contained())
    try:
        await asyncio.wait({task}, timeout=timeout_seconds)
        if not task.done():
            await _cancel(task)
            raise AgentTimeout
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    return _result(task)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_CANCEL_GRACE_SECONDS)
    if not task.done():
        logger.warning(
            "an agent did not end within %.1f s of its cancellation and is left to itself", _CANCEL_GRACE_SECONDS
        )
        task.add_done_callback(_retrieve)
    else:
        _retrieve(task)


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _result(task: asyncio.Future[Any]) -> Any:
    if task.cancelled():
        raise RuntimeError("the agent cancelled itself (asyncio.CancelledError)")
    error = task.exception()
    if isinstance(error, _Escaped):
        raise RuntimeError(f"the agent raised {error}") from error.original
    return task.result()


async def call_sync(agent: Callable[[], Any], timeout_seconds: float | None, *, name: str) -> Any:
    """The sync agent's result, from a daemon thread called `name` that sees the caller's context variables."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return  # abandoned
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:
            wrapped = RuntimeError(f"the agent raised {type(error).__name__}: {describe_error(error)}")
            wrapped.__cause__ = error
            future.set_exception(wrapped)

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(agent)
        except BaseException as error:  # noqa: BLE001 -- handed to the awaiting runner
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            pass  # the loop has ended; nobody waits for this agent any more

    threading.Thread(target=work, name=name, daemon=True).start()
    done, _ = await asyncio.wait({future}, timeout=timeout_seconds)
    if not done:
        future.cancel()
        raise AgentTimeout
    return future.result()
