"""`LitAgentRunner`: hundreds of rollouts in flight on one event loop.

The runner claims as many rollouts as it has free slots. A claim waits at the store for work, so an idle runner does not
poll. The resources of a claimed rollout are read once, for the whole attempt. An agent whose rollout is cancelled in
the store is ended within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, TypeVar

from leyden._lib.aio import Latch, first_done
from leyden._lib.options import check_number
from leyden.agent import LitAgent, agent_version
from leyden.errors import ConfigError, StoreError
from leyden.execution.runner.attempt import AttemptRunner, Outcome
from leyden.execution.runner.cancellation import CancelWatch
from leyden.execution.runner.runner import AttemptRecorder, Hook, Runner
from leyden.execution.runner.watchdog import InFlight, LagWatchdog
from leyden.monitor.system import SystemProbe
from leyden.store.base import LightningStore
from leyden.tracing import OtelTracer, Tracer
from leyden.types import AttemptedRollout, NamedResources, Rollout, RolloutMode, Span, TaskInput
from leyden.types.openai_clients import import_ahead

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLAIM_WAIT_SECONDS = 30.0
"""The longest wait of one claim for work, in seconds."""
_FAREWELL_SECONDS = 1.0
"""The seconds that the last heartbeat may take. Its loss costs only a needless alert."""


class LitAgentRunner(Runner[T]):
    """Runs a LitAgent on the rollouts of the queue.

    tracer: records the agent's steps; None: an OtelTracer.
    concurrency: the most rollouts in flight at a time.
    max_rollouts: `iter` ends after this many rollouts; None: no limit.
    heartbeat_interval: seconds between two reports of this worker's state to the store. The reply says whether the
        worker shall pause (`LightningStore.pause_worker`): then it finishes its rollouts, and claims no more until the
        pause ends.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        *,
        concurrency: int = 64,
        max_rollouts: int | None = None,
        heartbeat_interval: float = 10.0,
    ) -> None:
        check_number("concurrency", concurrency, at_least=1, whole=True)
        check_number("max_rollouts", max_rollouts, at_least=1, whole=True, or_none="no limit")
        check_number("heartbeat_interval", heartbeat_interval, above=0)
        self.tracer = OtelTracer() if tracer is None else tracer
        self.concurrency, self.max_rollouts, self.heartbeat_interval = concurrency, max_rollouts, heartbeat_interval
        self._agent: LitAgent[T] | None = None
        self._agent_version: str | None = None
        self._hooks: Sequence[Hook] = ()
        self._recorders: Sequence[AttemptRecorder] = ()
        self._store: LightningStore | None = None
        self._running: list[_RunningSet] = []
        """The attempts in flight of this runner and its copies in this process."""
        self.worker_name = "Worker"
        """The name under which the store knows this worker. `init_worker` sets it."""

    def init(
        self, agent: LitAgent[T], *, hooks: Sequence[Hook] = (), recorders: Sequence[AttemptRecorder] = ()
    ) -> None:
        self._agent, self._hooks, self._recorders = agent, tuple(hooks), tuple(recorders)
        self._agent_version = agent_version(agent)  # here, because parsing in several threads fails in Python 3.11
        agent.set_runner(self)
        self.tracer.init()

    def init_worker(self, worker_id: int, store: LightningStore, *, worker_name: str | None = None) -> None:
        """Bind the store and the worker's name, and prepare the tracer. If the agent uses OpenAI's SDK, import it now,
        so that the first rollout does not wait a second for it.

        worker_name: by default `Worker-{worker_id}`, preceded by host and process id if the store is shared with other
            processes.
        """
        self.worker_id, self._store = worker_id, store
        shared = f"{socket.gethostname()}-{os.getpid()}-" if store.capabilities["zero_copy"] else ""
        self.worker_name = worker_name or f"{shared}Worker-{worker_id}"
        self.tracer.init_worker(worker_id, store)
        if _calls_openai(self._agent):
            import_ahead()

    def teardown_worker(self, worker_id: int) -> None:
        self.tracer.teardown_worker(worker_id)
        self._store = None

    def teardown(self) -> None:
        self.tracer.teardown()
        self._agent = None

    async def recorded_spans(self, rollout: AttemptedRollout) -> list[Span]:
        """Return the spans recorded so far of an attempt under way, ordered by sequence id.

        These are the spans of the calling task's open trace, and the model calls that the gateway has recorded. Wait
        until the gateway's are in the store.
        """
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        for recorder in self._recorders:
            await recorder.flush(*ids)
        stored = await self._bound_store().query_spans(*ids)
        spans = {span.span_id: span for span in (*stored, *self.tracer.get_last_trace())}
        return sorted(spans.values(), key=lambda span: span.sequence_id)

    async def iter(self, event: Latch | None = None) -> None:
        """Claim and run rollouts until `event` is set, `max_rollouts` have run, or an error ends the runner. Rollouts
        under way are finished before a return, and cancelled before an error is raised.
        """
        attempts, store = self._attempt_runner(), self._bound_store()
        with LagWatchdog.beside_this_loop(watches=self.debugger is None) as watchdog:
            async with attempts.watch.working():
                running, pause = _RunningSet(watchdog), _Pause()
                self._running.append(running)
                claiming = asyncio.create_task(self._claim_unless_paused(running, attempts, store, pause))
                heartbeat = asyncio.create_task(self._heartbeat(store, running, pause))
                stopped = asyncio.create_task((event or Latch()).wait_async())
                any_of = {claiming, heartbeat, stopped, running.failed}
                try:
                    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
                    await _cancel(claiming)
                    for ended in (claiming, heartbeat, running.failed):
                        if ended.done() and not ended.cancelled():
                            ended.result()
                    await running.drained()
                    await _cancel(heartbeat)
                    # A last heartbeat, so that the silence from here on raises no alert. The store may have gone first.
                    with contextlib.suppress(StoreError, TimeoutError):
                        async with asyncio.timeout(_FAREWELL_SECONDS):
                            counts = {**SystemProbe().read(), **running.figures()}
                            await store.update_worker(self.worker_name, {"ended": True, **counts})
                finally:
                    await _cancel(claiming, heartbeat, stopped, *running.tasks)
                    running.failed.cancel()
                    self._running.remove(running)

    @property
    def in_flight(self) -> int | None:
        """How many attempts this runner and its copies in this process run now; None if none of them works here."""
        return sum(len(running.tasks) for running in self._running) if self._running else None

    async def _claim_unless_paused(
        self, running: _RunningSet, attempts: AttemptRunner, store: LightningStore, pause: _Pause
    ) -> None:
        """Claim until cancelled or until `max_rollouts` are claimed. A pause cancels a claim that is waiting, as the
        end of the run does.
        """
        while True:
            await pause.over.wait()
            async with first_done(self._claim(running, attempts, store), pause.begun.wait()) as (claiming, _):
                pass
            if not claiming.cancelled():
                return claiming.result()

    async def _claim(self, running: _RunningSet, attempts: AttemptRunner, store: LightningStore) -> None:
        """Claim and start rollouts until cancelled or until `max_rollouts` are claimed."""
        while self.max_rollouts is None or running.started < self.max_rollouts:
            concurrency = self.concurrency if self.debugger is None else 1
            room = await running.room(concurrency, self.max_at_first)
            limit = room if self.max_rollouts is None else min(room, self.max_rollouts - running.started)
            rollouts = await running.watchdog.claim(
                store, limit=limit, worker_id=self.worker_name, timeout_seconds=_CLAIM_WAIT_SECONDS
            )
            logger.debug("%s: claimed %s", self.worker_name, [rollout.rollout_id for rollout in rollouts])
            # Nothing is awaited between a claim and its attempts, because a stop in between would leave claims whose
            # end no runner reports.
            versions = {(rollout.resources_id, rollout.resources_version) for rollout in rollouts}
            reading = {version: asyncio.ensure_future(_read_resources(store, *version)) for version in versions}
            if not rollouts:
                continue
            only, *others = reading.values()
            all_read = asyncio.ensure_future(asyncio.wait([only, *others])) if others else only
            for rollout in rollouts:
                version = rollout.resources_id, rollout.resources_version
                resources = _Read(reading[version], all_read)
                running.start(attempts.run(rollout, resources), InFlight(attempts.agent_name, rollout, store))

    async def step(
        self,
        input: TaskInput,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: Latch | None = None,
    ) -> Rollout:
        """Run one task at once, outside of the queue, and return its rollout. Raise what the agent raised."""
        attempts, store = self._attempt_runner(), self._bound_store()
        resources_id = (await store.add_resources(resources)).resources_id if resources is not None else None
        rollout = await store.start_rollout(input, mode=mode, resources_id=resources_id, worker_id=self.worker_name)
        async with attempts.watch.working():
            reading = _read_resources(store, rollout.resources_id, rollout.resources_version)
            outcome = await attempts.run(rollout, reading)
        if outcome.error is not None:
            raise outcome.error
        return await store.get_rollout_by_id(rollout.rollout_id)

    def _attempt_runner(self) -> AttemptRunner:
        if self._agent is None:
            raise ConfigError(
                "the runner has no agent; call init(agent) first, or use run_context(agent=..., store=...)"
            )
        store = self._bound_store()
        return AttemptRunner(self._agent, self, store, self.tracer, self._hooks, self._recorders, CancelWatch(store))

    def _bound_store(self) -> LightningStore:
        if self._store is None:
            raise ConfigError(
                "the runner has no store; call init_worker(worker_id, store) first, or use run_context(...)"
            )
        return self._store

    async def _heartbeat(self, store: LightningStore, running: _RunningSet, pause: _Pause) -> None:
        """Report metrics of this worker every `heartbeat_interval` seconds, and apply the store's `paused`."""
        probe, before = SystemProbe(), (time.monotonic(), 0)
        about = {"heartbeat_seconds": self.heartbeat_interval, "agent_version": self._agent_version}
        while True:
            figures = {**about, **probe.read(), **running.figures()}
            started = time.monotonic()
            if running.ended and started > before[0]:
                figures["attempts_per_second"] = (running.ended - before[1]) / (started - before[0])
            before = started, running.ended
            worker = await store.update_worker(self.worker_name, figures)
            running.latency = {"store_latency_seconds": time.monotonic() - started}
            if pause.set(worker.paused):
                logger.warning(
                    "%s %s",
                    self.worker_name,
                    "was asked to pause: it claims nothing" if worker.paused else "claims again",
                )
            await asyncio.sleep(self.heartbeat_interval)


