"""`Trainer`: resolve the components, open the run, hand both sides to the strategy, say how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from leyden.adapter import TraceAdapter, TraceToTriplet
from leyden.algorithm import Algorithm, Baseline, Dataset, FastAlgorithm, IterativeAlgorithm, Run
from leyden.components import build_component
from leyden.errors import ConfigError, InvalidArgument, RunInterrupted, StoreError, UnknownRun
from leyden.execution import Elsewhere, ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.base import RunsAgain
from leyden.execution.events import StopSignal
from leyden.gateway import FoundGateways, LLMProxy
from leyden.host.listening import is_loopback
from leyden.litagent import LitAgent, check_resources
from leyden.loop import Callback, LogWriter, ProgressBar
from leyden.loop.rng import capture_rng, restore_rng
from leyden.monitor import Monitor
from leyden.options import NamedOptions, check_flag, check_number, named_arguments
from leyden.redaction import redact
from leyden.runner import AttemptRecorder, Hook, LitAgentRunner, Runner, WorkerBundle
from leyden.runner.calls import call_sync
from leyden.runs import RunSummary
from leyden.runs.beginning import begin_run, new_manifest
from leyden.runs.display import closing_summary, first_line
from leyden.runs.figures import figures_of
from leyden.runs.folder import MANIFEST, Manifest, remove_if_nothing_started, store_path
from leyden.runs.recorder import RunRecorder
from leyden.runs.recording import FolderRecorder
from leyden.runs.summary import count_rollouts
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, Sweeper, open_store
from leyden.tracer import OtelTracer, Tracer
from leyden.trainer.blocking import run_blocking, run_for_debugging
from leyden.trainer.boundary import short_errors
from leyden.trainer.checks import (
    check_dataset,
    check_not_imported,
    checked_callbacks,
    checked_hooks,
    checked_loggers,
    checked_name,
    checked_resources,
    checked_retention,
    checked_run_dir,
    exclusively,
    require_followed,
    require_used,
)
from leyden.trainer.debugging import for_debugging
from leyden.trainer.deserted import until_done_or_deserted, until_stopped_or_deserted
from leyden.trainer.registry import (
    AdapterRegistry,
    AlgorithmRegistry,
    ExecutionStrategyRegistry,
    RunnerRegistry,
    StoreRegistry,
    TracerRegistry,
)
from leyden.trainer.restarts import Restarts, check_restarts
from leyden.trainer.run_config import algorithm_config, run_config
from leyden.types import NamedResources, Retention
from leyden.types.run import current_run_id
from leyden.utils.exhaustion import warn_if_exhausted
from leyden.utils.latch import Latch
from leyden.utils.logs import log_for_files, notice, setup_logging_if_asked
from leyden.utils.text import describe_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LET_GO_SECONDS = 5.0
"""How long a run that was stopped waits for its store."""


@dataclass(slots=True)
class _Begun:
    """A run that is about to be worked on."""

    run: Run
    store: LightningStore
    manifest: Manifest
    new_folder: bool = False
    """Whether the run has a folder, and nothing was in it before."""
    shows_progress: bool = False


class Trainer(NamedOptions):
    """Trains an agent with an algorithm.

    Every component is given as an instance, a class, a factory, an import path, a registered name or a dict (see `build_component`).
    A dict without `type` holds options of the component's default class; an algorithm has none, so its dict needs `type`.

    algorithm: what learns. None: runners work on what others enqueue until the run is stopped, and data sets are refused.
    dev: `fit` does what `dev` does.
    n_runners: runners, each with `concurrency` rollouts in flight; 1 by default, or what the strategy says.
    concurrency: rollouts in flight in each runner; 64 by default, or what the runner says.
    max_rollouts: each runner ends after this many. When all have ended and rollouts are left, the run ends and says so
        (`RunSummary.stopped`), unless others work on the store too.
    initial_resources: what agents are given until the algorithm knows better.
    tracer, adapter, runner, strategy: OtelTracer, TraceToTriplet, LitAgentRunner and `shm` by default.
    port: where the store is served to runners in other processes (the strategy's `server_port`); with it, `cs` is the default strategy.
    daemon: the strategy's option `daemon`.
    store: by default a SQLite file in the run directory (`fit`), or memory (`dev`); or the URL of any (see `open_store`).
    llm_proxy: the gateway; one is made when the algorithm needs it.
    hooks: called at four points of every attempt.
    max_algorithm_restarts: how often in all an algorithm that raises is started again, from its last checkpoint (its beginning, before
        the first one), with runners started anew. The rollouts that it had enqueued stay: finished ones are met again by their ids, those
        under way are interrupted and go back to the queue, without using up an attempt. So each is done once, as in a run that was killed
        and resumed. For algorithms that can continue (`Algorithm.resumable`): an IterativeAlgorithm, Baseline, an `@algo` function that
        takes `run`. When no restart is left the error of the last failure is raised; earlier ones are in the log.
    run_dir: where the run is kept; by default a new directory under `.leyden/`.
    retention: what the store keeps of finished rollouts, and always what a resume would read again; by default everything.
    callbacks: called by the loop of the algorithm, which must be an IterativeAlgorithm.
    loggers: writers that get the metrics of each stage of any algorithm.
    progress: whether `fit` writes a first line, a progress bar and a closing summary to standard error.
    name: the run's name for people; by default the name of its folder.
    monitor: True watches the workers and the store, and writes alerts to the log; a Monitor uses
        its own options.
    """

    @short_errors
    def __init__(
        self,
        *,
        algorithm: Any = None,
        dev: bool = False,
        n_runners: int | None = None,
        concurrency: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        daemon: bool | None = None,
        llm_proxy: Any = None,
        hooks: Hook | Sequence[Hook] | None = None,
        run_dir: str | Path | None = None,
        retention: Retention | None = None,
        monitor: Any = False,
        max_algorithm_restarts: int = 0,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LogWriter | Sequence[LogWriter] = (),
        progress: bool = True,
        name: str | None = None,
    ) -> None:
        self.tracer: Tracer = _required(tracer, Tracer, "tracer", TracerRegistry, OtelTracer)
        self.adapter: TraceAdapter[Any] = _required(adapter, TraceAdapter, "adapter", AdapterRegistry, TraceToTriplet)
        self.algorithm = build_component(
            algorithm,
            expected_type=Algorithm,
            spec_name="algorithm",
            registry=AlgorithmRegistry,
            allow_none=True,
        )
        places = {"n_runners": n_runners, "server_port": port, "daemon": daemon}
        self.strategy: ExecutionStrategy = _required(
            strategy,
            ExecutionStrategy,
            "strategy",
            ExecutionStrategyRegistry,
            SharedMemoryExecutionStrategy if port is None else _client_server(),
            _given(places),
        )
        require_followed(self.strategy, **places)
        options = {"concurrency": concurrency, "max_rollouts": max_rollouts}
        self.runner: Runner[Any] = _required(
            runner,
            Runner,
            "runner",
            RunnerRegistry,
            LitAgentRunner,
            {"tracer": self.tracer, **_given(options)},
        )
        require_used(self.runner, **options, tracer=None if tracer is None else self.tracer)
        self._store_spec = store
        self._run_store: LightningStore | None = None
        """The store of the run under way, or of the last run, opened for reading."""
        self._last_file: str | None = None
        self.llm_proxy = _optional(llm_proxy, LLMProxy, "llm_proxy")
        self.hooks = checked_hooks(hooks)
        self.initial_resources = checked_resources(initial_resources)
        self.run_dir = checked_run_dir(run_dir)
        self.retention = checked_retention(retention)
        check_flag("dev", dev)
        self._dev = dev
        self.monitor = _optional(_monitor_of(monitor), Monitor, "monitor")
        check_number("max_algorithm_restarts", max_algorithm_restarts, at_least=0, whole=True)
        self.max_algorithm_restarts = max_algorithm_restarts
        self.callbacks, self.loggers = checked_callbacks(callbacks), checked_loggers(loggers)
        check_flag("progress", progress)
        self.progress = progress
        self.name = checked_name(name)

    @property
    def n_runners(self) -> int:
        """How many runners there are."""
        return self.strategy.n_runners

    @property
    def max_rollouts(self) -> int | None:
        """Return after how many rollouts each runner ends; None without a limit."""
        return getattr(self.runner, "max_rollouts", None)

    @property
    def store(self) -> LightningStore | None:
        """Return the store of the run under way, for hooks, agents, algorithms and other threads.

        Outside a run: the store that the trainer was given as an instance. Otherwise the store of the last run: one in memory as
        it is, one in a file opened read-only (the next run or another process may own it). None before the first run, and for a
        store on a server, which `open_store` opens by its address.
        """
        if self._run_store is None and self._last_file is not None:
            self._run_store = open_store(self._last_file, read_only=True)
        return self._run_store if self._run_store is not None else self._given_store()

    def _given_store(self) -> LightningStore | None:
        return self._store_spec if isinstance(self._store_spec, LightningStore) else None

    @short_errors
    @named_arguments
    def fit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        resume: bool = False,
    ) -> RunSummary:
        """Train the agent and block until it is done; works under a running event loop too.

        resume: continue the run in `run_dir` from its last finished step; without `run_dir`, the newest run under `.leyden/`
            that this program started with this algorithm. Another algorithm or model is refused, other differences are logged.
        Raises RunInterrupted (a KeyboardInterrupt) after Ctrl-C or SIGTERM; everything finished is kept.
        """
        if self._dev and not resume:
            return self.dev(agent, train_dataset, val_dataset=val_dataset)
        algorithm = self._checked(agent, self._what_learns(self._dev), train_dataset, val_dataset)
        with exclusively(self, algorithm, self.strategy, self.runner):
            begun = self._begin(algorithm, train_dataset, val_dataset, resume=resume, dev=self._dev)
            try:
                return run_blocking(self._execute(agent, algorithm, begun, train_dataset, val_dataset))
            except KeyboardInterrupt:
                raise RunInterrupted(_how_to_resume(begun.run.directory)) from None

    @short_errors
    @named_arguments
    async def afit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        resume: bool = False,
    ) -> RunSummary:
        """`fit` for async code. Cancelling it stops the run as Ctrl-C does."""
        algorithm = self._checked(agent, self._what_learns(self._dev), train_dataset, val_dataset)
        with exclusively(self, algorithm, self.strategy, self.runner):
            begun = self._begin(algorithm, train_dataset, val_dataset, resume=resume, dev=self._dev)
            return await self._execute(agent, algorithm, begun, train_dataset, val_dataset)

    @short_errors
    @named_arguments
    def dev(
        self, agent: LitAgent[Any], train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> RunSummary:
        """Run the agent on the data without training it, in memory: a quick check that everything
        fits together.

        Made for debuggers: the agent runs on the calling thread, in this process, with any
        strategy; one rollout at a time, without time limits. An agent's error is logged with its
        traceback. Ctrl-C, and the debugger's "quit", end the run.
        Under a running event loop (a notebook), async agents run in another thread.
        The algorithm must be a FastAlgorithm; `Baseline()` when there is none. Raises InvalidArgument (a TypeError) for another one.
        """
        algorithm = self._checked(agent, self._what_learns(dev=True), train_dataset, val_dataset)
        with exclusively(self, algorithm, self.strategy, self.runner), for_debugging(self) as lent:
            begun = self._begin(algorithm, train_dataset, val_dataset, resume=False, dev=True)
            return run_for_debugging(self._execute(agent, algorithm, begun, train_dataset, val_dataset), lent)

    # ---- before a run --------------------------------------------------------------------------------------------------

    def _what_learns(self, dev: bool) -> Algorithm | None:
        if not dev:
            return self.algorithm
        algorithm = self.algorithm or Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise InvalidArgument(
                f"dev() needs a FastAlgorithm (Baseline is one), not {type(algorithm).__name__}; use fit() to train, without dev=True"
            )
        return algorithm

    def _checked(
        self,
        agent: LitAgent[Any],
        algorithm: Algorithm | None,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
    ) -> Algorithm | None:
        """Everything that can be known to be wrong before anything starts."""
        setup_logging_if_asked()
        check_not_imported()
        self.strategy.check()
        keeps_checkpoints = self._store_spec is None or self.run_dir is not None
        check_restarts(self.max_algorithm_restarts, algorithm, keeps_checkpoints=keeps_checkpoints)
        check_dataset("train_dataset", train_dataset)
        check_dataset("val_dataset", val_dataset)
        if not isinstance(agent, LitAgent):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass plain functions
            raise ConfigError(
                f"the agent is a {type(agent).__name__}; decorate the function with @rollout, @llm_rollout or "
                "@prompt_rollout, or subclass LitAgent"
            )
        if (
            algorithm is None
            and self.strategy.runs_algorithm
            and (train_dataset is not None or val_dataset is not None)
        ):
            raise ConfigError(
                "there is data and no algorithm, so nothing would run the agent on it: give Trainer(algorithm='baseline') to run "
                "and measure the agent, or an algorithm that trains it; without data, runners work on what others enqueue"
            )
        if self.callbacks and not isinstance(algorithm, IterativeAlgorithm):
            given = "there is no algorithm" if algorithm is None else f"{_name_of(algorithm)} has no TrainLoop"
            raise ConfigError(
                f"callbacks={[type(callback).__name__ for callback in self.callbacks]}, but {given} that would call them; give an "
                "IterativeAlgorithm (PolicyGradient is one), or leave callbacks out: loggers= gets the metrics of any algorithm"
            )
        if algorithm is not None:
            algorithm.set_initial_resources(self.initial_resources)
            planned = algorithm.planned_resources()
            if planned is not None:
                check_resources(agent, planned)
        return algorithm

    def _begin(
        self,
        algorithm: Algorithm | None,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
        *,
        resume: bool,
        dev: bool,
    ) -> _Begun:
        """Return the run with its store. Nothing is left behind if an argument is wrong."""
        if dev:
            return self._begin_dev(algorithm, resume)
        if resume and self._store_spec is not None and self.run_dir is None:
            raise ConfigError("resume=True needs a run directory; give run_dir= beside the store, or give no store")
        remote = self.strategy.remote_store()
        if remote is not None and not self.strategy.runs_algorithm:
            return _Begun(Run(run_id=secrets.token_hex(6)), remote, new_manifest(kind="fit", name="runners", config={}))
        config = run_config(
            algorithm,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            strategy=self.strategy,
            n_runners=self.n_runners,
            concurrency=self.runner.concurrency,
        )
        kind = "fit" if algorithm is None else algorithm.run_kind
        if remote is not None or (self._store_spec is not None and self.run_dir is None):
            store = self._build_store() if remote is None else remote
            manifest = new_manifest(kind=kind, name=self.name or kind, config=config)
            begun = _Begun(Run(run_id=manifest.record.run_id), store, manifest)
        else:
            given = None if self._store_spec is None else self._build_store()
            directory, manifest = begin_run(self.run_dir, resume=resume, kind=kind, name=self.name, config=config)
            run = Run(manifest.record.run_id, directory, resume=resume, options=manifest.options)
            store = SqliteLightningStore(store_path(directory)) if given is None else given
            begun = _Begun(run, store, manifest, new_folder=not resume)
        begun.shows_progress = self.progress
        config["store"] = redact(begun.store.url)
        return begun

    def _begin_dev(self, algorithm: Algorithm | None, resume: bool) -> _Begun:
        if resume:
            raise ConfigError("resume=True, but dev=True keeps no run; leave one of them out")
        store = self.strategy.remote_store()
        if store is None:
            store = self._build_store() if self._store_spec is not None else InMemoryLightningStore()
        manifest = new_manifest(kind="dev", name=self.name or "dev", config=algorithm_config(algorithm))
        return _Begun(Run(manifest.record.run_id), store, manifest)

    def _build_store(self) -> LightningStore:
        if isinstance(self._store_spec, str) and "/" in self._store_spec:  # an address or a path
            return open_store(self._store_spec)
        return build_component(
            self._store_spec,
            expected_type=LightningStore,
            spec_name="store",
            registry=StoreRegistry,
            dict_requires_type=False,
            dict_default_cls=SqliteLightningStore,
        )

    # ---- a run ---------------------------------------------------------------------------------------------------------

    async def _execute(
        self,
        agent: LitAgent[Any],
        algorithm: Algorithm | None,
        begun: _Begun,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
    ) -> RunSummary:
        agent.set_trainer(self)
        run, store = begun.run, begun.store
        if not self.strategy.runs_algorithm:
            async with contextlib.AsyncExitStack() as stack:
                await self._attach(store, stack)
                await self._work(agent, None, run, store, None, None)
            return RunSummary(run.directory)  # the algorithm's side counts what became of its rollouts
        nothing_started = begun.new_folder
        try:
            async with contextlib.AsyncExitStack() as stack:
                await self._attach(store, stack)
                recorder = self._recorder(begun, algorithm)
                try:
                    await recorder.open()
                    nothing_started = False
                    if begun.shows_progress:
                        _show(first_line(run, begun.manifest.record.config))
                    run = replace(run, recorder=recorder)
                    summary = await self._work(agent, algorithm, run, store, train_dataset, val_dataset)
                except asyncio.CancelledError:
                    nothing_started = begun.new_folder and await _nothing_started(recorder, store)
                    if not nothing_started:
                        logger.info(_how_to_resume(run.directory))
                    await recorder.close("stopped", "interrupted")
                    raise
                except Exception as error:
                    log_for_files(logger, "run %s has failed", run.run_id, error=error)
                    nothing_started = begun.new_folder and await _nothing_started(recorder, store)
                    if run.directory is not None and not nothing_started:
                        error.add_note(_how_to_resume(run.directory))
                    await recorder.close("failed", f"{type(error).__name__}: {describe_error(error)}")
                    raise
                recorder.note(f"done\n{summary}")
                await recorder.close("succeeded" if summary.stopped is None else "stopped", summary.stopped)
        finally:
            if nothing_started and run.directory is not None:
                self._last_file = None
                remove_if_nothing_started(run.directory)
        self._report(summary)
        return summary

    def _recorder(self, begun: _Begun, algorithm: Algorithm | None) -> RunRecorder:
        directory = begun.run.directory
        theirs = algorithm.callbacks if isinstance(algorithm, IterativeAlgorithm) else ()
        has_bar = any(isinstance(callback, ProgressBar) for callback in (*theirs, *self.callbacks))
        return RunRecorder(
            begun.manifest,
            begun.store,
            None if directory is None else FolderRecorder(directory, begun.manifest),
            writers=self.loggers,
            callbacks=self.callbacks,
            bar=ProgressBar if begun.shows_progress and not has_bar else None,
        )

    def _report(self, summary: RunSummary) -> None:
        """Show how the run has ended."""
        logger.log(logging.DEBUG if self.progress else logging.INFO, "run %s: done\n%s", summary.run_id, summary)
        if self.progress:
            _show(closing_summary(summary))
        elif summary.stopped is not None:
            logger.warning("the run ended before its algorithm did\n%s", summary)
        elif summary.failures:
            logger.warning("some rollouts failed\n%s", summary)

    async def _work(
        self,
        agent: LitAgent[Any],
        algorithm: Algorithm | None,
        run: Run,
        store: LightningStore,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
    ) -> RunSummary:
        """Run both sides on a store that is open, and count what came of it."""
        stopped: list[str] = []
        results: list[Any] = []
        started = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            if self.retention is not None and store.capabilities["zero_copy"]:
                raise ConfigError(
                    f"others work on {store.url} too, so one run does not decide what it keeps: leave retention out here, and "
                    "give it where the store is served (leyden store --keep-rollouts, --keep-days, --keep-gb)"
                )
            if run.resume:
                await store.release_claims(worker_ids=self._claimants(run, store))
            sweeper = Sweeper(store, retention=self.retention)
            if self.runner.debugger is None:  # no time limit holds at a breakpoint
                await stack.enter_async_context(sweeper)
            if self.monitor is not None and self.strategy.runs_algorithm:
                await stack.enter_async_context(self.monitor.watch(store))
            proxy = await self._gateway(algorithm, store, stack)
            workers = WorkerBundle(
                agent, self.hooks, self._recorders(proxy), self.runner, self._worker_names(run, store)
            )
            logger.debug(
                "run %s: %s with %d runners (%s) on %s, adapter %s",
                run.run_id,
                type(algorithm).__name__,
                self.n_runners,
                type(self.strategy).__name__,
                store.url,
                type(self.adapter).__name__,
            )
            workers.init()
            stack.callback(workers.teardown)

            async def work(run: Run, ready: Latch, store: LightningStore, event: Latch) -> None:
                left = await self._algorithm_bundle(
                    algorithm, run, store, proxy, ready, event, train_dataset, val_dataset, results
                )
                if left:
                    stopped.append(self._why_deserted(left, run))

            try:
                await self._run_both(work, run, store, workers)
            except asyncio.CancelledError:
                await self._let_go(run, store)
                raise
            except Exception as error:
                await self._let_go(run, store)
                warn_if_exhausted(logger, "the run", error)
                raise
            if not isinstance(run.recorder, RunRecorder):
                return RunSummary(run.directory)
            # A store that was given may hold rollouts of earlier runs. Without an algorithm, the work is another's.
            is_shared = algorithm is not None and (self._store_spec is not None or store.capabilities["zero_copy"])
            rollouts, failures = await count_rollouts(store, run.run_id if is_shared else None)
            figures = figures_of(run.recorder.rows)
            return RunSummary(
                run.directory,
                rollouts,
                failures,
                sweeper.forgotten,
                next(iter(stopped), None),
                reward=figures.reward,
                val_reward=figures.val_reward,
                metrics=figures.metrics,
                result=results[-1] if results else None,
                seconds=time.monotonic() - started,
                run_id=run.run_id,
            )

    async def _run_both(
        self,
        work: Callable[[Run, Latch, LightningStore, Latch], Awaitable[None]],
        run: Run,
        store: LightningStore,
        workers: WorkerBundle,
    ) -> None:
        """Algorithm (`work`) and runners until the algorithm is done; both once more when it has failed and may be restarted."""
        restarts, random_states = Restarts(self.max_algorithm_restarts), capture_rng()
        while (error := await self._run_once(partial(work, run), store, workers, restarts)) is not None:
            await restarts.pause(error)
            await store.release_claims(worker_ids=self._claimants(run, store))
            restore_rng(random_states)  # those of a checkpoint come after them, if there is one
            run = replace(run, resume=True)

    async def _run_once(
        self,
        work: Callable[[Latch, LightningStore, Latch], Awaitable[None]],
        store: LightningStore,
        workers: WorkerBundle,
        restarts: Restarts,
    ) -> Exception | None:
        """Why the algorithm is to be started again; None: it is done."""
        ready, failures = Latch(), list[Exception]()

        async def algorithm_bundle(store: LightningStore, event: Latch) -> None:
            try:
                await work(ready, store, event)
            except Exception as error:
                event.set()  # first: runners that still wait for it to be ready do not begin
                if not restarts.allow(error):
                    raise
                failures.append(error)
                raise RunsAgain from error
            finally:
                ready.set()  # nobody waits for an algorithm that has ended

        try:
            await self.strategy.execute(algorithm_bundle, workers, store, ready=ready)
        except RunsAgain:
            return failures[0]
        return None

    async def _gateway(
        self, algorithm: Algorithm | None, store: LightningStore, stack: contextlib.AsyncExitStack
    ) -> LLMProxy | None:
        """The user's gateway, or one of our own when the algorithm needs one; ours and those that we start are stopped at the end.

        None where the algorithm, and so the gateway, is elsewhere.
        """
        if not self.strategy.runs_algorithm:
            return None
        proxy, elsewhere = self.llm_proxy, self.strategy.elsewhere()
        if proxy is None and algorithm is not None and algorithm.uses_gateway:
            proxy = LLMProxy() if elsewhere is None else _gateway_for(elsewhere)
        if proxy is None:
            return None
        if elsewhere is not None:
            proxy.share_control(elsewhere.secret)
            if is_loopback(proxy.host) and not is_loopback(elsewhere.host):
                logger.warning(
                    "the gateway listens on %s, where agents on other machines do not reach it: give LLMProxy a host= and a token=",
                    proxy.host,
                )
        if proxy.get_store() is not store:
            proxy.set_store(store)
        if not proxy.is_running():
            await proxy.start()
            stack.push_async_callback(proxy.stop)
        return proxy

    def _recorders(self, proxy: LLMProxy | None) -> Sequence[AttemptRecorder]:
        """What runners tell that an attempt is over."""
        elsewhere = self.strategy.elsewhere()
        if not self.strategy.runs_algorithm and elsewhere is not None:
            return (FoundGateways(elsewhere.secret),)
        return () if proxy is None else (proxy,)

    async def _algorithm_bundle(
        self,
        algorithm: Algorithm | None,
        run: Run,
        store: LightningStore,
        proxy: LLMProxy | None,
        ready: Latch,
        event: Latch,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
        results: list[Any],
    ) -> int:
        """Run the algorithm with its collaborators; without one, wait to be stopped.

        Add to `results` the value that the algorithm returned. Return 0, or how many rollouts are left because all runners have ended.
        """
        if algorithm is None or not algorithm.holds_runners:
            ready.set()
        if algorithm is None:
            notice(logger, "waiting for rollouts that others enqueue in %s; Ctrl-C ends", store.url)
            await (until_stopped_or_deserted(event) if isinstance(event, StopSignal) else event.wait_async())
            return 0

        async def interrupt() -> None:
            if isinstance(event, StopSignal):
                await event.end_runners()
            await self._let_go(run, store)

        algorithm.set_ready(ready)
        algorithm.set_interrupt(interrupt)
        algorithm.set_trainer(self)
        algorithm.set_store(store)
        algorithm.set_adapter(self.adapter)
        algorithm.set_llm_proxy(proxy)
        algorithm.set_run(run)
        algorithm.set_concurrency(self.n_runners * self.runner.concurrency)

        if isinstance(run.recorder, RunRecorder):
            run.recorder.begin_algorithm(resume=run.resume)

        async def work() -> None:
            token = current_run_id.set(run.run_id)
            try:
                async with algorithm.collecting():
                    if algorithm.is_async():
                        results.append(await algorithm.run(train_dataset, val_dataset))
                    else:
                        run_it = partial(algorithm.run, train_dataset, val_dataset)
                        results.append(await call_sync(run_it, None, name="leyden-algorithm"))
            finally:
                current_run_id.reset(token)

        if not isinstance(event, StopSignal) or store.capabilities["zero_copy"]:  # others may run what is left
            await work()
            return 0
        return await until_done_or_deserted(asyncio.ensure_future(work()), event, store)

    async def _attach(self, store: LightningStore, stack: contextlib.AsyncExitStack) -> None:
        """Make `store` the trainer's until `stack` closes. Close it there if it is the run's own, unless it is in memory."""
        self._run_store, self._last_file = store, None

        def detach() -> None:
            if isinstance(store, InMemoryLightningStore):
                return
            self._run_store = None
            if store is not self._store_spec and store.url.startswith("sqlite://"):
                self._last_file = store.url

        stack.callback(detach)
        if store is not self._store_spec and not isinstance(store, InMemoryLightningStore):
            await stack.enter_async_context(store)

    def _why_deserted(self, left: int, run: Run) -> str:
        limit = "" if self.max_rollouts is None else f" after max_rollouts={self.max_rollouts} each"
        again = "" if run.directory is None else ", or continue with fit(..., resume=True)"
        return (
            f"all {self.n_runners} runners have ended{limit}, and {left:,} rollouts are left; raise max_rollouts{again}"
        )

    def _worker_names(self, run: Run, store: LightningStore) -> list[str]:
        """What this run's workers are called, of their own in a store that others work on too."""
        shared = f"{run.run_id}-" if store.capabilities["zero_copy"] else ""
        return [f"{shared}Worker-{worker_id}" for worker_id in range(self.n_runners)]

    async def _let_go(self, run: Run, store: LightningStore) -> None:
        """Put what is under way back in the queue, for the next run; the store may be what failed."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_LET_GO_SECONDS):
                await store.release_claims(worker_ids=self._claimants(run, store))

    def _claimants(self, run: Run, store: LightningStore) -> list[str] | None:
        """Whose claims end with this run; None: everyone's, where it has the store for itself."""
        return self._worker_names(run, store) if store.capabilities["zero_copy"] else None


def _gateway_for(elsewhere: Elsewhere) -> LLMProxy:
    """A gateway where runners that were started elsewhere look for it; the model's callers find its token in their resources."""
    token = None if is_loopback(elsewhere.host) else secrets.token_urlsafe(32)
    return LLMProxy(host=elsewhere.host, port=elsewhere.gateway_port, token=token)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _name_of(algorithm: Algorithm) -> str:
    return getattr(algorithm, "__name__", type(algorithm).__name__)


def _show(text: str) -> None:
    """Write to standard error; a stream that is gone does not end the run."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


async def _nothing_started(recorder: RunRecorder, store: LightningStore) -> bool:
    """Whether the run has neither a row nor a rollout; False if the store cannot tell."""
    if recorder.rows:
        return False
    try:
        async with asyncio.timeout(_LET_GO_SECONDS):
            return not len(await store.query_rollouts(run_id=recorder.manifest.record.run_id, limit=1))
    except UnknownRun:  # the store did not even take the run
        return True
    except (StoreError, TimeoutError):
        return False


def _how_to_resume(directory: Path | None) -> str:
    if directory is not None and not (directory / MANIFEST).exists():
        return "the run was stopped before it had begun; nothing is left of it"
    if directory is None:
        return "the run was stopped; it was kept in no directory"
    return (
        f"the run was stopped; everything finished is in {directory}. "
        f"Continue with Trainer(..., run_dir={str(directory)!r}).fit(..., resume=True)"
    )


def _monitor_of(spec: Any) -> Any:
    """True and False as `build_component` has them."""
    return {True: Monitor, False: None}[spec] if isinstance(spec, bool) else spec


def _required(
    spec: Any,
    expected: type[Any],
    name: str,
    registry: Mapping[str, Any],
    default: type[Any],
    options: dict[str, Any] | None = None,
) -> Any:
    """Return the component, made by `default` if the spec names no class; `options` fill what the spec leaves open."""
    return build_component(
        default if spec is None else spec,
        expected_type=expected,
        spec_name=name,
        registry=registry,
        optional_defaults=options,
        dict_requires_type=False,
        dict_default_cls=default,
    )


def _client_server() -> type[ExecutionStrategy]:
    """Return the client-server strategy.

    Importing its module here spares other runs the server's imports.
    """
    from leyden.execution.client_server import ClientServerExecutionStrategy

    return ClientServerExecutionStrategy


def _optional(spec: Any, default: type[T], name: str) -> T | None:
    """Return the component, or None if there is no spec; a dict holds the arguments of `default`."""
    return build_component(
        spec, expected_type=default, spec_name=name, allow_none=True, dict_requires_type=False, dict_default_cls=default
    )
