"""What the monitor's tests share: a sink that remembers, and lets a test wait until it has heard something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from leyden.monitor import Alert

__all__ = ["SOON", "Heard"]

SOON = 30.0
"""Seconds that nothing here should need; a test that waits so long has failed."""


class Heard:
    """A sink."""

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._more = asyncio.Event()

    async def __call__(self, alert: Alert) -> None:
        self.alerts.append(alert)
        self._more.set()

    @property
    def told(self) -> list[tuple[str, str | None, bool]]:
        """Rule, worker, and whether it was resolved, in the order in which it was heard."""
        return [(alert.rule, alert.worker_id, alert.resolved) for alert in self.alerts]

    async def until(self, wanted: Callable[[Alert], bool]) -> Alert:
        """The next alert like this that is heard from now on."""
        begin = len(self.alerts)
        async with asyncio.timeout(SOON):
            while True:
                for alert in self.alerts[begin:]:
                    if wanted(alert):
                        return alert
                begin = len(self.alerts)
                self._more.clear()
                await self._more.wait()

    async def raised(self, rule: str, worker_id: str | None) -> Alert:
        """Heard from now on."""
        return await self.until(lambda a: (a.rule, a.worker_id, a.resolved) == (rule, worker_id, False))

    async def resolved(self, rule: str, worker_id: str | None) -> Alert:
        """Heard from now on."""
        return await self.until(lambda a: (a.rule, a.worker_id, a.resolved) == (rule, worker_id, True))
