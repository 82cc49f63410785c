"""`Trainer` with Agent Lightning's arguments and defaults."""

from __future__ import annotations

import warnings
from typing import Any, cast

from leyden.compat.agentlightning.adapter import TracerTraceToTriplet
from leyden.compat.agentlightning.agent import LitAgentRunner
from leyden.compat.agentlightning.serving import ClientServerExecutionStrategy, LLMProxy, SharedMemoryExecutionStrategy
from leyden.compat.agentlightning.store import InMemoryLightningStore
from leyden.compat.agentlightning.tracer import OtelTracer
from leyden.execution import ExecutionStrategy
from leyden.execution.client_server import ClientServerExecutionStrategy as NativeClientServer
from leyden.legacy import AgentLightningClient
from leyden.trainer import Trainer as NativeTrainer
from leyden.trainer.legacy import is_url


class Trainer(NativeTrainer):
    """Trains an agent with an algorithm.

    By default the store is in memory, every model call gives a triplet, and `store`, `adapter`,
    `tracer` and `runner` have Agent Lightning's additions. `n_workers`, `max_tasks` and
    `triplet_exporter`, the names of version 0.1, are accepted with a DeprecationWarning.

    port: the port of the strategy `cs`, which it selects if no strategy is given. Of no effect with
        another strategy.
    options: further options of Leyden's Trainer. By default a runner runs one rollout at a time;
        `concurrency` lets it run more.
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
        strategy = _strategy("cs" if strategy is None and port is not None else strategy)
        if isinstance(strategy, NativeClientServer) and port is not None:
            strategy.server_port = port
        if _has_no_port(strategy) or (isinstance(strategy, dict) and "server_port" in strategy):
            port = None
        if isinstance(strategy, ExecutionStrategy) or (isinstance(strategy, dict) and "n_runners" in strategy):
            n_runners = n_workers = None  # as in Agent Lightning, the strategy's own number takes precedence
        super().__init__(
            dev=dev,
            n_runners=n_runners or n_workers,
            max_rollouts=max_rollouts or max_tasks,
            initial_resources=initial_resources,
            tracer=_component(tracer, OtelTracer),
            adapter=_component(adapter or triplet_exporter, TracerTraceToTriplet),
            store=_component(store, InMemoryLightningStore),
            runner=_component(runner, LitAgentRunner),
            strategy=strategy,
            port=port,
            algorithm=algorithm,
            llm_proxy=_component(llm_proxy, LLMProxy) if isinstance(llm_proxy, dict) else llm_proxy,
            hooks=hooks,
            **options,
        )

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

        backend, dev_backend: the addresses or clients of such servers; `train_dataset` takes one
        too.
        """
        server = train_dataset if backend is None else backend
        if dev_backend is None and _is_server(val_dataset):  # version 0.1 gives both servers by place
            val_dataset, dev_backend = None, val_dataset
        if dev_backend is None and not _is_server(server):
            return super().fit(agent, train_dataset, val_dataset, **options)
        return self.fit_v0(agent, server, val_data=val_dataset, dev_backend=dev_backend)

    def fit_v2(self, *args: Any, **kwargs: Any) -> Any:
        """Train the agent: the name of `fit` before version 0.2."""
        return self.fit(*args, **kwargs)


def _is_server(source: Any) -> bool:
    return isinstance(source, AgentLightningClient) or is_url(source)


_STRATEGIES = {"shm": SharedMemoryExecutionStrategy, "cs": ClientServerExecutionStrategy}


def _strategy(spec: Any) -> Any:
    """Return the spec of a strategy, with the classes that take Agent Lightning's arguments."""
    if isinstance(spec, dict):
        options = cast(dict[str, Any], spec)
        return {**options, "type": _strategy(options.get("type", ClientServerExecutionStrategy))}
    return _STRATEGIES.get(spec, spec) if isinstance(spec, str) else spec


def _has_no_port(spec: Any) -> bool:
    """Return whether a strategy, its class, or the class in its dict serves no store at a port."""
    kind = cast(dict[str, Any], spec).get("type") if isinstance(spec, dict) else spec
    if isinstance(kind, type):
        return not issubclass(kind, NativeClientServer)
    return isinstance(kind, ExecutionStrategy) and not isinstance(kind, NativeClientServer)


def _component(spec: Any, default: type[Any]) -> Any:
    """Return a component's spec, with the default class if the spec names none."""
    if spec is None:
        return default
    return {"type": default, **cast(dict[str, Any], spec)} if isinstance(spec, dict) else spec
