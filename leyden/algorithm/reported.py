"""Read from the heartbeats of a store's workers which version of the agent they run.

An algorithm needs this if its agent runs in other programs. The module knows workers, and no scores or resources.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from leyden.store.base import LightningStore
from leyden.types import Worker
from leyden.types.worker_health import health_of

logger = logging.getLogger(__name__)

AGENT_VERSION = "agent_version"
"""The key of the version in a worker's heartbeat statistics, which `LitAgentRunner` writes."""
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
        """Return the version of the agent that every healthy worker reports. None if a worker reports none, or if the
        workers run different versions, of which a warning is logged once.

        Without a healthy worker, return the last version that was read. If there is none, wait for the first worker, in
        the first call only.
        seconds: the longest wait; None: 5 seconds, which no other value exceeds.
        """
        until = time.monotonic() + min(_WAIT_SECONDS, _WAIT_SECONDS if seconds is None else seconds)
        while not (workers := await self._healthy()):
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

    async def _healthy(self) -> Sequence[Worker]:
        workers = await self._store.query_workers()
        now = (await self._store.statistics())["time"] if workers else 0.0
        return [each for each in workers if health_of(each, now) == "healthy"]

    def _warn(self, versions: tuple[str, ...]) -> None:
        """Log once that the workers run these versions of the agent."""
        if versions not in self._warned:
            self._warned.add(versions)
            logger.warning(
                "the workers run different versions of the agent (%s), so their scores are used in this run only; "
                "restart the workers with one version",
                ", ".join(versions),
            )


def _version(worker: Worker) -> str | None:
    return (worker.heartbeat_stats or {}).get(AGENT_VERSION)
