"""`PolicyBackend`: a policy that can be sampled and trained, whatever runs it.

An algorithm drives a backend through this protocol and knows nothing of torch, processes or GPUs. A
backend knows nothing of rollouts, rewards or the store. To add one, implement the protocol and pass
`tests/contracts/engine.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from leyden.maths.losses import PolicyLoss
from leyden.options import NamedOptions, check_number, named_options
from leyden.types import LLM, TrainingSequence
from leyden.utils.arguments import KeepsArguments


@named_options
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Refuses values that no backend can honour (ConfigError)."""

    max_tokens: int = 16
    """At most this many response tokens, the end-of-turn token included."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """End the response after one of these, besides the model's own end-of-turn tokens; it is part
    of the response."""
    seed: int | None = None
    """In a deterministic backend, equal prompts, weights and seeds give equal responses."""

    def __post_init__(self) -> None:
        check_number("max_tokens", self.max_tokens, at_least=1, whole=True)
        check_number("temperature", self.temperature, at_least=0)
        check_number("top_p", self.top_p, above=0, at_most=1)
        check_number("seed", self.seed, whole=True, or_none="a draw of the backend's own")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled response. R tokens."""

    token_ids: list[int]
    """Shape (R,); ends with the end-of-turn token when that was sampled."""
    logprobs: list[float]
    """Shape (R,): log-probability of each token under the distribution it was drawn from at
    temperature 1 and top_p 1; for any other setting, under the tempered (not truncated)
    distribution; for temperature 0, at temperature 1."""
    policy_versions: list[int]
    """Shape (R,): the policy's version when the token was drawn."""
    finish_reason: Literal["stop", "length"]


@named_options
@dataclass(frozen=True, slots=True)
class OptimParams:
    """One AdamW step."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, at_least=0)
        check_number("weight_decay", self.weight_decay, at_least=0)
        check_number("max_grad_norm", self.max_grad_norm, above=0)


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    """The loss and the counts of one call of `forward_backward`."""

    loss: float
    n_sequences: int
    n_tokens: int
    """Tokens run through the model, padding not counted."""
    n_trained: int
    """Tokens with a weight other than 0."""
    clip_fraction: float
    """Share of trained tokens whose ratio lies outside the clip range."""
    kl: float
    """Mean of (r - 1) - log r over trained tokens: an estimate of KL(behaviour || policy) (k3,
    Schulman 2020)."""
    entropy: float
    """Mean entropy of the policy at trained tokens, in nats."""
    max_logprob_difference: float
    """Largest |logp - behaviour logp| over trained tokens; about 0 on the first minibatch after
    sampling."""


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    """The result of an optimizer step."""

    policy_version: int
    """The version that samples from now on."""
    grad_norm: float
    """Before clipping."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since start."""

    requests: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict[str, float])


class PolicyBackend(NamedOptions, KeepsArguments, ABC):
    """A policy: sampled through an OpenAI-compatible endpoint or by token ids, trained by
    gradients.

    `start` before use, `stop` after (or `async with`). `forward_backward` adds to the gradient,
    `optim_step` applies and clears it and raises `policy_version` by one. Methods may be called
    from any event loop, one training call at a time.
    """

    model_name: str
    """The name that the endpoint serves the policy under."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """0 for the weights it was given; one more after each optimizer step; restored by
        `load_state`.
        """

    @abstractmethod
    async def start(self) -> None:
        """Load the model and serve the endpoint. Raises EngineError with the cause.

        Calling it again does nothing.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop serving and free everything. Requests under way fail. Safe to repeat."""

    @abstractmethod
    def endpoint(self) -> LLM:
        """Return the running OpenAI-compatible endpoint. Raise EngineError before `start`."""

    @abstractmethod
    async def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Sample]:
        """Return one response for each prompt of token ids, sampled with the current weights."""

    @abstractmethod
    async def forward_backward(self, sequences: Sequence[TrainingSequence], loss: PolicyLoss) -> ForwardBackwardResult:
        """Add the gradient of `loss` over `sequences`.

        The order of `sequences` fixes the order of summation.
        Raises ConfigError for lists of unequal length, an empty batch and ids outside the
        vocabulary; EngineError for a loss that is not finite, and the gradient is cleared then.
        """

    @abstractmethod
    async def optim_step(self, params: OptimParams) -> OptimStepResult:
        """Apply and clear the gradient; swap weights between two decode steps, drop the cache,
        raise the version.

        Raises EngineError if no gradient was added since the last step, or its norm is not finite
        (it is cleared, weights stay).
        """

    @abstractmethod
    async def save_state(self, path: Path) -> None:
        """Write weights, optimizer state, version and the sampler's random state into `path` (made
        if missing).
        """

    @abstractmethod
    async def load_state(self, path: Path) -> None:
        """Restore what `save_state` wrote, to the bit.

        Raises CheckpointError for a missing or foreign state.
        """

    @abstractmethod
    async def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face model folder (weights, config, tokenizer) that any library loads."""

    @abstractmethod
    async def statistics(self) -> EngineStatistics:
        """Return the counters since start."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())
