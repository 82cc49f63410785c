"""`Fit`: one call of `fit` or `dev`, from its run's directory to its summary.

A fit opens the run and its store, starts the gateway and the workers, passes the algorithm and the workers to the
strategy, restarts an algorithm that may be restarted, and records how the run ended. It knows the trainer's
configuration as `FitConfig`, never the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from leyden._lib.aio import Latch, first_done
from leyden._lib.exhaustion import warn_if_exhausted
from leyden._lib.host.listening import is_loopback
from leyden._lib.logs import log_for_files, notice
from leyden._lib.text import describe_error, error_line
from leyden.adapter import TraceAdapter
from leyden.agent import LitAgent, agent_version
from leyden.algorithm import Algorithm, Dataset, IterativeAlgorithm, Run
from leyden.algorithm.steering import steerable
from leyden.doctor import FitWatch
from leyden.errors import ConfigError, MissingResource, StoreError, UnknownRun, redact
from leyden.execution import ExecutionStrategy
from leyden.execution.execution_strategy import RunsAgain, StopSignal
from leyden.execution.runner import AttemptRecorder, Hook, Runner, WorkerBundle
from leyden.execution.runner.calls import call_sync
from leyden.execution.runner.runner import torn_down
from leyden.gateway import FoundGateways, LLMProxy, Prices
from leyden.monitor import Monitor
from leyden.report import write_at_end
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, Sweeper
from leyden.trainer.cost import estimate, limit_reached, priced_models
from leyden.trainer.restarts import Restarts
from leyden.trainer.run_config import algorithm_config, run_config
from leyden.trainer.run_store import RunStore
from leyden.training import Callback, LogWriter, ProgressBar
from leyden.training.live_view import RolloutTally
from leyden.training.rng import capture_rng, restore_rng
from leyden.training.runs import RunSummary
from leyden.training.runs.display import closing_summary, first_line, show
from leyden.training.runs.folder import MANIFEST, RUNS, Manifest, remove_if_nothing_started, store_path
from leyden.training.runs.opening import NEVER_STARTED, begin_run, new_manifest
from leyden.training.runs.recorder import RunRecorder
from leyden.training.runs.recording import FolderRecorder
from leyden.training.runs.run_metrics import metrics_of
from leyden.training.runs.start import how_to_continue, started_from
from leyden.training.runs.steering import Steering
from leyden.training.runs.summary import count_rollouts
from leyden.types import Retention
from leyden.types.rollout import ROLLOUT_FINISHED
from leyden.types.run_record import algorithm_group, current_run_id

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 5.0
"""Seconds that a stopped run waits for its store to release its claims."""
_OWN_CALL_SECONDS = 60.0
"""The longest time that a run which ends early waits for its algorithm's own model calls."""
_CHECK_SECONDS = 1.0
"""Seconds between two checks for rollouts of an algorithm that continues without runners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """The trainer's components and options at the time of the call."""

    strategy: ExecutionStrategy
    runner: Runner[Any]
    adapter: TraceAdapter[Any]
    llm_proxy: LLMProxy | None
    hooks: tuple[Hook, ...]
    callbacks: tuple[Callback, ...]
    loggers: tuple[LogWriter, ...]
    monitor: Monitor | None
    retention: Retention | None
    max_algorithm_restarts: int
    prices: Prices | None
    max_cost: float | None
    run_store: RunStore
    run_dir: Path | None
    name: str | None
    progress: bool
    report: bool
    not_default: dict[str, Any]
    """The trainer's options that are not defaults, by dotted path."""
    code: dict[str, Any]
    """The code of the run, from `code_of`."""


@dataclass(frozen=True, slots=True)
class FitInput:
    """The arguments of one call: the agent, the algorithm that trains it, and the data."""

    agent: LitAgent[Any]
    algorithm: Algorithm | None
    train_dataset: Dataset[Any] | None = None
    val_dataset: Dataset[Any] | None = None


