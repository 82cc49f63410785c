"""`PolicyBackend`: the protocol of a policy that can be sampled and trained.

An algorithm drives a backend through this protocol and knows nothing of torch, processes or GPUs. A backend knows
nothing of rollouts, rewards or the store. To add a backend, implement the protocol and pass
`tests/contracts/engine.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from leyden._lib.components import KeepsArguments
from leyden._lib.options import NamedOptions, check_flag, check_number, named_options
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import Loss, find_loss
from leyden.types import LLM, TrainingSequence

T = TypeVar("T")

LOGITS_NOT_FINITE = "the policy's logits are not finite"
"""How the message begins with which a request fails whose policy has diverged."""


@named_options
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Raise ConfigError for values out of their range."""

    max_tokens: int = 16
    """The most response tokens, the end-of-turn token included."""
    temperature: float = 1.0
    """The sampling temperature, 0 or above. 0 takes the most likely token."""
    top_p: float = 1.0
    """Sample among the fewest most likely tokens whose probabilities sum to this, in (0, 1]."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, besides the model's own end-of-turn tokens. The token is part of the response."""
    seed: int | None = None
    """Seed of the response. In a deterministic backend, equal prompts, weights and seeds give equal responses. None: a
    random seed."""

    def __post_init__(self) -> None:
        check_number("max_tokens", self.max_tokens, at_least=1, whole=True)
        check_number("temperature", self.temperature, at_least=0)
        check_number("top_p", self.top_p, above=0, at_most=1)
        check_number("seed", self.seed, whole=True, or_none="a draw of the backend's own")


@dataclass(frozen=True, slots=True)
class SampledResponse:
    """One sampled response of R tokens."""

    token_ids: list[int]
    """Shape (R,). The last one is the end-of-turn token if that was sampled."""
    logprobs: list[float]
    """Shape (R,): the log-probability with which each token was drawn, at the temperature and among the tokens that
    top_p keeps. For temperature 0 it is the one at temperature 1, of the whole distribution. Only at top_p 1 is it the
    one that `forward` returns at the same temperature."""
    policy_versions: list[int]
    """Shape (R,): the policy's version when the token was drawn."""
    finish_reason: Literal["stop", "length"]
    """"stop": a token ended the response. "length": `max_tokens` or the context was reached."""


@named_options
@dataclass(frozen=True, slots=True)
class OptimParams:
    """The parameters of one AdamW step."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm. The gradient of a value head has its own norm."""
    value_learning_rate: float | None = None
    """Learning rate of the value head's own parameters; None takes `learning_rate`."""

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, at_least=0)
        for beta in self.betas:
            check_number("betas", beta, at_least=0, at_most=1)
        check_number("value_learning_rate", self.value_learning_rate, at_least=0, or_none="learning_rate")
        check_number("weight_decay", self.weight_decay, at_least=0)
        check_number("max_grad_norm", self.max_grad_norm, above=0)


