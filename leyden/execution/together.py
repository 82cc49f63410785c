"""Two sides that end together: the algorithm on this loop, and runners wherever they are.

It knows neither threads nor processes: runners are something that can be waited for, cancelled and
abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Protocol

from leyden.execution.events import StopSignal
from leyden.utils.latch import Latch

_CANCEL_SECONDS = 1.5
"""The seconds that cancelled runners may take to end: more than an agent that swallows its
cancellation is given."""


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

    The algorithm is done: the runners finish what is under way. The runners are gone: the algorithm
    is notified (`deserted`) and awaited. An end is requested, or this is cancelled: the runners get
    `drain_seconds`. One side fails: the other is stopped at once, and the error is raised.
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
            ended.result()  # raises what ended them
            if not work.done():
                stop.deserted.set()
        await asyncio.shield(work)
        stop.set()
        await asyncio.wait({ended})  # they finish what is under way
    except asyncio.CancelledError:
        # The algorithm goes on meanwhile: a policy that it serves is what agents need to finish.
        await _end(runners, stop, ended, drain_seconds=drain_seconds)
        await _cancel(work)
        raise
    except BaseException:
        await _end(runners, stop, ended, drain_seconds=0.0)  # what is under way would fail for want of a policy
        await _cancel(work)
        raise
    finally:
        requested.cancel()
    ended.result()


async def _end(runners: Runners, stop: Latch, ended: asyncio.Future[None], *, drain_seconds: float) -> None:
    """Let the runners drain, then cancel them, then abandon them, so that the run ends in
    any case.
    """
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
