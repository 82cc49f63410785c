"""`Sweeper`: the background tasks that the owner of a store runs. They end the attempts whose time is over, mark the
silent ones, and delete the rollouts that retention does not keep.

The module knows no lifecycle: `store.sweep()` and `store.prune()` decide. Both run on a schedule, never as a side
effect of a read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

from leyden._lib.clock import unix_time
from leyden._lib.options import check_number
from leyden.errors import StoreClosed, StoreError
from leyden.store.base import LightningStore
from leyden.types import Retention

logger = logging.getLogger(__name__)

_MIN_PAUSE_SECONDS = 0.01
"""The shortest pause between two sweeps."""
_PRUNE_STEP = 1000
"""The most rollouts that are deleted between two pauses. Each step first finds the rollouts to keep, which takes 50 ms
for a million rollouts."""
_SHOWN = 3
"""The most attempts that a line of the log names."""


class Sweeper:
    """Sweeps and prunes `store` during its `async with` block.

    interval_seconds: the longest time between two sweeps. There is also one at each deadline. A store that its server
        sweeps (`capabilities["swept"]`) is not swept here.
    retention: the limits; None keeps everything.
    prune_interval_seconds: the time between two prunes; one more runs at the end. Between two prunes the store may
        exceed the limits.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        interval_seconds: float = 1.0,
        retention: Retention | None = None,
        prune_interval_seconds: float = 5.0,
    ) -> None:
        check_number("interval_seconds", interval_seconds, above=0)
        check_number("prune_interval_seconds", prune_interval_seconds, above=0)
        self._store = store
        self._interval_seconds = interval_seconds
        self._retention = retention or Retention()
        self._prune_interval_seconds = prune_interval_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self.pruned = 0
        """The number of rollouts pruned so far."""

    async def __aenter__(self) -> Self:
        if not self._store.capabilities["swept"]:
            self._start(self._sweep, self._interval_seconds, "sweep")
        if not self._retention.keeps_everything:
            self._start(self._prune, self._prune_interval_seconds, "prune")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if kind is None and not self._retention.keeps_everything:
            with suppress(StoreError):  # the store's next owner prunes again
                await self._prune()

    def _start(self, work: Callable[[], Awaitable[float]], retry_seconds: float, name: str) -> None:
        self._tasks.append(asyncio.create_task(_repeat(work, retry_seconds, name), name=f"leyden-store-{name}"))

    async def _sweep(self) -> float:
        """Sweep once, and return the seconds until the next sweep."""
        by_status: dict[str, list[str]] = {}
        for attempt in await self._store.sweep():
            by_status.setdefault(attempt.status, []).append(f"{attempt.attempt_id} of {attempt.rollout_id}")
        for status, names in by_status.items():
            shown = names[:_SHOWN] + ["..."] * (len(names) > _SHOWN)
            logger.warning("%d attempts are now %s: %s", len(names), status, ", ".join(shown))
        deadline = await self._store.next_deadline()
        if deadline is None:
            return self._interval_seconds
        return min(self._interval_seconds, max(_MIN_PAUSE_SECONDS, deadline - unix_time()))

    async def _prune(self) -> float:
        """Delete all rollouts beyond the limits, step by step, and return the seconds until the next prune."""
        started, before = time.monotonic(), self.pruned
        step = _PRUNE_STEP
        while step == _PRUNE_STEP:
            step_started = time.monotonic()
            step = await self._store.prune(self._retention, limit=_PRUNE_STEP)
            self.pruned += step
            await asyncio.sleep(time.monotonic() - step_started)  # leave half of the time to other calls
        if pruned := self.pruned - before:
            seconds = time.monotonic() - started
            logger.info("deleted %d finished rollouts in %.1f s, %d in all", pruned, seconds, self.pruned)
        return self._prune_interval_seconds


async def _repeat(work: Callable[[], Awaitable[float]], retry_seconds: float, name: str) -> None:
    """Call `work` again and again until the store is closed, each time after the seconds that it returned. After an
    error, log it and wait for `retry_seconds`.

    name: what the log calls the work.
    """
    while True:
        try:
            await asyncio.sleep(await work())
        except StoreClosed:
            return
        except StoreError as error:
            logger.error("the %s failed and is tried again in %s s: %s", name, retry_seconds, error)
            await asyncio.sleep(retry_seconds)
        except Exception:  # no caller awaits this task, so an error would silently leave the store without a sweeper
            logger.exception("the %s failed unexpectedly and is tried again in %s s", name, retry_seconds)
            await asyncio.sleep(retry_seconds)
