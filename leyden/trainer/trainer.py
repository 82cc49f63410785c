"""`Trainer`: resolve the components, open the run, hand both sides to the strategy, say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyden.adapter import LlmProxyTraceToTriplet, TraceAdapter
from leyden.algorithm import Algorithm, Baseline, Dataset, FastAlgorithm, Run
from leyden.errors import ConfigError, RunInterrupted, StoreError
from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.gateway import LLMProxy
from leyden.litagent import LitAgent, check_resources
from leyden.runner import Hook, LitAgentRunner, Runner
from leyden.runner.calls import call_sync
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, Sweeper
from leyden.tracer import OtelTracer, Tracer
from leyden.trainer.blocking import run_blocking
from leyden.trainer.checks import check_dataset, checked_hooks, checked_resources, exclusively, require_used
from leyden.trainer.init_utils import build_component
from leyden.trainer.registry import (
    AdapterRegistry,
    AlgorithmRegistry,
    ExecutionStrategyRegistry,
    RunnerRegistry,
    StoreRegistry,
    TracerRegistry,
)
from leyden.trainer.run_directory import RunSummary, open_run, store_path, summarise
from leyden.types import NamedResources
from leyden.utils.latch import Latch

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """Trains an agent with an algorithm.

    Every component is given as an instance, a class, a factory, an import path, a registry name or a dict (see `build_component`).

    algorithm: what learns; None: nothing does, and runners work on what others enqueue until the run is stopped.
    n_runners: runners, each with `concurrency` rollouts in flight; 1 by default, or what the strategy says.
    concurrency: rollouts in flight in each runner; 64 by default, or what the runner says.
    max_rollouts: each runner ends after this many.
    initial_resources: what agents are given until the algorithm knows better.
    tracer, adapter, runner, strategy: OtelTracer, LlmProxyTraceToTriplet, LitAgentRunner and `shm` by default.
    store: by default a SQLite file in the run directory (`fit`), or memory (`dev`).
    llm_proxy: the gateway; one is made when the algorithm needs it.
    hooks: called at four points of every attempt.
    run_dir: where the run is kept; by default a new directory under `.leyden/`.
    """

    def __init__(
        self,
        *,
        algorithm: Any = None,
        n_runners: int | None = None,
        concurrency: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        llm_proxy: Any = None,
        hooks: Hook | Sequence[Hook] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self.tracer: Tracer = _required(tracer, Tracer, "tracer", TracerRegistry, OtelTracer)
        self.adapter: TraceAdapter[Any] = _required(
            adapter, TraceAdapter, "adapter", AdapterRegistry, LlmProxyTraceToTriplet
        )
        self.algorithm = build_component(
            algorithm, expected_type=Algorithm, spec_name="algorithm", registry=AlgorithmRegistry
        )
        self.strategy: ExecutionStrategy = _required(
            strategy,
            ExecutionStrategy,
            "strategy",
            ExecutionStrategyRegistry,
            SharedMemoryExecutionStrategy,
            {} if n_runners is None else {"n_runners": n_runners},
        )
        if n_runners is not None and self.strategy.n_runners != n_runners:
            raise ConfigError(f"n_runners={n_runners}, but the strategy given has n_runners={self.strategy.n_runners}")
        options = {"concurrency": concurrency, "max_rollouts": max_rollouts}
        self.runner: Runner = _required(
            runner,
            Runner,
            "runner",
            RunnerRegistry,
            LitAgentRunner,
            {"tracer": self.tracer, **{name: value for name, value in options.items() if value is not None}},
        )
        require_used(self.runner, **options, tracer=None if tracer is None else self.tracer)
        self._store_spec = store
        self.llm_proxy = build_component(llm_proxy, expected_type=LLMProxy, spec_name="llm_proxy")
        self.hooks = checked_hooks(hooks)
        self.initial_resources = checked_resources(initial_resources)
        self.run_dir = None if run_dir is None else Path(run_dir)

    @property
    def n_runners(self) -> int:
        """How many runners there are."""
        return self.strategy.n_runners

    def fit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset | None = None,
        *,
        val_dataset: Dataset | None = None,
        resume: bool = False,
    ) -> RunSummary:
        """Train the agent and block until it is done; works under a running event loop too.

        resume: continue the run in `run_dir` (or the newest one) from its last finished step.
        Raises RunInterrupted (a KeyboardInterrupt) after Ctrl-C or SIGTERM; everything finished is kept.
        """
        algorithm = self._checked(agent, self.algorithm, train_dataset, val_dataset)
        with exclusively(self, algorithm):
            run, store = self._open(resume)
            try:
                return run_blocking(self._execute(agent, algorithm, run, store, train_dataset, val_dataset))
            except KeyboardInterrupt:
                raise RunInterrupted(_how_to_resume(run.directory)) from None

    async def afit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset | None = None,
        *,
        val_dataset: Dataset | None = None,
        resume: bool = False,
    ) -> RunSummary:
        """`fit` for async code. Cancelling it stops the run as Ctrl-C does."""
        algorithm = self._checked(agent, self.algorithm, train_dataset, val_dataset)
        with exclusively(self, algorithm):
            run, store = self._open(resume)
            return await self._execute(agent, algorithm, run, store, train_dataset, val_dataset)

    def dev(
        self, agent: LitAgent[Any], train_dataset: Dataset | None = None, *, val_dataset: Dataset | None = None
    ) -> RunSummary:
        """Run the agent on the data without training it, in memory: a quick look whether everything fits together.

        The algorithm must be a FastAlgorithm; `Baseline()` when there is none. Raises TypeError for another one.
        """
        algorithm = self.algorithm or Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise TypeError(
                f"dev() needs a FastAlgorithm (Baseline is one), not {type(algorithm).__name__}; use fit() to train"
            )
        checked = self._checked(agent, algorithm, train_dataset, val_dataset)
        with exclusively(self, checked):
            store = self._build_store() if self._store_spec is not None else InMemoryLightningStore()
            run = Run(run_id="dev")
            return run_blocking(self._execute(agent, checked, run, store, train_dataset, val_dataset))

    # ---- before a run --------------------------------------------------------------------------------------------------

    def _checked(
        self,
        agent: LitAgent[Any],
        algorithm: Algorithm | None,
        train_dataset: Dataset | None,
        val_dataset: Dataset | None,
    ) -> Algorithm | None:
        """Everything that can be known to be wrong before anything starts."""
        check_dataset("train_dataset", train_dataset)
        check_dataset("val_dataset", val_dataset)
        if not isinstance(agent, LitAgent):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass plain functions
            raise ConfigError(
                f"the agent is a {type(agent).__name__}; decorate the function with @rollout, @llm_rollout or "
                "@prompt_rollout, or subclass LitAgent"
            )
        if algorithm is not None:
            algorithm.set_initial_resources(self.initial_resources)
            planned = algorithm.planned_resources()
            if planned is not None:
                check_resources(agent, planned)
        return algorithm

    def _open(self, resume: bool) -> tuple[Run, LightningStore]:
        if self._store_spec is None:
            run = open_run(self.run_dir, resume=resume)
            assert run.directory is not None
            return run, SqliteLightningStore(store_path(run.directory))
        if self.run_dir is not None:
            return open_run(self.run_dir, resume=resume), self._build_store()
        if resume:
            raise ConfigError("resume=True needs a run directory; give run_dir= beside the store, or give no store")
        return Run(run_id="run"), self._build_store()

    def _build_store(self) -> LightningStore:
        store = build_component(
            self._store_spec, expected_type=LightningStore, spec_name="store", registry=StoreRegistry
        )
        assert store is not None
        return store

    # ---- a run ---------------------------------------------------------------------------------------------------------

    async def _execute(
        self,
        agent: LitAgent[Any],
        algorithm: Algorithm | None,
        run: Run,
        store: LightningStore,
        train_dataset: Dataset | None,
        val_dataset: Dataset | None,
    ) -> RunSummary:
        agent.set_trainer(self)
        async with contextlib.AsyncExitStack() as stack:
            if store is not self._store_spec:
                await stack.enter_async_context(store)  # ours: closed at the end
            if run.resume:
                await store.release_claims()
            await stack.enter_async_context(Sweeper(store))
            proxy = await self._gateway(algorithm, store, stack)
            self.runner.init(agent, hooks=self.hooks, recorders=() if proxy is None else (proxy,))
            stack.callback(self.runner.teardown)

            ready = Latch()

            async def algorithm_bundle(store: LightningStore, event: Latch) -> None:
                try:
                    await self._algorithm_bundle(algorithm, run, store, proxy, ready, event, train_dataset, val_dataset)
                finally:
                    ready.set()  # nobody waits for an algorithm that has ended

            async def runner_bundle(store: LightningStore, worker_id: int, event: Latch) -> None:
                await ready.wait_async()
                if not event.is_set():
                    await self._runner_bundle(store, worker_id, event)

            try:
                await self.strategy.execute(algorithm_bundle, runner_bundle, store)
            except asyncio.CancelledError:
                await store.release_claims()
                logger.info(_how_to_resume(run.directory))
                raise
            except Exception as error:
                with contextlib.suppress(StoreError):  # it may be what failed
                    await store.release_claims()
                if run.directory is not None:
                    error.add_note(_how_to_resume(run.directory))
                raise
            summary = await summarise(store, run.directory)
        if summary.failures:
            logger.warning("some rollouts failed\n%s", summary)
        return summary

    async def _gateway(
        self, algorithm: Algorithm | None, store: LightningStore, stack: contextlib.AsyncExitStack
    ) -> LLMProxy | None:
        """The user's gateway, or one of our own when the algorithm needs one; ours and those that we start are stopped at the end."""
        proxy = self.llm_proxy
        if proxy is None and algorithm is not None and algorithm.uses_gateway:
            proxy = LLMProxy()
        if proxy is None:
            return None
        if proxy.get_store() is not store:
            proxy.set_store(store)
        if not proxy.is_running():
            await proxy.start()
            stack.push_async_callback(proxy.stop)
        return proxy

    async def _algorithm_bundle(
        self,
        algorithm: Algorithm | None,
        run: Run,
        store: LightningStore,
        proxy: LLMProxy | None,
        ready: Latch,
        event: Latch,
        train_dataset: Dataset | None,
        val_dataset: Dataset | None,
    ) -> None:
        """The algorithm with its collaborators; without one, wait to be stopped."""
        if algorithm is None or not algorithm.holds_runners:
            ready.set()
        if algorithm is None:
            await event.wait_async()
            return
        algorithm.set_ready(ready)
        algorithm.set_trainer(self)
        algorithm.set_store(store)
        algorithm.set_adapter(self.adapter)
        algorithm.set_llm_proxy(proxy)
        algorithm.set_run(run)
        if algorithm.is_async():
            work = algorithm.run(train_dataset, val_dataset)
            assert work is not None
            await work
        else:
            await call_sync(lambda: algorithm.run(train_dataset, val_dataset), None, name="leyden-algorithm")

    async def _runner_bundle(self, store: LightningStore, worker_id: int, event: Latch) -> None:
        """One worker: a copy of the runner, set up, run until the event, always torn down."""
        runner = copy.copy(self.runner)
        runner.init_worker(worker_id, store)
        try:
            await runner.iter(event=event)
        finally:
            runner.teardown_worker(worker_id)


def _how_to_resume(directory: Path | None) -> str:
    if directory is None:
        return "the run was stopped; it was kept in no directory"
    return (
        f"the run was stopped; everything finished is in {directory}. "
        f"Continue with Trainer(..., run_dir={str(directory)!r}).fit(..., resume=True)"
    )


def _required(
    spec: Any,
    expected: type[Any],
    name: str,
    registry: Mapping[str, str],
    default: type[Any],
    options: dict[str, Any] | None = None,
) -> Any:
    """The component, made by `default` with `options` when no spec was given; options fill what a spec leaves open."""
    return build_component(
        default if spec is None else spec,
        expected_type=expected,
        spec_name=name,
        registry=registry,
        optional_defaults=options,
    )
