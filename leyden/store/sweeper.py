"""Whoever owns a store runs a `Sweeper`: it ends the attempts whose time is over, and marks the silent ones.

It knows no lifecycle: `store.sweep()` decides. Sweeping is scheduled here, never a side effect of a read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Self

from leyden.errors import StoreClosed, StoreError
from leyden.store.base import LightningStore

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)

_SHORTEST_SECONDS = 0.01
_SHOWN = 3
"""How many attempts a line of the log names."""


class Sweeper:
    """Sweeps `store` at each deadline, and at least every `interval_seconds`, between `async with` and its end."""

    def __init__(self, store: LightningStore, *, interval_seconds: float = 1.0) -> None:
        self._store = store
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="leyden-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.sleep(await self._sweep())
            except StoreClosed:
                return
            except StoreError as error:
                logger.error("the sweep failed and is tried again in %s s: %s", self._interval_seconds, error)
                await asyncio.sleep(self._interval_seconds)

    async def _sweep(self) -> float:
        """Sweep once; how many seconds until the next time."""
        by_status: dict[str, list[str]] = {}
        for attempt in await self._store.sweep():
            by_status.setdefault(attempt.status, []).append(f"{attempt.attempt_id} of {attempt.rollout_id}")
        for status, names in by_status.items():
            shown = names[:_SHOWN] + ["..."] * (len(names) > _SHOWN)
            logger.warning("%d attempts are now %s: %s", len(names), status, ", ".join(shown))
        deadline = await self._store.next_deadline()
        if deadline is None:
            return self._interval_seconds
        return min(self._interval_seconds, max(_SHORTEST_SECONDS, deadline - time.time()))
