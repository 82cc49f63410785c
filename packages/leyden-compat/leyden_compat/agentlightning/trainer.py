# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""`Trainer` with Agent Lightning's arguments and defaults."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, cast

from leyden._lib.components import build_component
from leyden.execution import ExecutionStrategy as NativeStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy as NativeClientServer
from leyden.execution.runner import Runner as NativeRunner
from leyden.legacy import AgentLightningClient
from leyden.legacy.trainer_legacy import is_url
from leyden.trainer import Trainer as NativeTrainer
from leyden.trainer.blocking import run_blocking
from leyden.trainer.component_registry import ExecutionStrategyRegistry, StoreRegistry
from leyden_compat.agentlightning.adapter import TracerTraceToTriplet
from leyden_compat.agentlightning.agent import LitAgentRunner
from leyden_compat.agentlightning.algorithm import Baseline
from leyden_compat.agentlightning.interfaces import LightningStore, ParallelWorkerBase, implements, users_store
from leyden_compat.agentlightning.own_store import as_native
from leyden_compat.agentlightning.running import AlgorithmBundle, RunnerBundle
from leyden_compat.agentlightning.serving import (
    ClientServerExecutionStrategy,
    InterProcessExecutionStrategy,
    LLMProxy,
    SharedMemoryExecutionStrategy,
)
from leyden_compat.agentlightning.store import InMemoryLightningStore
from leyden_compat.agentlightning.tracer import OtelTracer


