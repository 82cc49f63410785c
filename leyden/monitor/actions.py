"""Actions that a monitor can take on an alert.

To write another one, write a class with the two methods of `Action`.
"""

from __future__ import annotations

import asyncio
import logging
import os

import psutil

from leyden.monitor.alert import Alert
from leyden.monitor.system import host_name
from leyden.store.base import LightningStore
from leyden.types import Worker

logger = logging.getLogger(__name__)


class PauseClaiming:
    """Pauses the worker that an alert is about while the alert is raised. A paused worker claims no rollouts.

    An alert about the store or the machine pauses all workers. A worker notices the pause with its next heartbeat,
    finishes its rollouts, and claims again when no alert holds it any more. A worker that was paused by hand before the
    alert stays paused.
    """

    def __init__(self) -> None:
        self._held: dict[str, set[tuple[str, str | None]]] = {}
        """The alerts that hold each worker (their rule and subject), by the worker's id."""
        self._paused_before: set[str] = set()
        """Workers that were paused already when the first alert came to hold them."""

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        for worker in await _workers_of(store, alert):
            holding = self._held.setdefault(worker.worker_id, set())
            if worker.paused and not holding:
                self._paused_before.add(worker.worker_id)
            holding.add((alert.rule, alert.worker_id))
            if not worker.paused:
                self._paused_before.discard(worker.worker_id)
                await store.pause_worker(worker.worker_id)

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """Resume the alert's workers, except workers that another alert holds or a person paused."""
        for worker in await _workers_of(store, alert):
            holding = self._held.get(worker.worker_id, set())
            holding.discard((alert.rule, alert.worker_id))
            if holding:
                continue
            if worker.paused and worker.worker_id not in self._paused_before:
                await store.pause_worker(worker.worker_id, paused=False)
            self._paused_before.discard(worker.worker_id)


class RestartWorker:
    """Kills the process of the worker that an alert is about, so that the strategy (`ipc`, `cs`) starts it again.

    Only descendants of this process are killed, because nothing would restart any other process. Give the action to the
    `Trainer` that starts the runners. A worker elsewhere is left alone, which the log reports.
    """

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        for worker in await _workers_of(store, alert) if alert.worker_id is not None else ():
            if await asyncio.to_thread(_kill, worker):
                logger.warning("killed the process of %s, because of the alert %s", worker.worker_id, alert.rule)
            else:
                logger.warning(
                    "%s cannot be restarted from here: its process was not started by this one", worker.worker_id
                )

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """Do nothing, because there is nothing to undo."""


def _kill(worker: Worker) -> bool:
    """Kill the worker's process if it is a descendant of this one. Return whether it was."""
    stats = worker.heartbeat_stats or {}
    if stats.get("host") != host_name():
        return False
    try:
        process = psutil.Process(stats["pid"])
        if process.create_time() != stats["process_start_time"]:  # another process has its number by now
            return False
        if os.getpid() not in (parent.pid for parent in process.parents()):
            return False
        process.kill()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return True


async def _workers_of(store: LightningStore, alert: Alert) -> list[Worker]:
    return [w for w in await store.query_workers() if alert.worker_id is None or w.worker_id == alert.worker_id]
