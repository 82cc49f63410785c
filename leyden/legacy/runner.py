"""`LegacyAgentRunner`: one worker of Agent Lightning 0.1, on the parts that run every agent.

Each task is run by a LitAgentRunner in a store of its own in memory, so hooks, tracing, checks and
threads are those of any run; then its record becomes a report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from leyden.adapter import TraceAdapter, TraceToTriplet
from leyden.legacy.client import AgentLightningClient
from leyden.legacy.reports import LegacyAgent, report_of
from leyden.legacy.types import RolloutLegacy, Task, warn_deprecated
from leyden.litagent import LitAgent
from leyden.options import NamedOptions, check_number
from leyden.runner import LitAgentRunner, ParallelWorkerBase
from leyden.store import InMemoryLightningStore
from leyden.tracer import OtelTracer, Tracer
from leyden.types import ResourcesUpdate, Rollout, Span, Triplet, failure_reason

logger = logging.getLogger(__name__)


class LegacyAgentRunner(NamedOptions, ParallelWorkerBase):
    """Requests tasks from a client, runs the agent on one at a time, and reports.

    An agent's error is logged and reported as an empty result, and the worker continues.

    agent: may have the signatures and results of Agent Lightning 0.1 (see `LegacyAgent`).
    tracer: records what the agent does. Default: `OtelTracer`.
    triplet_exporter: makes the triplets of a report. Default: `TraceToTriplet`.
    max_tasks: end after this many tasks. None: no limit.
    """

    def __init__(
        self,
        agent: LitAgent[object],
        client: AgentLightningClient,
        tracer: Tracer | None = None,
        triplet_exporter: TraceAdapter[list[Triplet]] | None = None,
        worker_id: int | None = None,
        max_tasks: int | None = None,
    ) -> None:
        warn_deprecated("LegacyAgentRunner", "LitAgentRunner(), which claims from a store")
        check_number("max_tasks", max_tasks, at_least=1, whole=True, or_none="no limit")
        self.agent = agent
        self.client = client
        self.tracer = OtelTracer() if tracer is None else tracer
        self.triplet_exporter = TraceToTriplet() if triplet_exporter is None else triplet_exporter
        self.worker_id = worker_id
        self.max_tasks = max_tasks

    def run(self) -> bool:
        """Run the agent on one task. Return False if the client had no task or no resources."""
        return asyncio.run(self.run_async())

    def iter(self) -> int:
        """Run the agent on `max_tasks` tasks and return how many it ran."""
        return asyncio.run(self.iter_async())

    async def run_async(self) -> bool:
        """Run the agent on one task. Return False if the client had no task or no resources."""
        client = self.client
        if (task := await client.poll_next_task_async()) is None:
            return False
        if (update := await resources_for(client, task)) is None:
            return False
        await client.post_rollout_async(await self._report(task, update))
        return True

    async def iter_async(self) -> int:
        """Run the agent on `max_tasks` tasks and return how many it ran."""
        done = 0
        while self.max_tasks is None or done < self.max_tasks:
            done += await self.run_async()
        return done

    async def _report(self, task: Task, update: ResourcesUpdate) -> RolloutLegacy:
        """Run a task with these resources in a store of its own, and return the report."""
        runner = LitAgentRunner[object](self.tracer, concurrency=1, max_rollouts=1)
        async with InMemoryLightningStore() as store:
            await store.add_resources(update.resources, resources_id=update.resources_id)
            rollout = await store.enqueue_rollout(
                task.input,
                task.mode,
                update.resources_id,
                metadata=task.metadata,
                rollout_id=task.rollout_id,
            )
            with runner.run_context(agent=LegacyAgent(self.agent), store=store, worker_id=self.worker_id):
                await runner.iter()
            rollout = await store.get_rollout_by_id(task.rollout_id)
            spans = await store.query_spans(task.rollout_id, "latest")
        return finished_report(task, rollout, spans, self.triplet_exporter)


async def resources_for(client: AgentLightningClient, task: Task) -> ResourcesUpdate | None:
    """Return the resources of a task, or the latest if it names none; None, with an error in the
    log, if the server has none.
    """
    if task.resources_id is None:
        update = await client.get_latest_resources_async()
    else:
        update = await client.get_resources_by_id_async(task.resources_id)
    if update is None:
        which = "latest resources" if task.resources_id is None else f"resources {task.resources_id!r}"
        logger.error("task %s is skipped: the server has no %s", task.rollout_id, which)
    return update


def finished_report(
    task: Task, rollout: Rollout, spans: Sequence[Span], adapter: TraceAdapter[list[Triplet]]
) -> RolloutLegacy:
    """Return the report on a finished rollout. The report of a failed one has the task and the
    reason, and no reward.
    """
    if rollout.status == "succeeded":
        return report_of(task.rollout_id, spans, adapter)
    reason = failure_reason(rollout)
    logger.warning("task %s failed: %s", task.rollout_id, reason)
    return RolloutLegacy(rollout_id=task.rollout_id, task=task, metadata={"error": reason})
