"""Find out which agent the workers of a store run, from their heartbeats.

An algorithm whose agent runs elsewhere learns the agent's version here. The module knows workers,
and no scores or resources.
"""

from __future__ import annotations

import asyncio
import logging
import time

from leyden.monitor.health import health_of
from leyden.store.base import LightningStore
from leyden.types import Worker

logger = logging.getLogger(__name__)

AGENT_VERSION = "agent_version"
"""The key of a worker's heartbeat statistics (`LitAgentRunner` writes it)."""
_WAIT_SECONDS = 5.0
"""Seconds to wait for the first worker, which reports as soon as it starts."""
_POLL_SECONDS = 0.05


class ReportedVersion:
    """The version of the agent that all workers report."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._known: str | None = None
        self._warned: set[tuple[str, ...]] = set()
        self._has_waited = False

    async def read(self, *, seconds: float | None = None) -> str | None:
        """Return the version of the agent that every healthy worker reports. None if a worker
        reports none, or if the workers run different versions.

        Without a healthy worker, return the last version, or wait for the first worker.

        seconds: the longest wait; None: 5 seconds.
        """
        until = time.monotonic() + min(_WAIT_SECONDS, _WAIT_SECONDS if seconds is None else seconds)
        while not (workers := await self._healthy_workers()):
            if self._known is not None or self._has_waited or time.monotonic() >= until:
                self._has_waited = True
                return self._known
            await asyncio.sleep(_POLL_SECONDS)
        versions = {str(version) for each in workers if (version := _version(each)) is not None}
        if len(versions) > 1:
            self._warn(tuple(sorted(versions)))
        is_shared = len(versions) == 1 and all(_version(each) is not None for each in workers)
        self._known = versions.pop() if is_shared else None
        return self._known

    async def _healthy_workers(self) -> list[Worker]:
        now = time.time()
        return [each for each in await self._store.query_workers() if health_of(each, now) == "healthy"]

    def _warn(self, versions: tuple[str, ...]) -> None:
        if versions not in self._warned:
            self._warned.add(versions)
            logger.warning(
                "the workers run different versions of the agent (%s), so their scores are used in this run only; "
                "restart the workers with one version",
                ", ".join(versions),
            )


def _version(worker: Worker) -> str | None:
    return (worker.heartbeat_stats or {}).get(AGENT_VERSION)
