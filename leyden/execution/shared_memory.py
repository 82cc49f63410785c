"""`shm`: everything in one process.

The algorithm runs on the caller's loop, all runners on the agents' loop (`agent_loop.py`). The runners share one loop,
so that a client made at module level works for every one of them. The loop has its own thread, so that an algorithm
that computes does not stop the runners. `main_thread="runner"` exchanges the two sides.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Coroutine
from typing import Any, Literal, cast, get_args

from leyden._lib.aio import Latch
from leyden._lib.event_loops import run_in_thread
from leyden._lib.options import check_flag, check_number
from leyden.errors import ConfigError
from leyden.execution.agent_loop import Residence
from leyden.execution.env_variables import managed_store as managed_by_environment
from leyden.execution.execution_strategy import AlgorithmBundle, ExecutionStrategy, RunnerBundle, StopSignal
from leyden.execution.runner.calls import AGENTS_ARE_DAEMONS
from leyden.execution.together import run_together
from leyden.store.base import LightningStore

MainThread = Literal["algorithm", "runner"]


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Algorithm and runners in this process.

    n_runners: the number of runners, each with its own `concurrency`.
    main_thread: the side that runs on the thread and the event loop that start the run, which is the main thread for a
        script's `fit`. `algorithm`: the algorithm; the runners share a loop in another thread, the same for every run
        of the process. `runner`: the runners with their async agents; the algorithm has its own thread and loop. Sync
        agents have a thread each in both cases (`Trainer.dev` calls them on the thread that called it).
    managed_store: True: a store that is not safe for threads (`capabilities["thread_safe"]`) runs on one loop, to which
        other threads send their calls; a safe one, as Leyden's own are, is used as it is. False: any store is used as
        it is. None takes LEYDEN_MANAGED_STORE (AGL_MANAGED_STORE), else True.
    daemon: whether the program may end while a sync agent still runs, for example after its timeout. False: the program
        waits for the agent.
    drain_seconds: how long runners may finish attempts in flight when a run is stopped from outside, before they are
        cancelled.
    """

    def __init__(
        self,
        n_runners: int = 1,
        *,
        main_thread: MainThread = "algorithm",
        managed_store: bool | None = None,
        daemon: bool = True,
        drain_seconds: float = 2.0,
    ) -> None:
        check_number("n_runners", n_runners, at_least=1, whole=True)
        check_number("drain_seconds", drain_seconds, at_least=0)
        if main_thread not in get_args(MainThread):
            raise ConfigError(f"main_thread is {main_thread!r}; possible: {', '.join(map(repr, get_args(MainThread)))}")
        if managed_store is not None:
            check_flag("managed_store", managed_store)
        check_flag("daemon", daemon)
        self.n_runners, self.main_thread, self.daemon, self.drain_seconds = (
            n_runners,
            main_thread,
            daemon,
            drain_seconds,
        )
        self.managed_store = managed_by_environment() if managed_store is None else managed_store

    async def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, *, ready: Latch | None = None
    ) -> None:
        """Run both sides in this process, until both have ended.

        The runners run on the agents' loop in another thread, and the algorithm on this loop. With
        `main_thread="runner"` the runners run on this loop, and the algorithm on its own loop.
        """
        stop = StopSignal()
        if self.managed_store and not store.capabilities["thread_safe"]:
            store = on_this_loop(store)
        work = algorithm(store, stop)
        here = asyncio.get_running_loop() if self.main_thread == "runner" else None
        token = AGENTS_ARE_DAEMONS.set(self.daemon)
        try:
            runners = Residence(self._run_runners(runner, store, stop, ready), here)
        finally:
            AGENTS_ARE_DAEMONS.reset(token)
        await run_together(
            work if here is None else run_in_thread(work, name="leyden-algorithm"),
            runners,
            stop,
            drain_seconds=self.drain_seconds,
        )

    async def _run_runners(self, runner: RunnerBundle, store: LightningStore, stop: Latch, ready: Latch | None) -> None:
        """Run all runners on this loop until they end. The first error stops the others and is raised.

        ready: runners begin when it is open; None: at once.
        """
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


def on_this_loop(store: LightningStore) -> LightningStore:
    """Return a wrapper of the store for any thread. Its coroutine methods run on the event loop that runs now."""
    return cast(LightningStore, _OnOneLoop(store, asyncio.get_running_loop()))


def on_the_loop_of(wrapped: object, store: LightningStore) -> LightningStore:
    """Return a wrapper of `store` for the event loop that owns `wrapped`; `store` itself if no loop owns it."""
    return cast(LightningStore, _OnOneLoop(store, wrapped.loop)) if isinstance(wrapped, _OnOneLoop) else store


@LightningStore.register
class _OnOneLoop:
    """Passes every attribute of a store on; coroutine methods run on the store's loop."""

    def __init__(self, store: LightningStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self.loop = store, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return functools.partial(self._call, found) if inspect.iscoroutinefunction(found) else found

    async def _call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method on the wrapped store's own event loop."""
        work: Coroutine[Any, Any, Any] = method(*args, **kwargs)
        if asyncio.get_running_loop() is self.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