class Fit:
    """One call of `fit` or `dev`. The constructor opens the run; `execute` runs it."""

    def __init__(self, config: FitConfig, given: FitInput, *, resume: bool = False, dev: bool = False) -> None:
        """
        resume: continue the run in `config.run_dir`.
        dev: keep no directory.
        Raise ConfigError, and leave nothing behind, if an argument is wrong.
        """
        self._config, self._given = config, given
        self._strategy, self._runner = config.strategy, config.runner
        self._run, self._store, self._manifest = (
            _begin_dev(config, given.algorithm, resume) if dev else _begin(config, given, resume)
        )
        self._is_new_folder = self.directory is not None and not resume
        self._shows_progress = config.progress and not dev
        self._result: Any = None
        """The value that the algorithm returned."""
        self._stopped: str | None = None
        """The reason if the run ended before its algorithm did."""
        self._end_now: Callable[[], None] = lambda: None
        """Ends the run as Ctrl-C does. Safe in any thread."""
        self._steering = (
            None
            if self.directory is None
            else Steering(self.directory, steerable(given.algorithm), stop=lambda: self._end_now())
        )

    @property
    def directory(self) -> Path | None:
        """The run's directory; None for a run that is kept nowhere."""
        return self._run.directory

    @property
    def stopped_by(self) -> str | None:
        """Who has stopped the run with `leyden stop`; None if nobody has."""
        return None if self._steering is None else self._steering.stopped

    async def execute(self) -> RunSummary:
        """Run the algorithm and the runners, record how it ended, and return the summary."""
        run_store, algorithm = self._config.run_store, self._given.algorithm
        if not self._strategy.runs_algorithm:
            async with run_store.attached(self._store):
                await self._work(None)
            return RunSummary(self.directory)  # the algorithm's process counts rollouts and their results
        nothing_started = self._is_new_folder
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end_now() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the run has ended
                loop.call_soon_threadsafe(task.cancel)

        self._end_now = end_now
        try:
            async with run_store.attached(self._store):
                recorder = self._recorder()
                try:
                    await recorder.open()
                    nothing_started = False
                    if self._shows_progress:
                        show(first_line(self._run, self._manifest.record.config))
                        if (expected := self._expected_cost()) is not None:
                            show(expected)
                    self._run = replace(self._run, recorder=recorder)
                    summary = await self._work(algorithm)
                except asyncio.CancelledError:
                    nothing_started = self._is_new_folder and await _nothing_started(recorder, self._store)
                    if not nothing_started:
                        logger.info(how_to_resume(self.directory))
                    await recorder.close("stopped", self.stopped_by or "interrupted")
                    if self.stopped_by is None:
                        raise
                    task.uncancel()  # nobody has cancelled the call itself
                    return RunSummary(self.directory, stopped=self.stopped_by, run_id=self._run.run_id)
                except Exception as error:
                    log_for_files(logger, "run %s has failed", self._run.run_id, error=error)
                    nothing_started = self._is_new_folder and await _nothing_started(recorder, self._store)
                    if nothing_started and not _is_mistake(error):  # kept, so that `leyden doctor` can explain it
                        nothing_started, self._manifest.record.config[NEVER_STARTED] = False, True
                    elif self.directory is not None and not nothing_started:
                        error.add_note(how_to_resume(self.directory, failed=True))
                    try:
                        await recorder.close("failed", error_line(error))
                    except Exception:
                        logger.exception("the end of the run could not be recorded")
                    raise
                recorder.note(f"done\n{summary}")
                await recorder.close("succeeded" if summary.stopped is None else "stopped", summary.stopped)
        finally:
            if nothing_started and self.directory is not None:
                run_store.drop_file()
                remove_if_nothing_started(self.directory)
            elif self.directory is not None and self._config.report:
                write_at_end(self.directory)
        self._report(summary)
        return summary

    def _expected_cost(self) -> str | None:
        """Return the estimate of a new run whose prices are known; None for any other run."""
        algorithm, models = self._given.algorithm, priced_models(self._config.llm_proxy, self._config.prices)
        if algorithm is None or self._run.resume or (self._config.prices is None and not any(m.price for m in models)):
            return None
        given, root = self._given, RUNS if self.directory is None else self.directory.parent
        sizes = [0 if data is None else len(data) for data in (given.train_dataset, given.val_dataset)]
        return estimate(algorithm, given.agent, *sizes, models=models, currency=self._currency, root=root)

    @property
    def _currency(self) -> str:
        return str(self._manifest.record.config.get("currency", ""))

    def _recorder(self) -> RunRecorder:
        """Return the recorder of this run. It adds a progress bar unless a callback is one. All bars show the rollouts
        that the run's collector counts.
        """
        config, algorithm = self._config, self._given.algorithm
        of_algorithm = algorithm.callbacks if isinstance(algorithm, IterativeAlgorithm) else ()
        bars = [each for each in (*of_algorithm, *config.callbacks) if isinstance(each, ProgressBar)]
        bar = None
        if self._shows_progress and not bars:
            is_eval = self._manifest.record.kind == "eval"
            bars.append(bar := ProgressBar(metrics=(), activity="eval") if is_eval else ProgressBar())
        folder = None
        if self.directory is not None and self._steering is not None:
            looks = (self._steering.look, FitWatch(self.directory).look)
            folder = FolderRecorder(self.directory, self._manifest, looks=looks)
        recorder = RunRecorder(
            self._manifest,
            self._store,
            folder,
            writers=config.loggers,
            callbacks=config.callbacks,
            bar=bar,
            steering=self._steering,
        )
        if bars:
            tally = RolloutTally(
                concurrency=self._strategy.n_runners * self._runner.concurrency,
                running=lambda: getattr(self._runner, "in_flight", None),
            )
            self._run = replace(self._run, tally=tally)
            for each in bars:
                each.tally, each.earlier_rows = tally, lambda: recorder.rows
                if self._steering is not None:
                    each.pause = self._steering.pause
        return recorder

    def _report(self, summary: RunSummary) -> None:
        """Show the user how the run ended."""
        progress, algorithm = self._config.progress, self._given.algorithm
        is_shown = algorithm is not None and algorithm.result_is_shown
        logger.log(logging.DEBUG if progress else logging.INFO, "run %s: done\n%s", summary.run_id, summary)
        if progress and not is_shown:
            show(closing_summary(summary))
        elif summary.stopped is not None:
            logger.warning("the run ended before its algorithm did\n%s", summary)
        elif summary.failures and not is_shown:
            logger.warning("some rollouts failed\n%s", summary)

    # ---- both sides ----------------------------------------------------------------------------

    async def _work(self, algorithm: Algorithm | None) -> RunSummary:
        """Run the algorithm and the runners on the open store, and return the summary of their rollouts."""
        store, run, config = self._store, self._run, self._config
        started = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            if config.retention is not None and store.capabilities["zero_copy"]:
                raise ConfigError(
                    f"others work on {store.url} too, so one run does not decide what it keeps: leave retention out here, and "
                    "give it where the store is served (leyden store --keep-rollouts, --keep-days, --keep-gb)"
                )
            if run.resume:
                await self._requeue()
            sweeper = Sweeper(store, retention=config.retention)
            if self._runner.debugger is None:  # no time limit holds at a breakpoint
                await stack.enter_async_context(sweeper)
            if config.monitor is not None and self._strategy.runs_algorithm:
                await stack.enter_async_context(config.monitor.watch(store))
            proxy = await self._gateway(algorithm, stack)
            workers = WorkerBundle(
                self._given.agent, config.hooks, self._recorders(proxy), self._runner, self._worker_names()
            )
            logger.debug(
                "run %s: %s with %d runners (%s) on %s, adapter %s",
                run.run_id,
                type(algorithm).__name__,
                self._strategy.n_runners,
                type(self._strategy).__name__,
                store.url,
                type(config.adapter).__name__,
            )
            workers.init()
            stack.enter_context(torn_down(workers.teardown))
            try:
                await self._run_both(algorithm, proxy, workers)
            except asyncio.CancelledError:
                await self._release_claims()
                raise
            except Exception as error:
                await self._release_claims()
                warn_if_exhausted(logger, "the run", error)
                raise
            if not isinstance(run.recorder, RunRecorder):
                return RunSummary(self.directory)
            # The store may hold rollouts of other runs, and calls of the algorithm itself. Without
            # an algorithm, other programs enqueued the rollouts, so all are counted.
            rollouts, failures = await count_rollouts(store, None if algorithm is None else run.run_id)
            metrics = metrics_of(run.recorder.rows)
            return RunSummary(
                self.directory,
                rollouts,
                failures,
                sweeper.pruned,
                self._stopped,
                reward=metrics.reward,
                val_reward=metrics.val_reward,
                metrics=metrics.metrics,
                reflection_calls=metrics.reflection_calls,
                result=self._result,
                seconds=time.monotonic() - started,
                run_id=run.run_id,
                spending=await store.sum_spending(run.run_id),
                currency=self._currency,
            )

    async def _run_both(self, algorithm: Algorithm | None, proxy: LLMProxy | None, workers: WorkerBundle) -> None:
        """Run algorithm and runners until the algorithm is done. After a failure, restart both as often as allowed."""
        restarts, random_states = Restarts(self._config.max_algorithm_restarts), capture_rng()
        while (error := await self._run_once(algorithm, proxy, workers, restarts)) is not None:
            await restarts.pause(error)
            await self._requeue()
            restore_rng(random_states)  # a checkpoint, if there is one, sets its own states later
            self._run = replace(self._run, resume=True)

    async def _run_once(
        self, algorithm: Algorithm | None, proxy: LLMProxy | None, workers: WorkerBundle, restarts: Restarts
    ) -> Exception | None:
        """Run algorithm and runners once. Return the error after which to restart them; None if it is done."""
        ready, failures = Latch(), list[Exception]()

        async def algorithm_bundle(store: LightningStore, event: Latch) -> None:
            """Run the algorithm once. Raise RunsAgain if it failed and may be started again."""
            try:
                n_left = await self._run_algorithm(algorithm, store, proxy, ready, event)
                if not n_left:
                    self._stopped = None  # the algorithm was done before its cost was known to have reached the limit
                elif self._stopped is None:
                    self._stopped = self._deserted_message(n_left)
            except Exception as error:
                event.set()  # before `ready` is set below, so that waiting runners see it and do not begin
                if not restarts.allow(error):
                    raise
                failures.append(error)
                raise RunsAgain from error
            finally:
                ready.set()  # no runner waits for an algorithm that has ended

        try:
            await self._strategy.execute(algorithm_bundle, workers, self._store, ready=ready)
        except RunsAgain:
            return failures[0]
        return None

    async def _run_algorithm(
        self,
        algorithm: Algorithm | None,
        store: LightningStore,
        proxy: LLMProxy | None,
        ready: Latch,
        event: Latch,
    ) -> int:
        """Pass the algorithm its collaborators and run it; without an algorithm, wait to be stopped.

        ready: set when the runners may begin.
        event: set when the run is to stop.
        Return 0, or how many rollouts are left because all runners have ended.
        """
        if algorithm is None or not algorithm.holds_runners:
            ready.set()
        if algorithm is None:
            notice(logger, "waiting for rollouts that others enqueue in %s; Ctrl-C ends", store.url)
            await (_until_stopped_or_deserted(event) if isinstance(event, StopSignal) else event.wait_async())
            return 0

        async def interrupt() -> None:
            if isinstance(event, StopSignal):
                event.set()
                ready.set()  # runners that still wait for it end at once, because they see that the run is stopped
                await event.end_runners()
            await self._release_claims()

        run = self._run
        algorithm.set_ready(ready)
        algorithm.set_interrupt(interrupt)
        algorithm.set_store(store)
        algorithm.set_adapter(self._config.adapter)
        algorithm.set_llm_proxy(proxy)
        algorithm.set_run(run)
        algorithm.set_concurrency(self._strategy.n_runners * self._runner.concurrency)
        algorithm.set_agent_version(agent_version(self._given.agent))

        if isinstance(run.recorder, RunRecorder):
            run.recorder.begin_algorithm(resume=run.resume)

        async def work() -> None:
            """Run the algorithm as this run's, and keep the value that it returns."""
            data = self._given.train_dataset, self._given.val_dataset
            token = current_run_id.set(run.run_id)
            try:
                async with algorithm.collecting():
                    if algorithm.is_async():
                        self._result = await algorithm.run(*data)
                    else:
                        self._result = await call_sync(partial(algorithm.run, *data), None, name="leyden-algorithm")
            finally:
                current_run_id.reset(token)

        alone = None if store.capabilities["zero_copy"] or not isinstance(event, StopSignal) else event
        # Without a runner of this run, others may run what is left.
        working = _return_zero(work()) if alone is None else _until_done_or_deserted(work(), alone, store, run.run_id)
        if self._config.max_cost is None:
            return await working
        over = self._until_too_dear(self._config.max_cost, event, store, proxy, is_alone=alone is not None)
        async with first_done(working, over) as (ended, stopped):
            return stopped.result() if stopped.done() else ended.result()

    async def _until_too_dear(
        self, max_cost: float, event: Latch, store: LightningStore, proxy: LLMProxy | None, *, is_alone: bool
    ) -> int:
        """Wait until the run's calls have reached `max_cost`. Then let the runners finish what they have begun, and
        nothing else; return 1 when they have.

        is_alone: the end of the runners ends the algorithm, so do not return.
        """
        self._stopped = await limit_reached(store, self._run.run_id, max_cost, proxy, self._currency)
        notice(logger, "%s; the rollouts under way are finished", self._stopped)
        event.set()
        if is_alone:
            await asyncio.Event().wait()
        if isinstance(event, StopSignal):
            await event.ended.wait_async()
        await _own_calls_ended(store, self._run.run_id)
        return 1

    def _deserted_message(self, n_left: int) -> str:
        """Return why the run ended although `n_left` rollouts are left, and how to continue."""
        limit = getattr(self._runner, "max_rollouts", None)
        after = "" if limit is None else f" after max_rollouts={limit} each"
        again = "" if self.directory is None else ", or continue with fit(..., resume=True)"
        return (
            f"all {self._strategy.n_runners} runners have ended{after}, and {n_left:,} rollouts are left; "
            f"raise max_rollouts{again}"
        )

    # ---- the gateway and the workers -----------------------------------------------------------

    async def _gateway(self, algorithm: Algorithm | None, stack: contextlib.AsyncExitStack) -> LLMProxy | None:
        """Return the user's gateway, or a new one if the algorithm needs one; running, or reserved for the engine that
        will host it.

        stack: stops the gateway at the end if it is started here.
        None if there is no gateway and no need for one, or if another process runs the algorithm and its gateway.
        """
        if not self._strategy.runs_algorithm:
            return None
        proxy, elsewhere = self._config.llm_proxy, self._strategy.elsewhere()
        if proxy is None and algorithm is not None and algorithm.uses_gateway:
            if elsewhere is None:
                proxy = LLMProxy()
            else:
                token = None if is_loopback(elsewhere.host) else secrets.token_urlsafe(32)
                proxy = LLMProxy(host=elsewhere.host, port=elsewhere.gateway_port, token=token)
        if proxy is None:
            return None
        if elsewhere is not None:
            proxy.share_control(elsewhere.secret)
            if is_loopback(proxy.host) and not is_loopback(elsewhere.host):
                logger.warning(
                    "the gateway listens on %s, where agents on other machines do not reach it: give LLMProxy a host= and a token=",
                    proxy.host,
                )
        if self._config.prices is not None:
            proxy.set_prices(self._config.prices)
        if proxy.get_store() is not self._store:
            proxy.set_store(self._store)
        if not proxy.is_running():
            stack.push_async_callback(proxy.stop)
            hosted = proxy.launch_mode == "engine" and algorithm is not None and algorithm.hosts_gateway
            if hosted and elsewhere is None:  # runners elsewhere expect the gateway at a fixed address
                await proxy.reserve()
            else:
                await proxy.start()
        return proxy

    def _recorders(self, proxy: LLMProxy | None) -> Sequence[AttemptRecorder]:
        elsewhere = self._strategy.elsewhere()
        if not self._strategy.runs_algorithm and elsewhere is not None:
            return (FoundGateways(elsewhere.secret),)
        return () if proxy is None else (proxy,)

    def _worker_names(self) -> list[str]:
        prefix = f"{self._run.run_id}-" if self._store.capabilities["zero_copy"] else ""
        return [f"{prefix}Worker-{worker_id}" for worker_id in range(self._strategy.n_runners)]

    def _claimants(self) -> list[str] | None:
        return self._worker_names() if self._store.capabilities["zero_copy"] else None

    async def _requeue(self) -> None:
        """Requeue the rollouts that an earlier process of the run left under way.

        Rollouts that record the algorithm's own model calls are cancelled, because no runner runs them.
        """
        await self._store.release_claims(worker_ids=self._claimants())
        for rollout in await self._store.query_rollouts(group_id=algorithm_group(self._run.run_id)):
            if not rollout.finished:
                await self._store.update_rollout(rollout.rollout_id, status="cancelled")

    async def _release_claims(self) -> None:
        """Requeue the attempts under way, so that a resumed run claims them at once.

        Errors are only logged: a failure of the store may be what ended the run, and must not hide what did.
        """
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._store.release_claims(worker_ids=self._claimants())
        except Exception as error:  # noqa: BLE001 -- a store of the user's own may raise anything
            logger.debug("the claims of the run were not released: %s", describe_error(error))


