"""Losses of policy optimisation on torch tensors, for language models and simulator policies alike.

They know no model, buffer or optimizer. This module does not load torch, so a process that only
configures a loss does not pay for it.

To add a loss of language-model policies, write a frozen dataclass with its constants and, beside it,
a function decorated with `register_loss`, its source and a test against the formula in double
precision. Every engine then takes it, in this process or in another one: a loss travels as its name
and its constants, and its inputs as named columns.

Shapes: N samples (tokens of a language model, transitions of a simulator).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from leyden.errors import ConfigError
from leyden.options import check_choice, check_names, check_number, named_options

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """Base of the constants of a registered loss. The type of the constants chooses the loss."""


class TokenBatch(NamedTuple):
    """What a loss is computed from: the trained tokens of several sequences, one after the other."""

    logprobs_N: Tensor
    """Log-probabilities of the tokens under the trained policy; gradients flow through them."""
    columns: Mapping[str, Tensor]
    """Columns of the sequences by name, each of shape (N,). `logprobs`: log-probabilities under the
    policy that sampled the tokens. `advantages`: how much better than expected each token did."""
    weights_N: Tensor
    """The share of each token in the loss."""
    sequence_N: Tensor
    """The number of the sequence that each token belongs to, from 0."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The objective of each token, and metrics."""

    objective_N: Tensor
    """To be maximised. The engine minimises - sum_t weight_t * objective_t."""
    sums: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Metrics by name, each summed over the N tokens (no dimension); reported as means over tokens."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Metrics by name, each the largest of the N tokens (no dimension); reported as maxima."""


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    """A loss as engines find it."""

    name: str
    function: Callable[[TokenBatch, Any], LossTerms]
    """From the tokens and the constants to the terms."""
    constants: type[Loss]
    columns: tuple[str, ...]
    """The columns that each sequence must have."""


LOSSES: dict[str, RegisteredLoss] = {}
"""Losses by name."""
_BY_CONSTANTS: dict[type[Loss], RegisteredLoss] = {}

C = TypeVar("C", bound=Loss)
LossFunction = Callable[[TokenBatch, C], LossTerms]


def register_loss(
    name: str, constants: type[C], *, columns: tuple[str, ...]
) -> Callable[[LossFunction[C]], LossFunction[C]]:
    """Return a decorator that registers a loss under a name, with the type of its constants.

    columns: names of the per-token columns that the function reads. An engine refuses sequences
        without one of them.
    Raise ConfigError for a name or a type that is registered already.
    """

    def register(function: LossFunction[C]) -> LossFunction[C]:
        if name in LOSSES or constants in _BY_CONSTANTS:
            raise ConfigError(f"loss {name!r} or its constants {constants.__name__} are registered already")
        LOSSES[name] = _BY_CONSTANTS[constants] = RegisteredLoss(name, function, constants, columns)
        return function

    return register


def find_loss(loss: Loss) -> RegisteredLoss:
    """Return the registered loss that these constants belong to. Raise ConfigError for any other value."""
    found = _BY_CONSTANTS.get(type(loss))
    if found is None:
        known = ", ".join(sorted(kind.__name__ for kind in _BY_CONSTANTS))
        raise ConfigError(f"loss is {loss!r}; give a name ({', '.join(sorted(LOSSES))}) or constants ({known})")
    return found


def make_loss(name: str, constants: Mapping[str, Any] | None = None) -> Loss:
    """Return the constants of the loss with this name; those left out have their defaults.

    Raise ConfigError for an unknown name or constant, and for a constant out of its range.
    """
    check_choice("loss", name, LOSSES)
    kind = LOSSES[name].constants
    given = dict(constants or {})
    check_names(f"loss {name!r}", given, list(kind.__dataclass_fields__))
    return kind(**given)


# ---- PPO -------------------------------------------------------------------------------------------------------------


@named_options
@dataclass(frozen=True, slots=True)
class PPOLoss(Loss):
    """Constants of the clipped surrogate objective, loss `ppo`. Raise ConfigError for one out of its range."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low; at least 0."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + clip_high; at least 0. A bound that is wider than `clip_low`
    keeps exploration (DAPO, arXiv:2503.14476)."""

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, at_least=0)
        check_number("clip_high", self.clip_high, at_least=0)


@register_loss("ppo", PPOLoss, columns=("logprobs", "advantages"))
def ppo(batch: TokenBatch, constants: PPOLoss) -> LossTerms:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7; DAPO, arXiv:2503.14476).

    Metrics: `clip_fraction`, the share of ratios outside the clip range; `kl`, see `Surrogate.kl_sum`;
    `max_logprob_difference`, the largest |logp - behaviour logp|, about 0 right after sampling.
    """
    surrogate = clipped_surrogate(
        batch.logprobs_N,
        batch.columns["logprobs"],
        batch.columns["advantages"],
        clip_low=constants.clip_low,
        clip_high=constants.clip_high,
    )
    return LossTerms(
        surrogate.objective_N,
        sums={"clip_fraction": surrogate.n_clipped(), "kl": surrogate.kl_sum()},
        maxima={"max_logprob_difference": surrogate.log_ratio_N.abs().max()},
    )


class Surrogate(NamedTuple):
    """The clipped objective of each sample, and the tensors that its metrics are computed from."""

    objective_N: Tensor
    """To be maximised."""
    ratio_N: Tensor
    """exp(logp - behaviour logp)."""
    log_ratio_N: Tensor
    clipped_N: Tensor
    """The ratio, moved into the clip range."""

    def n_clipped(self) -> Tensor:
        """Return the number of ratios outside the clip range, as a tensor of no dimension."""
        return (self.clipped_N != self.ratio_N).sum().float()

    def kl_sum(self) -> Tensor:
        """Return the sum over N of (r - 1) - log r, an estimate of KL(behaviour || policy) (k3, Schulman 2020)."""
        return (self.ratio_N - 1 - self.log_ratio_N).sum()


def clipped_surrogate(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - behaviour logp).

    Source: PPO, arXiv:1707.06347, eq. 7.
    logprobs_N: log-probabilities of the samples under the trained policy.
    behaviour_N: log-probabilities of the samples under the policy that drew them.
    """
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = (ratio_N * advantages_N).minimum(clipped_N * advantages_N)
    return Surrogate(objective_N, ratio_N, log_ratio_N, clipped_N)


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, before_N: Tensor, *, clip: float) -> Tensor:
    """Return the squared error of each value estimate, clipped as in OpenAI's baselines and tianshou; shape (N,).

    max((v - R)^2, (before + clamp(v - before, -clip, clip) - R)^2): the larger of the error of the
    new value and the error of the new value kept within `clip` of the old one (`before_N`).
    """
    bounded_N = before_N + (values_N - before_N).clamp(-clip, clip)
    return (values_N - returns_N).square().maximum((bounded_N - returns_N).square())
