"""`shm`: everything in one process. The algorithm on the caller's loop, all runners on the loop of the agents (`agent_loop.py`).

One loop for all runners means that a client made at module level works for every one of them; a thread of their own means that an
algorithm that computes does not stop them.
"""

from __future__ import annotations

import asyncio

from leyden.execution.agent_loop import Residence
from leyden.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from leyden.execution.events import StopSignal
from leyden.execution.together import run_together
from leyden.options import check_number
from leyden.store.base import LightningStore
from leyden.utils.latch import Latch

__all__ = ["SharedMemoryExecutionStrategy"]


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Algorithm and runners in this process.

    n_runners: runners, each with its own `concurrency`.
    drain_seconds: how long runners may finish what is under way when a run is stopped from outside, before they are cancelled.
    """

    def __init__(self, n_runners: int = 1, *, drain_seconds: float = 2.0) -> None:
        check_number("n_runners", n_runners, at_least=1, whole=True)
        check_number("drain_seconds", drain_seconds, at_least=0)
        self.n_runners, self.drain_seconds = n_runners, drain_seconds

    async def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, *, ready: Latch | None = None
    ) -> None:
        """See ExecutionStrategy.execute."""
        stop = StopSignal()
        runners = Residence(self._run_runners(runner, store, stop, ready))
        await run_together(algorithm(store, stop), runners, stop, drain_seconds=self.drain_seconds)

    async def _run_runners(self, runner: RunnerBundle, store: LightningStore, stop: Latch, ready: Latch | None) -> None:
        if ready is not None:
            await ready.wait_async()
            if stop.is_set():
                return
        tasks = [asyncio.create_task(runner(store, worker_id, stop)) for worker_id in range(self.n_runners)]
        try:
            await asyncio.gather(*tasks)
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