def how_to_resume(directory: Path | None, *, failed: bool = False) -> str:
    """Return the message for a run that has ended early: where its results are, how to continue it.

    directory: the run's; None for a run without one.
    failed: whether an error has ended the run.
    """
    if directory is not None and not (directory / MANIFEST).exists():
        return "the run was stopped before it had begun; nothing is left of it"
    if directory is None:
        return "the run was stopped; it has no directory, so it cannot be continued"
    ended, again = ("has failed", "Remedy the cause, then continue") if failed else ("was stopped", "Continue")
    how = how_to_continue(started_from.get(), directory)
    return f"the run {ended}; what it had finished is in {directory}. {again} with {how}"


def _begin(config: FitConfig, given: FitInput, resume: bool) -> tuple[Run, LightningStore, Manifest]:
    """Open the run of a `fit`: make or find its directory and its store.

    Raise ConfigError, and leave nothing behind, if an argument is wrong.
    """
    strategy, stores = config.strategy, config.run_store
    if resume and stores.is_given and config.run_dir is None:
        raise ConfigError("resume=True needs a run directory; give run_dir= beside the store, or give no store")
    remote = strategy.remote_store()
    if remote is not None and not strategy.runs_algorithm:
        return Run(run_id=secrets.token_hex(6)), remote, new_manifest(kind="fit", name="runners", config={})
    recorded = run_config(
        given.algorithm,
        agent=given.agent,
        code=config.code,
        train_dataset=given.train_dataset,
        val_dataset=given.val_dataset,
        strategy=strategy,
        adapter=config.adapter,
        tracer=getattr(config.runner, "tracer", None),
        n_runners=strategy.n_runners,
        concurrency=config.runner.concurrency,
        max_rollouts=getattr(config.runner, "max_rollouts", None),
        trainer_options=config.not_default,
    )
    prices = config.prices or (config.llm_proxy.prices if config.llm_proxy is not None else None)
    if prices is not None and prices.currency:
        recorded["currency"] = prices.currency
    kind = "fit" if given.algorithm is None else given.algorithm.run_kind
    if remote is not None or (stores.is_given and config.run_dir is None):
        store = stores.build() if remote is None else remote
        manifest = new_manifest(kind=kind, name=config.name or kind, config=recorded)
        run = Run(run_id=manifest.record.run_id)
    else:
        built = stores.build() if stores.is_given else None
        directory, manifest = begin_run(config.run_dir, resume=resume, kind=kind, name=config.name, config=recorded)
        run = Run(manifest.record.run_id, directory, resume=resume, options=manifest.options)
        store = SqliteLightningStore(store_path(directory)) if built is None else built
    manifest.record.config["store"] = redact(store.url)
    return run, store, manifest


