"""Leyden trains any agent: it records what an agent does, keeps it in a durable store, and turns it into better agents.

Public names are resolved when they are first used, so that `import leyden` costs nothing: no torch, no web framework, no model library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.adapter import LlmProxyTraceToTriplet, TraceAdapter, TraceToTrajectory
    from leyden.algorithm import Algorithm, Baseline, FastAlgorithm, IterativeAlgorithm, PolicyGradient, algo
    from leyden.emitter import emit_annotation, emit_exception, emit_message, emit_object, emit_reward, operation
    from leyden.engine import EmbeddedBackend, IsolatedBackend, OptimParams, PolicyBackend, PolicyLoss
    from leyden.errors import LeydenError
    from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
    from leyden.gateway import LLMProxy
    from leyden.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
    from leyden.loop import Callback, Checkpoint, ConsoleWriter, CsvWriter, EarlyStopping, ProgressBar, TrainLoop
    from leyden.runner import Hook, LitAgentRunner, Runner
    from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, open_store
    from leyden.tracer import DummyTracer, OtelTracer, Tracer
    from leyden.trainer import Trainer
    from leyden.types import (
        LLM,
        Attempt,
        AttemptedRollout,
        NamedResources,
        PromptTemplate,
        ProxyLLM,
        Rollout,
        RolloutConfig,
        Span,
        Trajectory,
        Triplet,
        find_final_reward,
    )
    from leyden.utils.logs import setup_logging

_HOMES = {
    "leyden.adapter": ("LlmProxyTraceToTriplet", "TraceAdapter", "TraceToTrajectory"),
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
    "leyden.runner": ("Hook", "LitAgentRunner", "Runner"),
    "leyden.store": ("InMemoryLightningStore", "LightningStore", "SqliteLightningStore", "open_store"),
    "leyden.tracer": ("DummyTracer", "OtelTracer", "Tracer"),
    "leyden.trainer": ("Trainer",),
    "leyden.types": (
        "LLM",
        "Attempt",
        "AttemptedRollout",
        "NamedResources",
        "PromptTemplate",
        "ProxyLLM",
        "Rollout",
        "RolloutConfig",
        "Span",
        "Trajectory",
        "Triplet",
        "find_final_reward",
    ),
    "leyden.utils.logs": ("setup_logging",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0.dev0"
__all__ = [
    "LLM",
    "Algorithm",
    "Attempt",
    "AttemptedRollout",
    "Baseline",
    "Callback",
    "Checkpoint",
    "ConsoleWriter",
    "CsvWriter",
    "DummyTracer",
    "EarlyStopping",
    "EmbeddedBackend",
    "ExecutionStrategy",
    "FastAlgorithm",
    "Hook",
    "InMemoryLightningStore",
    "IsolatedBackend",
    "IterativeAlgorithm",
    "LLMProxy",
    "LeydenError",
    "LightningStore",
    "LitAgent",
    "LitAgentRunner",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OptimParams",
    "OtelTracer",
    "PolicyBackend",
    "PolicyGradient",
    "PolicyLoss",
    "ProgressBar",
    "PromptTemplate",
    "ProxyLLM",
    "Rollout",
    "RolloutConfig",
    "Runner",
    "SharedMemoryExecutionStrategy",
    "Span",
    "SqliteLightningStore",
    "TraceAdapter",
    "TraceToTrajectory",
    "Tracer",
    "TrainLoop",
    "Trainer",
    "Trajectory",
    "Triplet",
    "__version__",
    "algo",
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
    "rollout",
    "setup_logging",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'leyden' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
