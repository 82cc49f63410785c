"""`LitAgentRunner`: hundreds of rollouts in flight on one event loop.

Claims are made in batches as slots become free and wait for work by event. Each claim's resources are read once and pinned for its
attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence
from typing import Any

import psutil

from leyden.errors import ConfigError
from leyden.litagent import LitAgent
from leyden.runner.attempt import AttemptRunner, Outcome
from leyden.runner.base import AttemptRecorder, Hook, Runner
from leyden.store.base import LightningStore
from leyden.tracer import OtelTracer, Tracer
from leyden.types import NamedResources, Rollout, RolloutMode, TaskInput
from leyden.utils.latch import Latch

__all__ = ["LitAgentRunner"]

logger = logging.getLogger(__name__)

_CLAIM_WAIT_SECONDS = 30.0


class LitAgentRunner(Runner):
    """Runs a LitAgent on whatever the queue holds.

    tracer: records what the agent does; OtelTracer when None.
    concurrency: rollouts in flight at a time.
    max_rollouts: end after this many; None: no limit.
    heartbeat_interval: seconds between two reports of this worker's state to the store.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        *,
        concurrency: int = 64,
        max_rollouts: int | None = None,
        heartbeat_interval: float = 10.0,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
        if max_rollouts is not None and max_rollouts < 1:
            raise ConfigError(f"max_rollouts is {max_rollouts}; it must be at least 1, or None for no limit")
        if heartbeat_interval <= 0:
            raise ConfigError(f"heartbeat_interval is {heartbeat_interval}; it must be above 0 seconds")
        self.tracer = OtelTracer() if tracer is None else tracer
        self.concurrency, self.max_rollouts, self.heartbeat_interval = concurrency, max_rollouts, heartbeat_interval
        self._agent: LitAgent[Any] | None = None
        self._hooks: Sequence[Hook] = ()
        self._recorders: Sequence[AttemptRecorder] = ()
        self._store: LightningStore | None = None

    def init(
        self, agent: LitAgent[Any], *, hooks: Sequence[Hook] = (), recorders: Sequence[AttemptRecorder] = ()
    ) -> None:
        """Bind the agent, the hooks and the recorders."""
        self._agent, self._hooks, self._recorders = agent, tuple(hooks), tuple(recorders)
        agent.set_runner(self)
        self.tracer.init()

    def init_worker(self, worker_id: int, store: LightningStore) -> None:
        """Bind the store and the name `Worker-{worker_id}`."""
        self.worker_id, self._store = worker_id, store
        self.tracer.init_worker(worker_id, store)

    def teardown_worker(self, worker_id: int) -> None:
        """Let the store go."""
        self.tracer.teardown_worker(worker_id)
        self._store = None

    def teardown(self) -> None:
        """Let the agent go."""
        self.tracer.teardown()
        self._agent = None

    @property
    def worker_name(self) -> str:
        """The name under which the store knows this worker."""
        return f"Worker-{self.worker_id}"

    async def iter(self, *, event: Latch | None = None) -> None:
        """See Runner.iter."""
        attempts, store = self._attempt_runner(), self._bound_store()
        running = _RunningSet()
        claiming = asyncio.create_task(self._claim(running, attempts, store))
        heartbeat = asyncio.create_task(self._heartbeat(store))
        stopped = asyncio.create_task((event or Latch()).wait_async())
        try:
            await asyncio.wait({claiming, heartbeat, stopped, running.failed}, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(claiming)
            for ended in (claiming, heartbeat, running.failed):
                if ended.done() and not ended.cancelled():
                    ended.result()
            await running.drained()
        finally:
            await _cancel(claiming, heartbeat, stopped, *running.tasks)
            running.failed.cancel()

    async def _claim(self, running: _RunningSet, attempts: AttemptRunner, store: LightningStore) -> None:
        """Claim and start rollouts until cancelled or until `max_rollouts` are claimed."""
        left = self.max_rollouts
        while left is None or left > 0:
            room = await running.room(self.concurrency)
            limit = room if left is None else min(room, left)
            rollouts = await store.dequeue_many_rollouts(
                limit=limit, worker_id=self.worker_name, timeout_seconds=_CLAIM_WAIT_SECONDS
            )
            # Nothing is awaited between a claim and its attempts, or a stop in between would leave claims that nobody reports.
            ids = {rollout.resources_id for rollout in rollouts}
            reading = {
                resources_id: asyncio.ensure_future(_read_resources(store, resources_id)) for resources_id in ids
            }
            for rollout in rollouts:
                resources = asyncio.shield(reading[rollout.resources_id])  # its siblings read the same
                running.start(attempts.run(rollout, resources), name=rollout.rollout_id)
            if left is not None:
                left -= len(rollouts)

    async def step(
        self,
        input: TaskInput,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Latch | None = None,
    ) -> Rollout:
        """See Runner.step."""
        attempts, store = self._attempt_runner(), self._bound_store()
        resources_id = (await store.add_resources(resources)).resources_id if resources is not None else None
        rollout = await store.start_rollout(input, mode=mode, resources_id=resources_id, worker_id=self.worker_name)
        outcome = await attempts.run(rollout, _read_resources(store, rollout.resources_id))
        if outcome.error is not None:
            raise outcome.error
        return await store.get_rollout_by_id(rollout.rollout_id)

    def _attempt_runner(self) -> AttemptRunner:
        if self._agent is None:
            raise ConfigError(
                "the runner has no agent; call init(agent) first, or use run_context(agent=..., store=...)"
            )
        return AttemptRunner(self._agent, self, self._bound_store(), self.tracer, self._hooks, self._recorders)

    def _bound_store(self) -> LightningStore:
        if self._store is None:
            raise ConfigError(
                "the runner has no store; call init_worker(worker_id, store) first, or use run_context(...)"
            )
        return self._store

    async def _heartbeat(self, store: LightningStore) -> None:
        process = psutil.Process()
        process.cpu_percent()
        while True:
            await store.update_worker(
                self.worker_name,
                {"pid": os.getpid(), "cpu_percent": process.cpu_percent(), "rss_bytes": process.memory_info().rss},
            )
            await asyncio.sleep(self.heartbeat_interval)


async def _read_resources(store: LightningStore, resources_id: str | None) -> NamedResources | None:
    update = (
        await store.get_latest_resources() if resources_id is None else await store.get_resources_by_id(resources_id)
    )
    return None if update is None else update.resources


class _RunningSet:
    """The attempts in flight: how many more fit, when all are done, and the first one that failed to report."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Outcome]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()

    def start(self, attempt: Coroutine[Any, Any, Outcome], *, name: str) -> None:
        task = asyncio.create_task(attempt, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    async def room(self, concurrency: int) -> int:
        """How many more may be started; waits until it is at least one."""
        while len(self.tasks) >= concurrency:
            self._changed.clear()
            await self._changed.wait()
        return concurrency - len(self.tasks)

    async def drained(self) -> None:
        """Wait for all of them; raise what kept one from reporting."""
        if self.tasks:
            await asyncio.wait(self.tasks)
        if self.failed.done():
            self.failed.result()

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        self.tasks.discard(task)
        self._changed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