def _begin_dev(config: FitConfig, algorithm: Algorithm | None, resume: bool) -> tuple[Run, LightningStore, Manifest]:
    """Open the run of a `dev`, which has no directory, and by default a store in memory."""
    if resume:
        raise ConfigError("resume=True, but dev=True keeps no run; leave one of them out")
    store = config.strategy.remote_store()
    if store is None:
        store = config.run_store.build() if config.run_store.is_given else InMemoryLightningStore()
    manifest = new_manifest(kind="dev", name=config.name or "dev", config=algorithm_config(algorithm))
    return Run(manifest.record.run_id), store, manifest


def _is_mistake(error: Exception) -> bool:
    """Return whether an argument is wrong, as opposed to the machine, a package, a server or a file."""
    return isinstance(error, ConfigError | MissingResource) and error.__cause__ is None


async def _nothing_started(recorder: RunRecorder, store: LightningStore) -> bool:
    """Return whether the run has neither a row nor a rollout; False if the store cannot be read."""
    if recorder.rows:
        return False
    try:
        async with asyncio.timeout(_RELEASE_SECONDS):
            return not len(await store.query_rollouts(run_id=recorder.manifest.record.run_id, limit=1))
    except UnknownRun:  # the store did not even take the run
        return True
    except (StoreError, TimeoutError):
        return False


