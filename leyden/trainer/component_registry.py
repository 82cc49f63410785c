"""Short names for components, such as `strategy="ipc"`.

Leyden's own names are listed here. `register_component` adds others in this process, and entry points of the groups
`leyden.algorithms`, `leyden.strategies` and so on those of other distributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from leyden._lib.components import Component, ComponentRegistry, installed, register_name
from leyden.errors import ConfigError

ExecutionStrategyRegistry: Final = ComponentRegistry(
    "leyden.strategies",
    {
        "shm": "leyden.execution.shared_memory.SharedMemoryExecutionStrategy",
        "ipc": "leyden.execution.process_strategy.InterProcessExecutionStrategy",
        "cs": "leyden.execution.client_server.ClientServerExecutionStrategy",
        "ray": "leyden.execution.ray.RayExecutionStrategy",
    },
)
TracerRegistry: Final = ComponentRegistry(
    "leyden.tracers",
    {
        "otel": "leyden.tracing.OtelTracer",
        "agentops": "leyden.tracing.AgentOpsTracer",
        "weave": "leyden.tracing.WeaveTracer",
        "dummy": "leyden.tracing.DummyTracer",
    },
)
AlgorithmRegistry: Final = ComponentRegistry(
    "leyden.algorithms",
    {
        "apo": "leyden.algorithm.apo.APO",
        "baseline": "leyden.algorithm.fast.Baseline",
        "gepa": "leyden.algorithm.gepa.GEPA",
        "few_shot": "leyden.algorithm.FewShot",
        "policy_gradient": "leyden.algorithm.policy_gradient.PolicyGradient",
        "grpo": "leyden.algorithm.policy_gradient.GRPO",
        "dr_grpo": "leyden.algorithm.policy_gradient.DrGRPO",
        "rloo": "leyden.algorithm.policy_gradient.RLOO",
        "ppo": "leyden.algorithm.policy_gradient.PPO",
        "reinforce_pp": "leyden.algorithm.policy_gradient.REINFORCEpp",
        "remax": "leyden.algorithm.policy_gradient.ReMax",
        "vineppo": "leyden.algorithm.policy_gradient.VinePPO",
        "sft": "leyden.algorithm.policy_gradient.SFT",
        "dpo": "leyden.algorithm.policy_gradient.DPO",
        "verl": "leyden.algorithm.verl.VERL",
    },
)
AdapterRegistry: Final = ComponentRegistry(
    "leyden.adapters",
    {
        "triplet": "leyden.adapter.TraceToTriplet",
        "llm_proxy_triplet": "leyden.adapter.LlmProxyTraceToTriplet",
        "tracer_triplet": "leyden.adapter.TracerTraceToTriplet",
        "trajectory": "leyden.adapter.TraceToTrajectory",
        "messages": "leyden.adapter.TraceToMessages",
    },
)
StoreRegistry: Final = ComponentRegistry(
    "leyden.stores",
    {
        "memory": "leyden.store.InMemoryLightningStore",
        "sqlite": "leyden.store.SqliteLightningStore",
    },
)
RunnerRegistry: Final = ComponentRegistry(
    "leyden.runners",
    {
        "litagent": "leyden.execution.runner.LitAgentRunner",
    },
)

_REGISTRIES: Final[Mapping[str, ComponentRegistry]] = {
    "adapter": AdapterRegistry,
    "algorithm": AlgorithmRegistry,
    "runner": RunnerRegistry,
    "store": StoreRegistry,
    "strategy": ExecutionStrategyRegistry,
    "tracer": TracerRegistry,
}


def register_component(kind: str, name: str, component: Component) -> None:
    """Register a component under a short name in this process, so that `Trainer(<kind>=<name>)` finds it.

    kind: "adapter", "algorithm", "engine", "runner", "store", "strategy" or "tracer".
    component: a class, a factory, or an import path, which is imported when the name is first used.
    Raise ConfigError for an unknown kind, for a name that could be an import path, and for a name of another component.
    """
    register_name(registry_of_kind(kind), name, component, kind=kind)


def registered_components(kind: str) -> dict[str, Component]:
    """Return the components of a kind by their short names, those of installed distributions as import paths. Raise
    ConfigError for an unknown kind.
    """
    registry = registry_of_kind(kind)
    return {**{name: found[0].value for name, found in installed(registry.group).items()}, **registry}


def registry_of_kind(kind: str) -> ComponentRegistry:
    """Return the registry of a kind of component. Raise ConfigError for an unknown kind."""
    if kind == "engine":
        from leyden.engine import (
            EngineRegistry,  # here, because importing the engines takes a tenth of `import Trainer`
        )

        return EngineRegistry
    if kind not in _REGISTRIES:
        raise ConfigError(f"{kind!r} is no kind of component; possible: {', '.join(sorted([*_REGISTRIES, 'engine']))}")
    return _REGISTRIES[kind]
