"""`ServedTasks`: an algorithm that works on the tasks of a server of Agent Lightning 0.1.

It fetches tasks with a client, enqueues them for the runners of any strategy, and reports the results to the server.
"""

from __future__ import annotations

import asyncio
from typing import Any

from leyden.adapter import TraceAdapter
from leyden.algorithm import Dataset, FastAlgorithm
from leyden.legacy import AgentLightningClient, Task
from leyden.legacy.runner import finished_report, resources_for
from leyden.types import EnqueueRolloutRequest, ResourcesUpdate


class ServedTasks(FastAlgorithm):
    """Enqueues the tasks that a client of Agent Lightning 0.1 fetches, and reports their results."""

    def __init__(
        self, client: AgentLightningClient, adapter: TraceAdapter[Any], *, in_flight: int, max_tasks: int | None
    ) -> None:
        """
        adapter: makes the triplets of a report.
        in_flight: how many tasks are fetched and not reported yet at a time.
        max_tasks: end after this many tasks; None: continue until the run is stopped.
        """
        self._client = client
        self._adapter_of_reports = adapter
        self._in_flight, self._max_tasks = in_flight, max_tasks

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> int:
        """Run `max_tasks` tasks of the server, and return their number. Without this limit, run until cancelled."""
        slots, numbers = asyncio.Semaphore(self._in_flight), dict[str, int]()
        done = 0
        async with asyncio.TaskGroup() as group:
            while self._max_tasks is None or done < self._max_tasks:
                await slots.acquire()
                task = await self._client.poll_next_task_async()
                update = None if task is None else await resources_for(self._client, task)
                if task is None or update is None:
                    slots.release()
                    await asyncio.sleep(self._client.poll_interval)
                    continue
                done += 1
                number = numbers[task.rollout_id] = numbers.get(task.rollout_id, 0) + 1
                # The same task may come again: from a server that got no report in time, or from a
                # list of tasks (DevTaskLoader) that starts again. Each time is a rollout of its own.
                rollout_id = task.rollout_id if number == 1 else f"{task.rollout_id}#{number}"
                group.create_task(self._run_one(task, rollout_id, update)).add_done_callback(lambda _: slots.release())
        return done

    async def _run_one(self, task: Task, rollout_id: str, update: ResourcesUpdate) -> None:
        """Run a task as a rollout with the server's resources, and post the result to the server."""
        await self.get_store().add_resources(update.resources, resources_id=update.resources_id)
        request = EnqueueRolloutRequest(
            rollout_id=rollout_id,
            input=task.input,
            mode=task.mode,
            resources_id=update.resources_id,
            metadata=task.metadata,
        )
        async for result in self.collector.collect([request]):
            report = finished_report(task, result.rollout, result.spans, self._adapter_of_reports)
            await self._client.post_rollout_async(report)
