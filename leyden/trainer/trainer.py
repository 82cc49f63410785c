"""`Trainer`: the configuration of training, resolved and checked when the trainer is made.

`leyden.trainer.fit` runs one call of `fit` or `dev` with this configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from leyden._lib.components import KeepsArguments, Spec, build_component, load_class
from leyden._lib.logs import setup_logging_if_asked
from leyden._lib.options import check_flag, check_number, check_several, named_arguments
from leyden._lib.tracebacks import short_errors
from leyden.adapter import TraceAdapter, TraceToTriplet
from leyden.agent import LitAgent, check_resources
from leyden.algorithm import Algorithm, Baseline, Dataset, FastAlgorithm, IterativeAlgorithm
from leyden.algorithm.served_tasks import ServedTasks
from leyden.errors import ConfigError, InvalidArgument, RunInterrupted
from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.execution.runner import Hook, LitAgentRunner, Runner
from leyden.gateway import LLMProxy, Prices
from leyden.legacy import AgentLightningClient
from leyden.legacy.trainer_legacy import TrainerLegacy, is_url, renamed
from leyden.monitor import Monitor
from leyden.store import LightningStore
from leyden.tracing import OtelTracer, Tracer
from leyden.trainer.blocking import Debugged, run_blocking
from leyden.trainer.component_registry import (
    AdapterRegistry,
    AlgorithmRegistry,
    ExecutionStrategyRegistry,
    RunnerRegistry,
    TracerRegistry,
)
from leyden.trainer.cost import check_max_cost, estimate, priced_models
from leyden.trainer.fit import Fit, FitConfig, FitInput, how_to_resume
from leyden.trainer.fit_checks import (
    as_tuple,
    check_not_imported,
    checked_dataset,
    checked_name,
    checked_resources,
    checked_retention,
    checked_run_dir,
    exclusively,
    require_followed,
    require_used,
)
from leyden.trainer.restarts import check_restarts
from leyden.trainer.run_config import code_of
from leyden.trainer.run_store import RunStore
from leyden.training import Callback, LogWriter
from leyden.training.runs import RunSummary
from leyden.training.runs.folder import RUNS
from leyden.training.runs.run_description import changed_options
from leyden.types import NamedResources, Retention

T = TypeVar("T")


_NO_SETTINGS = ("algorithm", "dev", "run_dir", "name", "store", "loggers", "progress", "report")
"""Options that say nothing about how a run trains, or that its configuration has elsewhere."""


class Trainer(KeepsArguments, TrainerLegacy):
    """Trains an agent with an algorithm.

    A component is an instance, a class, a factory, an import path, a registered name, or a dict of options. A dict of
    options for an algorithm needs the key `type` (a name or import path); the other components have a default class.

    algorithm: trains the agent, or measures it (`Baseline`). None: runners work on rollouts that others enqueue, until
        the run is stopped; data sets are refused.
    dev: call `dev` when `fit` is called.
    n_runners: the number of runners. Default: 1, or the strategy's own number.
    concurrency: rollouts in flight in each runner. Default: 64, or the runner's own number.
    max_rollouts: the number of rollouts after which each runner ends. If rollouts are left when all runners have ended,
        the run ends too, with the reason in `RunSummary.stopped`. If other programs work on its store, the run
        continues instead.
    initial_resources: the resources of agents until the algorithm publishes its own.
    tracer: records what agents do. Default: `OtelTracer`.
    adapter: turns spans into training data. Default: `TraceToTriplet`.
    runner: runs the agent. Default: `LitAgentRunner`.
    strategy: places algorithm and runners in threads, processes or machines. Default: `shm`, or `cs` if `port` is
        given.
    port: the port at which the store is served to runners in other processes (the strategy's `server_port`).
    daemon: whether runners are daemonic processes, whose agents cannot use `multiprocessing`. For strategies with
        processes.
    store: a store, or its URL (see `open_store`). Default: a SQLite file in the run directory for `fit`, and memory for
        `dev`.
    llm_proxy: the gateway. Default: one is made if the algorithm needs it.
    hooks: `Hook`s, whose methods are called at the start and the end of every attempt (`on_rollout_start`,
        `on_rollout_end`) and of its trace (`on_trace_start`, `on_trace_end`).
    max_algorithm_restarts: how often in all a failed algorithm is started again, with new runners. It continues from
        its last checkpoint, or from its beginning. Finished rollouts are kept and found by their ids. Rollouts under
        way return to the queue without using up an attempt. The algorithm must be able to continue
        (`Algorithm.resumable`): an IterativeAlgorithm, a Baseline or an `@algo` function that takes `run`. If no
        restart is left, the last error is raised; the log has the earlier ones.
    run_dir: the run's directory. Default: a new one under `.leyden/`.
    prices: what the models charge for tokens: a file such as `prices.yaml`, its content, or `leyden.gateway.Prices`.
        Each call is recorded with its cost, and the run sums them (`RunSummary.spending`).
    max_cost: end the run when its model calls have cost this much, in the unit of the prices. The rollouts under way
        are finished. A resumed run goes on counting. Every model needs a price, and a call whose cost is unknown ends
        the run too. Default: no limit.
    retention: limits the finished rollouts that the store keeps. Rollouts that a resumed run would read again are kept
        in any case. Default: all are kept.
    callbacks: called by the algorithm's loop; the algorithm must be an IterativeAlgorithm.
    loggers: writers that get the metrics of each stage of any algorithm.
    progress: whether `fit` writes a first line, a progress bar and a closing summary to standard error.
    report: whether `fit` writes `report.html` into the run's directory at its end, as `leyden report` does.
    name: the run's name for people. Default: the name of its directory.
    monitor: True watches the workers and the store, and writes alerts to the log; a Monitor uses its own options.
    n_workers, max_tasks, triplet_exporter: the old names of `n_runners`, `max_rollouts` and `adapter`, each with a
        DeprecationWarning.
    """

    @short_errors
    def __init__(
        self,
        *,
        algorithm: Algorithm | Spec | None = None,
        dev: bool = False,
        n_runners: int | None = None,
        concurrency: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Tracer | Spec | None = None,
        adapter: TraceAdapter[Any] | Spec | None = None,
        store: LightningStore | Spec | None = None,
        runner: Runner[Any] | Spec | None = None,
        strategy: ExecutionStrategy | Spec | None = None,
        port: int | None = None,
        daemon: bool | None = None,
        llm_proxy: LLMProxy | Spec | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        prices: Prices | str | Path | Mapping[str, Any] | None = None,
        max_cost: float | None = None,
        run_dir: str | Path | None = None,
        retention: Retention | None = None,
        monitor: Monitor | Spec | bool = False,
        max_algorithm_restarts: int = 0,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LogWriter | Sequence[LogWriter] = (),
        progress: bool = True,
        report: bool = True,
        name: str | None = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        triplet_exporter: Any = None,
    ) -> None:
        new = renamed(
            {
                "n_workers": (n_workers, "n_runners", n_runners),
                "max_tasks": (max_tasks, "max_rollouts", max_rollouts),
                "triplet_exporter": (triplet_exporter, "adapter", adapter),
            }
        )
        n_runners, max_rollouts, adapter = new["n_runners"], new["max_rollouts"], new["adapter"]
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
            # the server's imports are spared where there is no port
            SharedMemoryExecutionStrategy if port is None else load_class(str(ExecutionStrategyRegistry["cs"])),
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
        self._run_store = RunStore(store)
        self.llm_proxy = _optional(llm_proxy, LLMProxy, "llm_proxy")
        self.prices = None if prices is None else Prices.of(prices)
        check_number("max_cost", max_cost, above=0, or_none="no limit")
        self.max_cost = max_cost
        self.hooks: tuple[Hook, ...] = () if hooks is None else as_tuple(hooks)
        check_several("hooks", self.hooks, Hook, wanted="instances of leyden.Hook")
        self.initial_resources = checked_resources(initial_resources)
        self.run_dir = checked_run_dir(run_dir)
        self.retention = checked_retention(retention)
        check_flag("dev", dev)
        self._dev = dev
        self.monitor = _optional(
            {True: Monitor, False: None}[monitor] if isinstance(monitor, bool) else monitor, Monitor, "monitor"
        )
        check_number("max_algorithm_restarts", max_algorithm_restarts, at_least=0, whole=True)
        self.max_algorithm_restarts = max_algorithm_restarts
        self.callbacks: tuple[Callback, ...] = as_tuple(callbacks)
        check_several("callbacks", self.callbacks, Callback, wanted="instances of leyden.training.Callback")
        self.loggers: tuple[LogWriter, ...] = as_tuple(loggers)
        check_several("loggers", self.loggers, LogWriter, wanted="a LogWriter such as CsvWriter('metrics.csv')")
        check_flag("progress", progress)
        self.progress = progress
        check_flag("report", report)
        self.report = report
        self.name = checked_name(name)

    @property
    def n_runners(self) -> int:
        """The number of runners."""
        return self.strategy.n_runners

    @property
    def max_rollouts(self) -> int | None:
        """The number of rollouts after which each runner ends; None without a limit."""
        return getattr(self.runner, "max_rollouts", None)

    @property
    def store(self) -> LightningStore | None:
        """The store of the run under way, for hooks, agents, algorithms and other threads.

        After a run it is the store of that run: one in memory is unchanged, one in a file is opened read-only, because
        the next run or another process may own it. Else it is the store that the trainer was given as an instance, or
        None. It is also None for a store on a server; open that one with `open_store`.
        """
        return self._run_store.current()

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
        """Train the agent, block until the run has ended, and return its summary. This also works under a running event
        loop, as in a notebook.

        resume: continue the run in `run_dir` from its last finished step; without `run_dir`, the newest run under
            `.leyden/` that this program started with this algorithm. Another algorithm or model is refused, other
            differences are logged.
        Raise ConfigError for a mistake that can be found before the run starts. Raise RunInterrupted (a
        KeyboardInterrupt) after Ctrl-C or SIGTERM; everything finished is kept.
        """
        if is_url(train_dataset):
            if resume:
                raise ConfigError(f"resume=True, but the tasks come from {train_dataset}; leave one of them out")
            return self.fit_v0(agent, train_dataset, val_data=val_dataset, dev_data=train_dataset)
        if self._dev and not resume:
            return self.dev(agent, train_dataset, val_dataset=val_dataset)
        return self._fit(self._checked(agent, train_dataset, val_dataset, dev=self._dev), resume=resume)

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
        """Train the agent as `fit` does, from async code. Cancelling the call stops the run as Ctrl-C does."""
        given = self._checked(agent, train_dataset, val_dataset, dev=self._dev)
        with self._exclusively(given.algorithm):
            return await self._begin(self._config(given), given, resume=resume, dev=self._dev).execute()

    @short_errors
    @named_arguments
    def dev(
        self, agent: LitAgent[Any], train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> RunSummary:
        """Run the agent on the data without training it, in memory: a quick check that everything fits together. Return
        the run's summary.

        It suits debuggers: whatever the strategy, the agent runs on the calling thread, one rollout at a time, without
        time limits. An agent's error is logged with its traceback. Ctrl-C, and the debugger's "quit", end the run.
        Under a running event loop (a notebook), async agents run in another thread. The algorithm must be a
        FastAlgorithm, and is `Baseline()` if the trainer has none. Raise InvalidArgument (a TypeError) for another one.
        """
        return self._debug(self._checked(agent, train_dataset, val_dataset, dev=True))

    def check(
        self, agent: LitAgent[Any], train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> None:
        """Raise the ConfigError that `fit` would raise for these arguments before a run starts. Nothing is started."""
        self._checked(agent, train_dataset, val_dataset, dev=self._dev)

    def estimate(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        runs: Path | None = None,
    ) -> str:
        """Return in words how many rollouts `fit` would run and what they would take, by an earlier run of the agent;
        or why that is not known.

        runs: the folder with the earlier runs. Default: that of the run's own folder.
        """
        algorithm = self._checked(agent, train_dataset, val_dataset, dev=self._dev).algorithm
        if algorithm is None:
            return "no estimate: other programs decide how many rollouts they enqueue"
        proxy, prices = self.llm_proxy, self.prices
        return estimate(
            algorithm,
            agent,
            *(0 if data is None else len(data) for data in (train_dataset, val_dataset)),
            models=priced_models(proxy, prices),
            currency=(prices or (Prices() if proxy is None else proxy.prices)).currency,
            root=runs or (RUNS if self.run_dir is None else self.run_dir.parent),
        )

    def _fit_served(self, client: AgentLightningClient, agent: LitAgent[Any]) -> RunSummary:
        limit = None if self.max_rollouts is None else self.max_rollouts * self.n_runners
        tasks = ServedTasks(client, self.adapter, in_flight=self.n_runners, max_tasks=limit)
        given = self._checked(agent, None, None, dev=self._dev, algorithm=tasks)
        return self._debug(given) if self._dev else self._fit(given, resume=False)

    def _fit(self, given: FitInput, *, resume: bool) -> RunSummary:
        """Block until a fit has ended. A KeyboardInterrupt becomes a RunInterrupted that says how to continue."""
        with self._exclusively(given.algorithm):
            fit = self._begin(self._config(given), given, resume=resume, dev=self._dev)
            try:
                summary = run_blocking(fit.execute())
            except KeyboardInterrupt:
                raise RunInterrupted(how_to_resume(fit.directory)) from None
            if fit.stopped_by is not None:
                raise RunInterrupted(how_to_resume(fit.directory))
            return summary

    def _debug(self, given: FitInput) -> RunSummary:
        """Run a fit on the calling thread, as `dev` describes."""
        with self._exclusively(given.algorithm):
            debugged = Debugged.of(self.runner)
            config = replace(self._config(given), strategy=debugged.strategy, runner=debugged.runner)
            return debugged.run(self._begin(config, given, resume=False, dev=True).execute())

    def _exclusively(self, algorithm: Algorithm | None) -> contextlib.AbstractContextManager[None]:
        return exclusively(self, algorithm, self.strategy, self.runner)

    def _config(self, given: FitInput) -> FitConfig:
        names = [each.name for each in fields(FitConfig) if each.name not in ("run_store", "not_default", "code")]
        return FitConfig(
            run_store=self._run_store,
            code=code_of(self, given.agent),
            not_default=changed_options(self, "trainer", without=_NO_SETTINGS),
            **{name: getattr(self, name) for name in names},
        )

    def _begin(self, config: FitConfig, given: FitInput, *, resume: bool, dev: bool) -> Fit:
        fit = Fit(config, given, resume=resume, dev=dev)
        given.agent.set_trainer(self)
        if given.algorithm is not None:
            given.algorithm.set_trainer(self)
        return fit

    def _checked(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
        *,
        dev: bool,
        algorithm: Algorithm | None = None,
    ) -> FitInput:
        """Return the arguments of a call of `fit` or `dev`, checked. Start logging if it is wanted.

        algorithm: the one to run in place of the trainer's own.
        Raise ConfigError for any mistake that can be found before a run starts.
        """
        algorithm = algorithm or (self._fast_algorithm() if dev else self.algorithm)
        setup_logging_if_asked()
        check_not_imported()
        self.strategy.check()
        keeps_checkpoints = not self._run_store.is_given or self.run_dir is not None
        check_restarts(self.max_algorithm_restarts, algorithm, keeps_checkpoints=keeps_checkpoints)
        as_tasks = isinstance(algorithm, Algorithm) and algorithm.enqueues_datasets
        train_dataset = checked_dataset("train_dataset", train_dataset, as_tasks=as_tasks)
        val_dataset = checked_dataset("val_dataset", val_dataset, as_tasks=as_tasks)
        if not isinstance(agent, LitAgent):
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
            name = getattr(algorithm, "__name__", type(algorithm).__name__)
            given = "there is no algorithm" if algorithm is None else f"{name} has no TrainLoop"
            raise ConfigError(
                f"callbacks={[type(callback).__name__ for callback in self.callbacks]}, but {given} that would call them; give an "
                "IterativeAlgorithm (PolicyGradient is one), or leave callbacks out: loggers= gets the metrics of any algorithm"
            )
        if self.max_cost is not None and dev:
            raise ConfigError(
                f"max_cost={self.max_cost:g}, but dev() keeps no run whose costs it could sum; leave it out"
            )
        if self.max_cost is not None and self.strategy.runs_algorithm:
            check_max_cost(self.max_cost, algorithm, self.llm_proxy, self.prices)
        if algorithm is not None:
            algorithm.set_initial_resources(self.initial_resources)
            planned = algorithm.planned_resources()
            if planned is not None and self.llm_proxy is None:  # a gateway's model may come beside them
                check_resources(agent, planned)
        return FitInput(agent, algorithm, train_dataset, val_dataset)

    def _fast_algorithm(self) -> FastAlgorithm:
        """Return the algorithm for `dev`. Raise InvalidArgument for one that takes long."""
        algorithm = self.algorithm or Baseline()
        if not isinstance(algorithm, FastAlgorithm):
            raise InvalidArgument(
                f"dev() needs a FastAlgorithm (Baseline is one), not {type(algorithm).__name__}; use fit() to train, without dev=True"
            )
        return algorithm


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _required(
    spec: Any,
    expected: type[Any],
    name: str,
    registry: Mapping[str, Any],
    default: type[Any],
    options: dict[str, Any] | None = None,
) -> Any:
    """Return the component of a spec, or one made by `default` if there is no spec.

    options: fill the arguments that the spec leaves open.
    """
    return build_component(
        default if spec is None else spec,
        expected_type=expected,
        spec_name=name,
        registry=registry,
        optional_defaults=options,
        dict_requires_type=False,
        dict_default_cls=default,
    )


def _optional(spec: Any, default: type[T], name: str) -> T | None:
    """Return the component of a spec, or None if there is no spec. A dict holds the arguments of `default`."""
    return build_component(
        spec, expected_type=default, spec_name=name, allow_none=True, dict_requires_type=False, dict_default_cls=default
    )