async def _read_resources(
    store: LightningStore, resources_id: str | None, version: int | None
) -> NamedResources | None:
    """Return the resources of an id (None: the latest), or None if the store has none."""
    if resources_id is None:
        update = await store.get_latest_resources()
    else:
        update = await store.get_resources_by_id(resources_id, version=version)
    return None if update is None else update.resources


class _Read:
    """Awaitable resources of one attempt, which are ready when those of the whole claim are. The attempts of a claim
    therefore begin in the order of the claim.
    """

    def __init__(self, own: asyncio.Future[NamedResources | None], all_read: asyncio.Future[Any]) -> None:
        self._own, self._all_read = own, all_read

    def __await__(self) -> Generator[Any, None, NamedResources | None]:
        yield from asyncio.shield(self._all_read).__await__()
        return self._own.result()


class _Pause:
    """Whether claiming is paused, as two events to wait for: `begun` and `over`."""

    def __init__(self) -> None:
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.over.set()

    def set(self, paused: bool) -> bool:
        now, before = (self.begun, self.over) if paused else (self.over, self.begun)
        changed = not now.is_set()
        before.clear()
        now.set()
        return changed


class _RunningSet:
    """The attempts in flight, the counts of the ended ones, and the first error that kept one from being reported."""

    def __init__(self, watchdog: LagWatchdog) -> None:
        self.watchdog = watchdog
        self.tasks: set[asyncio.Task[Outcome]] = set()
        self.started = self.ended = self.completed = self.succeeded = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.latency = dict[str, float]()
        """How long the last heartbeat took, for the next one."""
        self._changed = asyncio.Event()

    def start(self, attempt: Coroutine[Any, Any, Outcome], in_flight: InFlight) -> None:
        task = self.watchdog.start(attempt, in_flight)
        self.started += 1
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def figures(self) -> dict[str, float | int | str]:
        """Return the counts for a heartbeat."""
        return {
            "rollouts_running": len(self.tasks),
            "attempts_ended": self.ended,
            "attempts_completed": self.completed,
            "attempts_succeeded": self.succeeded,
            **self.latency,
        }

    async def room(self, concurrency: int, max_at_first: int | None) -> int:
        """Wait until at least one more attempt may start. Return how many may: of `concurrency` at once, and of
        `max_at_first` before any has ended.
        """
        while True:
            limit = concurrency if max_at_first is None else min(concurrency, max_at_first + self.ended)
            if limit > len(self.tasks) and not self.failed.done():  # else the runner ends
                return limit - len(self.tasks)
            self._changed.clear()
            await self._changed.wait()

    async def drained(self) -> None:
        """Wait for all attempts. Raise the error that kept one from reporting its result."""
        if self.tasks:
            await asyncio.wait(self.tasks)
        if self.failed.done():
            self.failed.result()

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        """Count the outcome of a rollout's task that has ended, or fail the runner with the task's error."""
        self.tasks.discard(task)
        self._changed.set()  # the waiter runs in a later turn of the loop, after the count
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            outcome = task.result()
            self.ended += 1
            self.completed += outcome.completed
            self.succeeded += outcome.status == "succeeded"
        elif not self.failed.done():
            self.failed.set_exception(error)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _calls_openai(agent: object) -> bool:
    """Return whether the agent's own function uses a name of OpenAI's SDK: `openai`, as in `llm.openai()` and `import
    openai`, or `openai_sync`.
    """
    functions = (
        getattr(agent, "__wrapped__", None),
        getattr(agent, "rollout", None),
        getattr(agent, "rollout_async", None),
    )
    codes = (getattr(function, "__code__", None) for function in functions)
    return any({"openai", "openai_sync"}.intersection(code.co_names) for code in codes if code is not None)
