"""What can be done about an alert by itself. To write another one: a class with the two methods of `Action`."""

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
    """While its alert is raised, the worker that it is about claims nothing; no worker does, if it is about none.

    A worker learns of it with its next heartbeat, finishes what it has, and goes on when no alert holds it any more.
    """

    def __init__(self) -> None:
        self._held: dict[str, set[tuple[str, str | None]]] = {}
        """Which alerts hold a worker."""

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        """Ask them to pause."""
        for worker in await _subjects(store, alert):
            self._held.setdefault(worker.worker_id, set()).add((alert.rule, alert.worker_id))
            if not worker.paused:
                await store.pause_worker(worker.worker_id)

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """Let those go on that no other alert holds."""
        for worker in await _subjects(store, alert):
            holding = self._held.get(worker.worker_id, set())
            holding.discard((alert.rule, alert.worker_id))
            if worker.paused and not holding:
                await store.pause_worker(worker.worker_id, paused=False)


class RestartWorker:
    """Kills the process of the worker that the alert is about; the strategy (`ipc`, `cs`) that keeps it alive starts another one.

    Only a process that comes from this one, so that nothing is killed that nobody would start again: it belongs in the `Trainer` that
    has the runners. A worker elsewhere is left as it is, and the log says so.
    """

    async def raised(self, store: LightningStore, alert: Alert) -> None:
        """Kill it."""
        for worker in await _subjects(store, alert) if alert.worker_id is not None else ():
            if await asyncio.to_thread(_killed, worker):
                logger.warning("killed the process of %s, because of the alert %s", worker.worker_id, alert.rule)
            else:
                logger.warning("%s cannot be restarted from here: its process is not one of ours", worker.worker_id)

    async def resolved(self, store: LightningStore, alert: Alert) -> None:
        """Nothing is left to do."""


def _killed(worker: Worker) -> bool:
    stats = worker.heartbeat_stats or {}
    if stats.get("host") != host_name():
        return False
    try:
        process = psutil.Process(stats["pid"])
        if process.create_time() != stats["process_start_time"]:  # another one has its number by now
            return False
        if os.getpid() not in (parent.pid for parent in process.parents()):
            return False
        process.kill()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return True


async def _subjects(store: LightningStore, alert: Alert) -> list[Worker]:
    return [w for w in await store.query_workers() if alert.worker_id is None or w.worker_id == alert.worker_id]
