# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Run a trainer's work as Agent Lightning does, for a strategy or a runner that a program has written.

The strategy gets two coroutine functions and the store, and decides where they run. The algorithm gets its
collaborators before it runs, and the runner is set up and torn down by the calls of Agent Lightning's interface. There
is no run of Leyden around them: no folder, no summary, no resuming.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leyden.algorithm import Algorithm as NativeAlgorithm
from leyden.algorithm import Run
from leyden.execution.runner import LitAgentRunner
from leyden.execution.runner.calls import call_sync
from leyden.execution.runner.runner import torn_down
from leyden_compat.agentlightning.interfaces import Algorithm, as_latch, users_store
from leyden_compat.agentlightning.own_store import as_native

logger = logging.getLogger("leyden.compat.agentlightning.running")


@dataclass(frozen=True)
class AlgorithmBundle:
    """Runs the algorithm once."""

    trainer: Any
    algorithm: Any
    train_dataset: Any
    val_dataset: Any

    async def __call__(self, store: Any, event: Any) -> None:
        """Run the algorithm with the store; without an algorithm, wait until the event is set."""
        trainer, algorithm = self.trainer, self.algorithm
        if algorithm is None:
            async with as_latch(event) as latch:
                await (latch.wait_async() if latch is not None else asyncio.Event().wait())
            return
        algorithm.set_trainer(trainer)
        algorithm.set_store(users_store(store) if isinstance(algorithm, Algorithm) else as_native(store))
        algorithm.set_adapter(trainer.adapter)
        if trainer.initial_resources is not None:
            algorithm.set_initial_resources(trainer.initial_resources)
        if isinstance(algorithm, NativeAlgorithm):
            algorithm.set_run(Run(run_id=secrets.token_hex(6)))
        async with contextlib.AsyncExitStack() as stack:
            if (proxy := trainer.llm_proxy) is not None:
                proxy.set_store(store)
                algorithm.set_llm_proxy(proxy)
                if not proxy.is_running():
                    await proxy.start()
                    stack.push_async_callback(proxy.stop)
            run = partial(algorithm.run, train_dataset=self.train_dataset, val_dataset=self.val_dataset)
            try:
                await (run() if algorithm.is_async() else call_sync(run, None, name="leyden-algorithm"))
            except Exception:
                logger.exception("the algorithm ended with an error")
                raise


@dataclass(frozen=True)
class RunnerBundle:
    """Runs one worker."""

    runner: Any
    agent: Any
    hooks: Sequence[Any]
    recorders: Sequence[Any] = ()

    async def __call__(self, store: Any, worker_id: int, event: Any) -> None:
        """Set the runner up, run it until the event is set, and tear it down."""
        runner = self.runner
        options = {"recorders": self.recorders} if self.recorders and isinstance(runner, LitAgentRunner) else {}
        is_native = isinstance(runner, LitAgentRunner)
        runner.init(agent=self.agent, hooks=self.hooks, **options)
        with torn_down(runner.teardown):
            runner.init_worker(worker_id, store if is_native else users_store(store))
            with torn_down(partial(runner.teardown_worker, worker_id)):
                await runner.iter(event=event)
