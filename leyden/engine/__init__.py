"""Backends that sample and train a policy.

Lives here: the `PolicyBackend` protocol, a `Learner` and a `Sampler` (`base`), the embedded backend (`embedded`: a Hugging Face
model decoded and trained in one process, its endpoint OpenAI-compatible), and the same one in a
child process (`isolated`). It knows token ids, advantages and weights; not rollouts, rewards or the
store. Importing it loads neither torch nor transformers. To add a backend, implement the protocol
in one module and pass `tests/contracts/engine.py`.
"""

from typing import Any

from leyden.engine.base import (
    EngineCapabilities,
    EngineStatistics,
    ForwardBackwardResult,
    ForwardResult,
    Learner,
    OptimParams,
    OptimStepResult,
    PolicyBackend,
    Sample,
    Sampler,
    SamplingParams,
)
from leyden.engine.embedded import EmbeddedBackend
from leyden.engine.isolated import IsolatedBackend

__all__ = [
    "EmbeddedBackend",
    "EngineCapabilities",
    "EngineStatistics",
    "ForwardBackwardResult",
    "ForwardResult",
    "IsolatedBackend",
    "Learner",
    "OptimParams",
    "OptimStepResult",
    "PolicyBackend",
    "Sample",
    "Sampler",
    "SamplingParams",
    "policy_backend",
]


def policy_backend(model: Any, *, isolate: bool = False, **options: Any) -> PolicyBackend:
    """Return a backend for `model`, in this process or, with `isolate`, in a process of its own.

    options: see `EmbeddedBackend`.
    """
    return IsolatedBackend(model, **options) if isolate else EmbeddedBackend(model, **options)
