"""`LegacyAgentRunner`: a worker of Agent Lightning 0.1.

A LitAgentRunner runs each task in a separate store in memory, so hooks, tracing, checks and threads work as in any run.
Its record then becomes the report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from leyden._lib.options import NamedOptions, check_number
from leyden.adapter import TraceAdapter, TraceToTriplet
from leyden.agent import LitAgent
from leyden.execution.runner import LitAgentRunner, ParallelWorkerBase
from leyden.legacy.reports import LegacyAgent, report_of
from leyden.legacy.task_client import AgentLightningClient
from leyden.legacy.types import RolloutLegacy, Task, warn_deprecated
from leyden.store import InMemoryLightningStore
from leyden.tracing import OtelTracer, Tracer
from leyden.types import ResourcesUpdate, Rollout, Span, Triplet, failure_reason

logger = logging.getLogger(__name__)


class LegacyAgentRunner(NamedOptions, ParallelWorkerBase):
    """Takes tasks from a client, runs the agent on one at a time, and reports.

    An error of the agent is logged and reported as an empty result, and the worker continues.

    agent: may have the signatures and results of Agent Lightning 0.1.
    client: gives the tasks and takes the reports.
    tracer: records what the agent does; None: an `OtelTracer`.
    triplet_exporter: makes the triplets of a report; None: a `TraceToTriplet`.
    worker_id: the worker's number in logs; None: it has none.
    max_tasks: end after this many tasks; None: no limit.
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
        """Run the agent on one task and report. Return False if the client has no task, or no resources for it."""
        return asyncio.run(self.run_async())

    def iter(self) -> int:
        """Run the agent on `max_tasks` tasks and return their number; without a limit, never return."""
        return asyncio.run(self.iter_async())

    async def run_async(self) -> bool:
        client = self.client
        if (task := await client.poll_next_task_async()) is None:
            return False
        if (update := await resources_for(client, task)) is None:
            return False
        runner = LitAgentRunner[object](self.tracer, concurrency=1, max_rollouts=1)
        async with InMemoryLightningStore() as store:  # of this task alone
            await store.add_resources(update.resources, resources_id=update.resources_id)
            await store.enqueue_rollout(
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
        await client.post_rollout_async(finished_report(task, rollout, spans, self.triplet_exporter))
        return True

    async def iter_async(self) -> int:
        done = 0
        while self.max_tasks is None or done < self.max_tasks:
            done += await self.run_async()
        return done


async def resources_for(client: AgentLightningClient, task: Task) -> ResourcesUpdate | None:
    """Return the resources of a task, or the latest ones if the task names none.

    Log an error and return None if the server has none.
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
    """Return the report on a finished rollout.

    The report on a rollout that did not succeed has the task and the reason, and no reward.
    """
    if rollout.status == "succeeded":
        return report_of(task.rollout_id, spans, adapter)
    reason = failure_reason(rollout)
    logger.warning("task %s failed: %s", task.rollout_id, reason)
    return RolloutLegacy(rollout_id=task.rollout_id, task=task, metadata={"error": reason})
