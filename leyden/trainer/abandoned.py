"""End an algorithm whose runners have all ended because each had done its `max_rollouts`.

The algorithm continues as long as no rollout is left. If one is left, no runner will run it and the algorithm would
wait for ever, so it is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from leyden._lib.aio import first_done
from leyden.execution.execution_strategy import StopSignal
from leyden.store.base import LightningStore
from leyden.types.rollout import ROLLOUT_FINISHED

_LOOK_SECONDS = 1.0
"""Seconds between two checks for rollouts of an algorithm that continues without runners."""


async def until_done_or_deserted(algorithm: Coroutine[Any, Any, None], event: StopSignal, store: LightningStore) -> int:
    """Run the algorithm, and return 0 when it is done. Raise its error.

    If all runners have ended and rollouts are left, cancel it and return how many are left.
    """
    async with first_done(algorithm, event.deserted.wait_async()) as (work, _):
        while not work.done():
            counts = (await store.statistics())["rollouts_by_status"]
            if left := sum(count for status, count in counts.items() if status not in ROLLOUT_FINISHED):
                return left
            await asyncio.wait({work}, timeout=_LOOK_SECONDS)
        work.result()
    return 0


async def until_stopped_or_deserted(event: StopSignal) -> None:
    """Wait until the run is stopped or all runners have ended by themselves."""
    async with first_done(event.wait_async(), event.deserted.wait_async()):
        pass