class Trainer(NativeTrainer, ParallelWorkerBase):
    """Trains an agent with an algorithm.

    By default the store is in memory, every model call gives a triplet, and `store`, `adapter`, `tracer` and `runner`
    have Agent Lightning's additions. `n_workers`, `max_tasks` and `triplet_exporter`, the names of version 0.1, are
    accepted with a DeprecationWarning.

    port: the port of the strategy `cs`, which it selects if no strategy is given. Of no effect with another strategy.
    options: further options of Leyden's Trainer. By default a runner runs one rollout at a time; `concurrency` lets it
        run more.
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: Any = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Any = None,
        hooks: Any = None,
        **options: Any,
    ) -> None:
        for old, new, value in (
            ("n_workers", "n_runners", n_workers),
            ("max_tasks", "max_rollouts", max_tasks),
            ("triplet_exporter", "adapter", triplet_exporter),
        ):
            if value is not None:
                warnings.warn(f"Trainer({old}=) is deprecated; write {new}=", DeprecationWarning, stacklevel=2)
        n_runners = n_workers if n_runners is None else n_runners
        self._wanted_runners, self.port = n_runners or 1, port
        made = _made_strategy(strategy, n_runners, port)
        if isinstance(runner, NativeRunner) and hasattr(runner, "tracer"):
            tracer = cast(Any, runner).tracer
        super().__init__(
            dev=dev,
            max_rollouts=max_tasks if max_rollouts is None else max_rollouts,
            initial_resources=initial_resources,
            tracer=_component(tracer, OtelTracer),
            adapter=_component(triplet_exporter if adapter is None else adapter, TracerTraceToTriplet),
            store=as_native(_made_store(store)),
            runner=_component(runner, LitAgentRunner),
            strategy=made,
            algorithm=algorithm,
            llm_proxy=_component(llm_proxy, LLMProxy) if isinstance(llm_proxy, dict) else llm_proxy,
            hooks=hooks,
            **options,
        )

    @property
    def n_runners(self) -> int:
        """The strategy's number of runners; for a strategy without one, the number that was given."""
        own: Any = getattr(self.strategy, "n_runners", None)
        kind = type(self.strategy)
        is_told = "n_runners" in vars(self.strategy) or implements(kind, "n_runners") or not implements(kind, "execute")
        return own if is_told and isinstance(own, int) and own > 0 else self._wanted_runners

    @property
    def store(self) -> Any:
        """The store: the program's own if it has written one."""
        return users_store(super().store)

    def fit(
        self,
        agent: Any,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        backend: Any = None,
        dev_backend: Any = None,
        **options: Any,
    ) -> Any:
        """Train the agent, or run it on the tasks of a server of version 0.1.

        backend, dev_backend: the addresses or clients of such servers; `train_dataset` takes one too.
        """
        server = train_dataset if backend is None else backend
        if dev_backend is None and _is_server(val_dataset):  # version 0.1 gives both servers by place
            val_dataset, dev_backend = None, val_dataset
        if dev_backend is None and not _is_server(server):
            if self._is_written_by_the_program() and not options:
                algorithm = self._fast_algorithm() if self._dev else self.algorithm
                return self._run(agent, algorithm, train_dataset, val_dataset)
            return super().fit(agent, train_dataset, val_dataset, **options)
        return self.fit_v0(agent, server, val_data=val_dataset, dev_backend=dev_backend)

    def dev(self, agent: Any, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        """Run the agent on the data without training it."""
        if self._is_written_by_the_program():
            return self._run(agent, self._fast_algorithm(), train_dataset, val_dataset)
        return super().dev(agent, train_dataset, val_dataset)

    def _fast_algorithm(self) -> Any:
        """Return the algorithm for `dev`. Raise InvalidArgument for one that takes long."""
        return Baseline() if self.algorithm is None else super()._fast_algorithm()

    def _is_written_by_the_program(self) -> bool:
        return implements(type(self.strategy), "execute") or any(
            implements(type(self.runner), name) for name in _RUNNER_METHODS
        )

    def _run(self, agent: Any, algorithm: Any, train_dataset: Any, val_dataset: Any) -> None:
        """Let the strategy run the algorithm and the runners, and block until it is done."""
        agent.set_trainer(self)
        recorders = () if self.llm_proxy is None else (self.llm_proxy,)
        strategy: Any = self.strategy
        work = strategy.execute(
            AlgorithmBundle(self, algorithm, train_dataset, val_dataset),
            RunnerBundle(self.runner, agent, self.hooks, recorders),
            self.store,
        )
        if inspect.iscoroutine(work):
            run_blocking(work)

    def fit_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Train the agent: the name of `fit` before version 0.2."""
        return self.fit(*args, **kwargs)


def _is_server(source: Any) -> bool:
    return isinstance(source, AgentLightningClient) or is_url(source)


_STRATEGIES = {
    kind.alias: kind
    for kind in (SharedMemoryExecutionStrategy, InterProcessExecutionStrategy, ClientServerExecutionStrategy)
}
_RUNNER_METHODS = ("init", "init_worker", "iter", "step", "teardown_worker", "teardown")


def _made_strategy(spec: Any, n_runners: int | None, port: int | None) -> NativeStrategy:
    """Return the strategy of a spec, with the classes that take Agent Lightning's arguments. A port selects `cs` if
    there is no spec.
    """
    if spec is None:
        spec = {"drain_seconds": 2.0, "type": "shm"} if port is None else "cs"
    if isinstance(spec, dict):
        options = cast(dict[str, Any], spec)
        kind = options.get("type", options.get("name", ClientServerExecutionStrategy))
        rest = {name: value for name, value in options.items() if name not in ("type", "name")}
        spec = {**rest, "type": _STRATEGIES.get(kind, kind) if isinstance(kind, str) else kind}
    elif isinstance(spec, str):
        spec = _STRATEGIES.get(spec, spec)
    elif isinstance(spec, NativeClientServer) and port is not None:
        spec.server_port = port
    given = {name: value for name, value in (("n_runners", n_runners), ("server_port", port)) if value is not None}
    return build_component(
        spec,
        expected_type=NativeStrategy,
        spec_name="strategy",
        optional_defaults=given,
        registry=ExecutionStrategyRegistry,
    )


def _made_store(spec: Any) -> Any:
    """Return the store of a spec: an address, a path, or what `build_component` takes. Without one, a store in
    memory.
    """
    if isinstance(spec, str) and "/" in spec:
        return spec
    return build_component(
        spec,
        expected_type=LightningStore,
        spec_name="store",
        default_factory=InMemoryLightningStore,
        registry=StoreRegistry,
        dict_requires_type=False,
        dict_default_cls=InMemoryLightningStore,
    )


def _component(spec: Any, default: type[Any]) -> Any:
    """Return a component's spec, with the default class if the spec names none."""
    if spec is None:
        return default
    return {"type": default, **cast(dict[str, Any], spec)} if isinstance(spec, dict) else spec
