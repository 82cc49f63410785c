"""Short names for components. To add one: a line here, and a class that its contract suite passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = [
    "AdapterRegistry",
    "AlgorithmRegistry",
    "ExecutionStrategyRegistry",
    "RunnerRegistry",
    "StoreRegistry",
    "TracerRegistry",
]

ExecutionStrategyRegistry: Final[Mapping[str, str]] = {
    "shm": "leyden.execution.shared_memory.SharedMemoryExecutionStrategy",
    "ipc": "leyden.execution.inter_process.InterProcessExecutionStrategy",
    "cs": "leyden.execution.client_server.ClientServerExecutionStrategy",
    "ray": "leyden.execution.ray.RayExecutionStrategy",
}
TracerRegistry: Final[Mapping[str, str]] = {
    "otel": "leyden.tracer.OtelTracer",
    "agentops": "leyden.tracer.AgentOpsTracer",
    "weave": "leyden.tracer.WeaveTracer",
    "dummy": "leyden.tracer.DummyTracer",
}
AlgorithmRegistry: Final[Mapping[str, str]] = {
    "baseline": "leyden.algorithm.fast.Baseline",
    "policy_gradient": "leyden.algorithm.policy_gradient.PolicyGradient",
}
AdapterRegistry: Final[Mapping[str, str]] = {
    "triplet": "leyden.adapter.TraceToTriplet",
    "llm_proxy_triplet": "leyden.adapter.LlmProxyTraceToTriplet",
    "tracer_triplet": "leyden.adapter.TracerTraceToTriplet",
    "trajectory": "leyden.adapter.TraceToTrajectory",
    "messages": "leyden.adapter.TraceToMessages",
}
StoreRegistry: Final[Mapping[str, str]] = {
    "memory": "leyden.store.InMemoryLightningStore",
    "sqlite": "leyden.store.SqliteLightningStore",
}
RunnerRegistry: Final[Mapping[str, str]] = {
    "litagent": "leyden.runner.LitAgentRunner",
}
