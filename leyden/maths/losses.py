"""Losses of policy optimisation on torch tensors, for language models and simulator policies alike.

They know no model, buffer or optimizer. This module does not load torch, so a process that only
configures a loss does not pay for it.

To add a loss of language-model policies, write a function with the signature of `Loss`, its source
and a test against the formula in double precision, and add its line to `LOSSES`. The engine then
takes `PolicyLoss("NAME")`, in this process or in its own. A new constant is a field of `PolicyLoss`.

Shapes: N samples (tokens of a language model, transitions of a simulator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from leyden.options import check_choice, check_number, named_options

if TYPE_CHECKING:
    from torch import Tensor


@named_options
@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Choose the loss of a policy's sampled tokens, with its constants.

    The engine minimises - sum_t w_t * objective_t, where w_t is the weight of token t.
    Raise ConfigError for an unknown name, or a constant out of its range.
    """

    name: str = "ppo"
    """A name of `leyden.maths.losses.LOSSES`."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low; at least 0."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + clip_high; at least 0. A bound that is wider than `clip_low`
    keeps exploration (DAPO, arXiv:2503.14476)."""
    temperature: float = 1.0
    """The temperature at which the behaviour log-probabilities were taken; above 0."""

    def __post_init__(self) -> None:
        check_choice("loss", self.name, LOSSES)
        check_number("clip_low", self.clip_low, at_least=0)
        check_number("clip_high", self.clip_high, at_least=0)
        check_number("temperature", self.temperature, above=0)


class LossTerms(NamedTuple):
    """The objective of each sample, and the tensors that its metrics are computed from."""

    objective_N: Tensor
    """To be maximised."""
    ratio_N: Tensor
    """exp(logp - behaviour logp)."""
    log_ratio_N: Tensor
    clipped_N: Tensor
    """The ratio, moved into the clip range; the ratio itself for a loss that does not clip."""

    def n_clipped(self) -> Tensor:
        """Return the number of ratios outside the clip range, as a tensor of no dimension."""
        return (self.clipped_N != self.ratio_N).sum().float()

    def kl_sum(self) -> Tensor:
        """Return the sum over N of (r - 1) - log r, an estimate of KL(behaviour || policy) (k3, Schulman 2020)."""
        return (self.ratio_N - 1 - self.log_ratio_N).sum()


Loss = Callable[["Tensor", "Tensor", "Tensor", PolicyLoss], LossTerms]
"""From logprobs_N, behaviour_N and advantages_N to the terms of the loss.

logprobs_N: log-probabilities of the samples under the trained policy; gradients flow through them.
behaviour_N: log-probabilities of the samples under the policy that drew them."""


def ppo(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, constants: PolicyLoss) -> LossTerms:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, eq. 7; DAPO, arXiv:2503.14476)."""
    return clipped_surrogate(
        logprobs_N, behaviour_N, advantages_N, clip_low=constants.clip_low, clip_high=constants.clip_high
    )


LOSSES: dict[str, Loss] = {"ppo": ppo}
"""Losses by the name that a user gives: `PolicyLoss("ppo")`."""


def clipped_surrogate(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> LossTerms:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - behaviour logp).

    Source: PPO, arXiv:1707.06347, eq. 7. `Loss` documents the tensors.
    """
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = (ratio_N * advantages_N).minimum(clipped_N * advantages_N)
    return LossTerms(objective_N, ratio_N, log_ratio_N, clipped_N)


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, before_N: Tensor, *, clip: float) -> Tensor:
    """Return the squared error of each value estimate, clipped as in OpenAI's baselines and tianshou; shape (N,).

    max((v - R)^2, (before + clamp(v - before, -clip, clip) - R)^2): the larger of the error of the
    new value and the error of the new value kept within `clip` of the old one (`before_N`).
    """
    bounded_N = before_N + (values_N - before_N).clamp(-clip, clip)
    return (values_N - returns_N).square().maximum((bounded_N - returns_N).square())
