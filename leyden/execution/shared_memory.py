"""`shm`: everything in one process. The algorithm on the caller's loop, all runners on the loop of the agents (`agent_loop.py`).

One loop for all runners means that a client made at module level works for every one of them; a thread of their own means that an
algorithm that computes does not stop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from leyden.errors import ConfigError
from leyden.execution.agent_loop import Residence
from leyden.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from leyden.store.base import LightningStore
from leyden.utils.latch import Latch

__all__ = ["SharedMemoryExecutionStrategy"]

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 1.5
"""How long cancelled runners may take to end: more than an agent that swallows its cancellation is given."""


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Algorithm and runners in this process.

    n_runners: runners, each with its own `concurrency`.
    drain_seconds: how long runners may finish what is under way when a run is stopped from outside, before they are cancelled.
    """

    def __init__(self, n_runners: int = 1, *, drain_seconds: float = 2.0) -> None:
        if n_runners < 1:
            raise ConfigError(f"n_runners is {n_runners}; it must be at least 1")
        if drain_seconds < 0:
            raise ConfigError(f"drain_seconds is {drain_seconds}; it must be 0 or more")
        self.n_runners, self.drain_seconds = n_runners, drain_seconds

    async def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """See ExecutionStrategy.execute."""
        stop = Latch()
        runners = Residence(self._run_runners(runner, store, stop))
        ended = asyncio.ensure_future(runners.wait())
        work = asyncio.ensure_future(algorithm(store, stop))
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()  # raises what ended them
                if not work.done():
                    logger.warning("all runners have ended; the algorithm goes on alone")
            await asyncio.shield(work)
            stop.set()
            await asyncio.wait({ended})  # they finish what is under way
        except asyncio.CancelledError:
            # The algorithm goes on meanwhile: a policy that it serves is what agents need to finish.
            await self._end(runners, stop, ended, drain_seconds=self.drain_seconds)
            await _cancel(work)
            raise
        except BaseException:
            await self._end(
                runners, stop, ended, drain_seconds=0.0
            )  # what is under way would fail for want of a policy
            await _cancel(work)
            raise
        ended.result()

    async def _run_runners(self, runner: RunnerBundle, store: LightningStore, stop: Latch) -> None:
        tasks = [asyncio.create_task(runner(store, worker_id, stop)) for worker_id in range(self.n_runners)]
        try:
            await asyncio.gather(*tasks)
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self, runners: Residence, stop: Latch, ended: asyncio.Future[None], *, drain_seconds: float) -> None:
        """Let the runners drain, then cancel them, then leave them: whatever an agent does, this ends."""
        stop.set()
        await asyncio.wait({ended}, timeout=drain_seconds)
        if not ended.done():
            runners.cancel()
            await asyncio.wait({ended}, timeout=_CANCEL_SECONDS)
        if not ended.done():
            logger.warning("an agent blocks the event loop of the runners and is left to itself")
            runners.abandon()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # the first error is the one to report
            await ended


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