@named_options
@dataclass(frozen=True, slots=True)
class LoRA:
    """Options to train low-rank adapters with frozen weights: `W + alpha / rank * B @ A` (LoRA, arXiv:2106.09685)."""

    rank: int = 16
    """Rows of A and columns of B; at least 1."""
    alpha: float = 32.0
    """The scale of the adapters, above 0."""
    target_modules: str | Sequence[str] = "all-linear"
    """Names of the linear layers that get an adapter, such as ("q_proj", "v_proj"), or "all-linear": all but the output
    head."""
    adapter: str | Path | None = None
    """A folder with an adapter to continue with. It decides rank, alpha and modules itself."""
    merge: bool = False
    """Whether `save_pretrained`, and so a run's `model/`, has the whole model, with the adapters merged in. False: the
    adapters and the place of the base model; `leyden models export` writes the whole model later."""

    def __post_init__(self) -> None:
        check_number("rank", self.rank, at_least=1, whole=True)
        check_number("alpha", self.alpha, above=0)
        check_flag("merge", self.merge)
        if not self.target_modules or not all(isinstance(name, str) for name in self.target_modules):
            raise ConfigError(
                f'target_modules is {self.target_modules!r}; give names of layers, ("q_proj", "v_proj"), or "all-linear"'
            )

    @classmethod
    def of(cls, given: object) -> LoRA | None:
        """Return the options, which may be given as a dict; None stays None. Raise ConfigError for anything else."""
        if given is None or isinstance(given, LoRA):
            return given
        if isinstance(given, Mapping):
            return LoRA(**cast(Mapping[str, Any], given))
        raise ConfigError(f"lora is {given!r}; give LoRA(rank=16), its fields as a dict, or None to train all weights")


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    """The loss and the counts of one call of `forward_backward`."""

    loss: float
    """The weighted sum of the loss over the trained tokens."""
    n_sequences: int
    n_tokens: int
    """The number of tokens of the sequences up to the last trained one. A prefix that several sequences share counts
    for each."""
    n_trained: int
    """The number of tokens with a weight other than 0."""
    metrics: dict[str, float]
    """Means and maxima over trained tokens by name: `entropy`, the policy's mean entropy in nats, and the metrics of
    the loss (of `ppo`: `clip_fraction`, `kl` and `max_logprob_difference`)."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Numbers of each token of several sequences, under the current weights: one list for each sequence, with one
    number for each token.
    """

    logprobs: list[list[float]]
    """The log-probability of each token with a weight other than 0; 0.0 for the others."""
    entropies: list[list[float]]
    """The entropy, in nats, of the distribution that each such token was drawn from; 0.0 for the others."""
    values: list[list[float]] | None = None
    """The value head's estimate for each such token; None if they were not requested."""


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    """The result of an optimizer step."""

    policy_version: int
    """The version of the weights after the step."""
    grad_norm: float
    """The gradient's norm before clipping, without the value head's own parameters."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The engine's counters since it started."""

    requests: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    decode_steps: int = 0
    """Forward passes that have sampled tokens, each for a batch."""
    decode_seconds: float = 0.0
    """Seconds that these took."""
    extra: dict[str, float] = field(default_factory=dict[str, float])
    """Further numbers of a kind of backend, by name."""


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Optional abilities of a backend."""

    losses: frozenset[str]
    """The names of the losses that `forward_backward` takes."""
    values: bool = False
    """Whether there is a value head, whose estimates `forward(values=True)` returns."""
    adapter: bool = False
    """Whether adapters are trained, which `save_adapter` writes."""
    shared_weights: bool = False
    """Whether the sampler reads the learner's own weights, so that an optimizer step is published at once."""
    reports_versions: bool = False
    """Whether the endpoint reports the version of each token. Otherwise the gateway records the
    version of each call."""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The location of weights in memory, for another process that samples with them. Lists have an item per weight."""

    names: list[str]
    """The names of the model's parameters."""
    dtypes: list[str]
    """Types as torch names them, such as "bfloat16"."""
    shapes: list[list[int]]
    handles: str
    """A pickled list in Base64, with one dict for each weight: the arguments of torch's function that maps the weight,
    by the UUID of its GPU, or by "cpu"."""


