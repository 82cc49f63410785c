"""`WorkerBundle`: the parts of a worker, as one object that threads share and that can be sent to another process.

It knows a runner and what the runner is bound to. An execution strategy decides where the workers run, and on which
store.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leyden._lib.aio import Latch
from leyden.agent import LitAgent
from leyden.execution.runner.runner import AttemptRecorder, Hook, Runner, torn_down
from leyden.store.base import LightningStore


@dataclass(frozen=True, slots=True)
class WorkerBundle:
    """Run an agent on a runner. In each process call `init`, then the bundle itself once for each worker, then
    `teardown`."""

    agent: LitAgent[Any]
    hooks: Sequence[Hook]
    recorders: Sequence[AttemptRecorder]
    runner: Runner[Any]
    worker_names: Sequence[str]
    """The names under which the store knows the workers, by worker id."""

    def init(self) -> None:
        self.runner.init(self.agent, hooks=self.hooks, recorders=self.recorders)

    @property
    def concurrency(self) -> int | None:
        return getattr(self.runner, "concurrency", None)

    async def __call__(
        self, store: LightningStore, worker_id: int, event: Latch, *, at_most: int | None = None
    ) -> None:
        """Run one worker: set up a copy of the runner, run it until the event is set, tear it down.

        at_most: how many rollouts the worker may have in flight at first (`Runner.max_at_first`).
        """
        runner = copy.copy(self.runner)
        runner.max_at_first = at_most
        runner.init_worker(worker_id, store, worker_name=self.worker_names[worker_id])
        with torn_down(lambda: runner.teardown_worker(worker_id)):
            await runner.iter(event=event)

    def teardown(self) -> None:
        self.runner.teardown()
