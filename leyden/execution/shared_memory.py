"""`shm`: everything in one process. The algorithm on the caller's loop, all runners on one loop of a thread beside it.

One loop for all runners means that a client made at module level works for every one of them; a thread of their own means that an
algorithm that computes does not stop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from typing import Any

from leyden.errors import ConfigError, LeydenError
from leyden.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from leyden.store.base import LightningStore
from leyden.utils.latch import Latch

__all__ = ["SharedMemoryExecutionStrategy"]

logger = logging.getLogger(__name__)


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
        runners = _LoopThread(self._run_runners(runner, store, stop), name="leyden-runners")
        ended = asyncio.ensure_future(runners.wait())
        work = asyncio.ensure_future(algorithm(store, stop))
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()  # raises what ended them
                if not work.done():
                    logger.warning("all runners have ended; the algorithm goes on alone")
            await work
        except asyncio.CancelledError:
            await self._interrupt(work, stop, runners, ended)
            raise
        except BaseException:
            await _cancel(work)
            raise
        finally:
            stop.set()
            if not ended.done():
                await asyncio.shield(ended)
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

    async def _interrupt(
        self, work: asyncio.Future[None], stop: Latch, runners: _LoopThread, ended: asyncio.Future[None]
    ) -> None:
        stop.set()
        await _cancel(work)
        await asyncio.wait({ended}, timeout=self.drain_seconds)
        if not ended.done():
            runners.cancel()
        with contextlib.suppress(asyncio.CancelledError, LeydenError):
            await ended


class _LoopThread:
    """A coroutine on an event loop of its own, in a daemon thread."""

    def __init__(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(work)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._caller = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        error: BaseException | None = None
        try:
            self._loop.run_until_complete(self._task)
        except BaseException as caught:  # noqa: BLE001 -- handed to the caller, who raises it
            error = caught
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
        with contextlib.suppress(RuntimeError):  # the caller's loop has ended: nobody waits
            self._caller.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        elif isinstance(error, asyncio.CancelledError):
            self._done.cancel()
        else:
            self._done.set_exception(error)

    async def wait(self) -> None:
        """Return when the coroutine has; raise what it raised."""
        try:
            await asyncio.shield(self._done)
        finally:
            if self._done.done():
                self._thread.join()  # it has nothing left to do

    def cancel(self) -> None:
        """Cancel the coroutine."""
        with contextlib.suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._task.cancel)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