async def _return_zero(work: Coroutine[Any, Any, None]) -> int:
    await work
    return 0


async def _own_calls_ended(store: LightningStore, run_id: str) -> None:
    """Wait until the model calls that the algorithm makes itself, and that are under way now, have ended."""
    calls = await store.query_rollouts(group_id=algorithm_group(run_id), status_in=["preparing", "running"])
    await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in calls], timeout=_OWN_CALL_SECONDS)


async def _until_done_or_deserted(
    algorithm: Coroutine[Any, Any, None], event: StopSignal, store: LightningStore, run_id: str
) -> int:
    """Run the algorithm, and return 0 when it is done. Raise its error.

    If all runners have done their `max_rollouts` and rollouts are left, no runner will run them and the algorithm would
    wait for ever. So cancel it, and return how many are left.
    """
    async with first_done(algorithm, event.deserted.wait_async()) as (work, _):
        if not work.done():
            await _own_calls_ended(store, run_id)
        while not work.done():
            counts = (await store.statistics())["rollouts_by_status"]
            if left := sum(count for status, count in counts.items() if status not in ROLLOUT_FINISHED):
                return left
            await asyncio.wait({work}, timeout=_CHECK_SECONDS)
        work.result()
    return 0


async def _until_stopped_or_deserted(event: StopSignal) -> None:
    """Wait until the run is stopped or all runners have ended by themselves."""
    async with first_done(event.wait_async(), event.deserted.wait_async()):
        pass
