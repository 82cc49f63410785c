"""Backends that sample and train a policy.

- `policy_backend`: the protocol `PolicyBackend`, which is a `Learner` and a `Sampler`;
- `embedded`: a Hugging Face model, decoded and trained in this process, with an OpenAI-compatible
  endpoint;
- `isolated`: the embedded backend in a child process;
- `vllm`: a vLLM server beside a learner.

The package knows token ids, advantages and weights; not rollouts, rewards or the store. Importing it loads neither
torch nor transformers. To add a backend, implement the protocol in one module, pass `tests/contracts/engine.py`, and
add it to `EngineRegistry`.
"""

from typing import Final

from leyden._lib.components import ComponentRegistry
from leyden.engine.embedded import EmbeddedBackend
from leyden.engine.isolated import IsolatedBackend
from leyden.engine.policy_backend import (
    EngineCapabilities,
    EngineStatistics,
    ForwardBackwardResult,
    ForwardResult,
    Learner,
    LoRA,
    OptimParams,
    OptimStepResult,
    PolicyBackend,
    SampledResponse,
    Sampler,
    SamplingParams,
    SharedWeights,
)
from leyden.engine.vllm import VLLMBackend, untie_embeddings
from leyden.objectives.schedules import learning_rate_at

__all__ = [
    "EmbeddedBackend",
    "EngineCapabilities",
    "EngineRegistry",
    "EngineStatistics",
    "ForwardBackwardResult",
    "ForwardResult",
    "IsolatedBackend",
    "Learner",
    "LoRA",
    "OptimParams",
    "OptimStepResult",
    "PolicyBackend",
    "SampledResponse",
    "Sampler",
    "SamplingParams",
    "SharedWeights",
    "VLLMBackend",
    "learning_rate_at",
    "untie_embeddings",
]


EngineRegistry: Final = ComponentRegistry(
    "leyden.engines",
    {
        "embedded": EmbeddedBackend,
        "isolated": IsolatedBackend,
        "vllm": VLLMBackend,
    },
)
"""Backends by short name; `register_component("engine", ...)` and entry points of `leyden.engines` add others."""
