"""Run an algorithm on this loop beside runners elsewhere, and end both together.

This module knows neither threads nor processes: runners are an object that can be waited for, cancelled and abandoned
(`Runners`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Protocol

from leyden._lib.aio import Latch
from leyden.execution.execution_strategy import StopSignal

_CANCEL_SECONDS = 1.5
"""The seconds that cancelled runners may take to end. They must be more than the second that a runner gives an agent
that ignores its cancellation."""


class Runners(Protocol):
    """All runners of a run. The `Latch` that stops them was passed to them when they started."""

    async def wait(self) -> None:
        """Return when the runners have ended. Raise the error that ended them."""
        ...

    def cancel(self) -> None:
        """Cancel the rollouts under way; the runners end soon."""
        ...

    def abandon(self) -> None:
        """Stop waiting for runners that have not ended; `wait` returns."""
        ...


async def run_together(
    algorithm: Coroutine[Any, Any, None], runners: Runners, stop: StopSignal, *, drain_seconds: float
) -> None:
    """Run the algorithm beside the runners until both have ended.

    - When the algorithm is done, the runners finish the attempts in flight.
    - When all runners have ended first, the algorithm is notified (`stop.deserted`) and awaited.
    - When the algorithm requests the end of the runners, they get `drain_seconds`, and the
      algorithm is awaited.
    - When this call is cancelled, the runners get `drain_seconds`; then the algorithm is cancelled.
    - When one side fails, the other is stopped at once, and the error is raised.
    """
    ended = asyncio.ensure_future(runners.wait())
    ended.add_done_callback(lambda _: stop.ended.set())
    work = asyncio.ensure_future(algorithm)
    requested = asyncio.ensure_future(stop.end_requested.wait_async())
    try:
        await asyncio.wait({work, ended, requested}, return_when=asyncio.FIRST_COMPLETED)
        if requested.done():
            await _end(runners, stop, ended, drain_seconds=drain_seconds)
            await asyncio.shield(work)
            return
        if ended.done():
            ended.result()  # raises the runners' error, if they failed
            if not work.done():
                stop.deserted.set()
        await asyncio.shield(work)
        stop.set()
        await asyncio.wait({ended})  # the runners finish the attempts in flight
    except asyncio.CancelledError:
        # The algorithm goes on while the runners drain, because agents may need a policy that it
        # serves.
        await _end(runners, stop, ended, drain_seconds=drain_seconds)
        await _cancel(work)
        raise
    except BaseException:
        # No time to drain: without the algorithm agents may have no policy to call, and would fail.
        await _end(runners, stop, ended, drain_seconds=0.0)
        await _cancel(work)
        raise
    finally:
        requested.cancel()
    ended.result()


async def _end(runners: Runners, stop: Latch, ended: asyncio.Future[None], *, drain_seconds: float) -> None:
    """Let the runners drain, then cancel them, then abandon them, so that the run ends in any case."""
    stop.set()
    await asyncio.wait({ended}, timeout=drain_seconds)
    if not ended.done():
        runners.cancel()
        await asyncio.wait({ended}, timeout=_CANCEL_SECONDS)
    if not ended.done():
        runners.abandon()
    with contextlib.suppress(asyncio.CancelledError, Exception):  # the first error is the one to report
        await ended


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
