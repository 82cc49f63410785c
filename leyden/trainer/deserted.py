"""End an algorithm whose runners have all ended because each had done its `max_rollouts`.

The algorithm continues as long as no rollout is left. If one is left, no runner will run it and the
algorithm would wait for ever, so it is cancelled.
"""

from __future__ import annotations

import asyncio

from leyden.execution.events import StopSignal
from leyden.store.base import LightningStore
from leyden.types.rollout import ROLLOUT_FINISHED

_LOOK_SECONDS = 1.0
"""Seconds between two checks for rollouts of an algorithm that continues without runners."""


async def until_done_or_deserted(work: asyncio.Task[None], event: StopSignal, store: LightningStore) -> int:
    """Wait for the algorithm's task, and return 0 when it is done. Raise its error.

    If all runners have ended and rollouts are left, cancel the task and return how many are left.
    """
    deserted = asyncio.ensure_future(event.deserted.wait_async())
    try:
        await asyncio.wait({work, deserted}, return_when=asyncio.FIRST_COMPLETED)
        while not work.done():
            if left := await _unfinished(store):
                return left
            await asyncio.wait({work}, timeout=_LOOK_SECONDS)
        work.result()
        return 0
    finally:
        deserted.cancel()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def until_stopped_or_deserted(event: StopSignal) -> None:
    """Wait until the run is stopped or all runners have ended by themselves."""
    either = [asyncio.ensure_future(latch.wait_async()) for latch in (event, event.deserted)]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiting in either:
            waiting.cancel()


async def _unfinished(store: LightningStore) -> int:
    """Return how many rollouts of the store have not finished."""
    counts = (await store.statistics())["rollouts_by_status"]
    return sum(count for status, count in counts.items() if status not in ROLLOUT_FINISHED)
