"""Leyden trains agents: it records what an agent does, keeps it in a durable store, and turns it into better agents.

Public names are resolved when they are first used, so that `import leyden` costs nothing: no torch, no web framework, no model library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.adapter import (
        LlmProxyTraceToTriplet,
        RewardMatchPolicy,
        TraceAdapter,
        TracerTraceToTriplet,
        TraceToMessages,
        TraceToTrajectory,
        TraceToTriplet,
        TraceTree,
    )
    from leyden.algorithm import Algorithm, Baseline, FastAlgorithm, IterativeAlgorithm, PolicyGradient, algo
    from leyden.emitter import emit_annotation, emit_exception, emit_message, emit_object, emit_reward, operation
    from leyden.engine import EmbeddedBackend, IsolatedBackend, OptimParams, PolicyBackend, PolicyLoss
    from leyden.errors import LeydenError
    from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
    from leyden.execution.client_server import ClientServerExecutionStrategy
    from leyden.execution.inter_process import InterProcessExecutionStrategy
    from leyden.execution.ray import RayExecutionStrategy
    from leyden.gateway import LLMProxy
    from leyden.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
    from leyden.loop import Callback, Checkpoint, ConsoleWriter, CsvWriter, EarlyStopping, ProgressBar, TrainLoop
    from leyden.monitor import Monitor
    from leyden.runner import Hook, LitAgentRunner, Runner
    from leyden.runner.process import ProcessAgent, ProcessOutput
    from leyden.store import (
        InMemoryLightningStore,
        LightningStore,
        LightningStoreClient,
        LightningStoreServer,
        PostgresLightningStore,
        SqliteLightningStore,
        open_store,
    )
    from leyden.tracer import AgentOpsTracer, DummyTracer, LightningSpanProcessor, OtelTracer, Tracer, WeaveTracer
    from leyden.trainer import Trainer, register_component
    from leyden.types import (
        LLM,
        Attempt,
        AttemptedRollout,
        NamedResources,
        PromptTemplate,
        ProxyLLM,
        Retention,
        Rollout,
        RolloutConfig,
        Span,
        Trajectory,
        Triplet,
        find_final_reward,
    )
    from leyden.utils.logs import configure_logger, setup_logging

_HOMES = {
    "leyden.adapter": (
        "LlmProxyTraceToTriplet",
        "RewardMatchPolicy",
        "TraceAdapter",
        "TraceToMessages",
        "TraceToTrajectory",
        "TraceToTriplet",
        "TraceTree",
        "TracerTraceToTriplet",
    ),
    "leyden.algorithm": ("Algorithm", "Baseline", "FastAlgorithm", "IterativeAlgorithm", "PolicyGradient", "algo"),
    "leyden.emitter": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "operation",
    ),
    "leyden.engine": ("EmbeddedBackend", "IsolatedBackend", "OptimParams", "PolicyBackend", "PolicyLoss"),
    "leyden.errors": ("LeydenError",),
    "leyden.execution": ("ExecutionStrategy", "SharedMemoryExecutionStrategy"),
    "leyden.execution.client_server": ("ClientServerExecutionStrategy",),
    "leyden.execution.inter_process": ("InterProcessExecutionStrategy",),
    "leyden.execution.ray": ("RayExecutionStrategy",),
    "leyden.gateway": ("LLMProxy",),
    "leyden.litagent": ("LitAgent", "llm_rollout", "prompt_rollout", "rollout"),
    "leyden.loop": (
        "Callback",
        "Checkpoint",
        "ConsoleWriter",
        "CsvWriter",
        "EarlyStopping",
        "ProgressBar",
        "TrainLoop",
    ),
    "leyden.monitor": ("Monitor",),
    "leyden.runner": ("Hook", "LitAgentRunner", "Runner"),
    "leyden.runner.process": ("ProcessAgent", "ProcessOutput"),
    "leyden.store": (
        "InMemoryLightningStore",
        "LightningStore",
        "LightningStoreClient",
        "LightningStoreServer",
        "PostgresLightningStore",
        "SqliteLightningStore",
        "open_store",
    ),
    "leyden.tracer": (
        "AgentOpsTracer",
        "DummyTracer",
        "LightningSpanProcessor",
        "OtelTracer",
        "Tracer",
        "WeaveTracer",
    ),
    "leyden.trainer": ("Trainer", "register_component"),
    "leyden.types": (
        "LLM",
        "Attempt",
        "AttemptedRollout",
        "NamedResources",
        "PromptTemplate",
        "ProxyLLM",
        "Retention",
        "Rollout",
        "RolloutConfig",
        "Span",
        "Trajectory",
        "Triplet",
        "find_final_reward",
    ),
    "leyden.utils.logs": ("configure_logger", "setup_logging"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0.dev0"
__all__ = [
    "LLM",
    "AgentOpsTracer",
    "Algorithm",
    "Attempt",
    "AttemptedRollout",
    "Baseline",
    "Callback",
    "Checkpoint",
    "ClientServerExecutionStrategy",
    "ConsoleWriter",
    "CsvWriter",
    "DummyTracer",
    "EarlyStopping",
    "EmbeddedBackend",
    "ExecutionStrategy",
    "FastAlgorithm",
    "Hook",
    "InMemoryLightningStore",
    "InterProcessExecutionStrategy",
    "IsolatedBackend",
    "IterativeAlgorithm",
    "LLMProxy",
    "LeydenError",
    "LightningSpanProcessor",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "LitAgent",
    "LitAgentRunner",
    "LlmProxyTraceToTriplet",
    "Monitor",
    "NamedResources",
    "OptimParams",
    "OtelTracer",
    "PolicyBackend",
    "PolicyGradient",
    "PolicyLoss",
    "PostgresLightningStore",
    "ProcessAgent",
    "ProcessOutput",
    "ProgressBar",
    "PromptTemplate",
    "ProxyLLM",
    "RayExecutionStrategy",
    "Retention",
    "RewardMatchPolicy",
    "Rollout",
    "RolloutConfig",
    "Runner",
    "SharedMemoryExecutionStrategy",
    "Span",
    "SqliteLightningStore",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTrajectory",
    "TraceToTriplet",
    "TraceTree",
    "Tracer",
    "TracerTraceToTriplet",
    "TrainLoop",
    "Trainer",
    "Trajectory",
    "Triplet",
    "WeaveTracer",
    "__version__",
    "algo",
    "configure_logger",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "llm_rollout",
    "open_store",
    "operation",
    "prompt_rollout",
    "register_component",
    "rollout",
    "setup_logging",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'leyden' has no attribute {name!r}{_hint(name)}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    if name.startswith("_"):
        return ""
    from difflib import get_close_matches

    close = get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