class Learner(ABC):
    """The part of a backend that computes gradients and updates weights. Make one training call at a time."""

    @abstractmethod
    async def forward(
        self, sequences: Sequence[TrainingSequence], *, temperature: float = 1.0, values: bool = False
    ) -> ForwardResult:
        """Return log-probabilities and entropies of the tokens with a weight, without a gradient.

        temperature: the sampling temperature, by which the logits are divided.
        values: return the value head's estimates as well.
        Raise ConfigError for sequences that `forward_backward` refuses, and for `values` without a value head.
        """

    @abstractmethod
    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, *, temperature: float = 1.0
    ) -> ForwardBackwardResult:
        """Add the gradient of `loss` over `sequences` to the gradient so far.

        The order of `sequences` fixes the order of summation.

        loss: the constants of a registered loss (`leyden.objectives.losses`), whose type names the loss.
        temperature: the sampling temperature, by which the logits are divided.
        Raise ConfigError for a loss that the backend lacks, a column that the loss needs and a sequence lacks, lists of
        unequal length, an empty batch and ids outside the vocabulary. Raise EngineError for a loss that is not finite;
        the gradient is cleared then.
        """

    @abstractmethod
    async def optim_step(self, params: OptimParams) -> OptimStepResult:
        """Apply the gradient to the learner's weights, and clear it.

        Sampling uses the new weights after `publish_weights`. Raise EngineError if no gradient was added since the last
        step, or if its norm is not finite: it is then cleared, and the weights are unchanged.
        """

    @abstractmethod
    async def save_state(self, path: Path) -> None:
        """Write weights, optimizer state, version and the sampler's random state into `path` (made if missing)."""

    async def snapshot_state(self, path: Path) -> bool:
        """Copy the state, and write it into `path`, as `save_state` does, while training continues.

        Return whether the files are still being written; then await `state_written(path)`, which raises the error if
        writing fails. A backend that cannot copy writes before it returns.
        """
        await self.save_state(path)
        return False

    async def state_written(self, path: Path) -> None:
        """Wait until the state that `snapshot_state` copied is in the files of `path`. Raise OSError or EngineError if
        writing failed.
        """

    @abstractmethod
    async def load_state(self, path: Path, *, as_version: int | None = None) -> None:
        """Restore the state that `save_state` wrote, to the bit, and publish its weights. Raise CheckpointError if it
        is missing or belongs to another model or backend.

        as_version: the version that the weights get, while the sampler's random state goes on, for a run that goes back
            to earlier weights. None: version and random state are restored, too.
        """

    @abstractmethod
    async def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face model folder (weights, config, tokenizer) that any library loads.

        Adapters on a model that was loaded from a folder are written alone, in peft's layout and with the place and
        digest of that model, unless `LoRA.merge` is set. Other adapters are merged into the weights. A value head is
        left out.
        """

    async def save_adapter(self, path: Path) -> None:
        """Write the adapters as a folder that `peft.PeftModel.from_pretrained` loads.

        Raise ConfigError if the backend trains no adapters.
        """
        raise ConfigError(f"{type(self).__name__} trains no adapter; make it with lora=LoRA(), or call save_pretrained")

    async def device(self) -> str:
        """Return where the weights are, such as "cpu" or "cuda:0"."""
        return "cpu"

    async def share_weights(self) -> SharedWeights:
        """Return handles by which another process of this machine maps the weights.

        On a GPU nothing is copied. The handles are valid until the next optimizer step: call again after it. Raise
        ConfigError if the backend cannot share its weights.
        """
        raise ConfigError(f"{type(self).__name__} shares no weights; call save_pretrained")


class Sampler(ABC):
    """The part of a backend that samples, by token ids and through an OpenAI-compatible endpoint."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """The version of the weights that sampling uses: 0 at first, and one more for each optimizer step."""

    @abstractmethod
    def endpoint(self) -> LLM:
        """Return the running OpenAI-compatible endpoint. Raise EngineError before `start`."""

    @abstractmethod
    async def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[SampledResponse]:
        """Return one response for each prompt of token ids, in order, sampled with the published weights.

        Raise ConfigError for a prompt that is empty, too long, or has an unknown token id.
        """

    @abstractmethod
    async def publish_weights(self) -> int:
        """Let sampling use the learner's weights from now on, and return their version.

        Responses under way continue between two tokens with the new weights; each token carries its version. A backend
        with `shared_weights` has published each step already. Safe to repeat.
        """


def started(running: T | None) -> T:
    """Return the parts of a running engine. Raise EngineError for None, which is not running."""
    if running is None:
        raise EngineError("the engine is not running; call start() first, or use 'async with'")
    return running


class PolicyBackend(Learner, Sampler, NamedOptions, KeepsArguments, ABC):
    """A policy that is sampled and trained.

    Call `start` before use and `stop` after it, or use `async with`. Methods may be called from any event loop.
    """

    model_name: str
    """The name under which the endpoint serves the policy."""

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """The optional abilities of this backend, which are known before `start`."""

    @property
    def learner(self) -> PolicyBackend:
        """The backend that computes the gradients: this one, unless it is composed of two."""
        return self

    @abstractmethod
    async def start(self) -> None:
        """Load the model and serve the endpoint. Raise EngineError, with the cause, if that fails.

        Calling it again does nothing.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop serving and free everything. Requests under way fail.

        Calling it again does nothing.
        """

    @abstractmethod
    async def statistics(self) -> EngineStatistics:
        """Return the engine's counters since it started."""

    def check_loss(self, loss: Loss) -> None:
        """Raise ConfigError, which names the loss, unless this backend can compute it."""
        name = find_loss(loss).name
        if loss.uses_values and not self.capabilities.values:
            raise ConfigError(
                f"the loss {name!r} uses values, and {type(self).__name__} has no value head; "
                "make it with value_head=True, or set the coefficient of the loss's value term to 0"
            )
        if name not in self.capabilities.losses:
            known = ", ".join(sorted(self.capabilities.losses))
            raise ConfigError(f"{type(self).__name__} has no loss {name!r}; it has {known}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())
