"""Losses of policy optimisation on torch tensors, for language models and simulator policies alike.

A loss for language models is a function of three tensors and its constants, in `LOSSES`. To add one,
write the function, cite its source, and add it there; `PolicyLoss(name=NAME)` finds it. This module
knows no model, no buffer and no optimizer. It needs torch, so `leyden.maths` does not import it.

Shapes: N samples (tokens of a language model, transitions of a simulator).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from leyden.extras import missing_extra

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise missing_extra(error, extra="torch", needed_by=__name__) from None


class Surrogate(NamedTuple):
    """The objective of each sample, and the quantities that the metrics are made of."""

    objective_N: Tensor
    """The value to maximise."""
    ratio_N: Tensor
    log_ratio_N: Tensor
    clipped_N: Tensor
    """The ratio, moved into the clip range. Equal to the ratio if the loss does not clip."""

    def n_clipped(self) -> Tensor:
        """Return the number of ratios outside the clip range; shape ()."""
        return (self.clipped_N != self.ratio_N).sum().float()

    def kl_sum(self) -> Tensor:
        """Return the sum over N of (r - 1) - log r, an estimate of KL(behaviour || policy) (k3, Schulman 2020)."""
        return (self.ratio_N - 1 - self.log_ratio_N).sum()


def clipped_surrogate(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """Clipped objective of PPO, `min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` (arXiv:1707.06347, eq. 7).

    logprobs_N: log-probabilities of the samples under the policy being trained. The gradient flows
        through them.
    behaviour_N: log-probabilities under the policy that sampled; r = exp(logprobs_N - behaviour_N).
    """
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    return Surrogate(objective_N, ratio_N, log_ratio_N, clipped_N)


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, before_N: Tensor, *, clip: float) -> Tensor:
    """Squared error of each value, or of the value kept within `clip` of its old one, whichever is larger.

    max((v - R)^2, (before + clamp(v - before, -clip, clip) - R)^2), as in OpenAI's baselines and
    tianshou; shape (N,).
    """
    bounded_N = before_N + (values_N - before_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (bounded_N - returns_N).square())


PolicyObjective: TypeAlias = Callable[[Tensor, Tensor, Tensor, Mapping[str, float]], Surrogate]
"""Log-probabilities of the policy and of the behaviour policy, advantages (each of shape (N,)), and constants by name."""


def ppo_clip(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, constants: Mapping[str, float]
) -> Surrogate:
    """`clipped_surrogate` with the constants `clip_low` and `clip_high`."""
    return clipped_surrogate(
        logprobs_N, behaviour_N, advantages_N, clip_low=constants["clip_low"], clip_high=constants["clip_high"]
    )


def importance_sampling(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, constants: Mapping[str, float]
) -> Surrogate:
    """Policy gradient with importance weights and no clipping, `r A` (arXiv:1205.4839, eq. 5). It has no constants."""
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.exp()
    return Surrogate(ratio_N * advantages_N, ratio_N, log_ratio_N, ratio_N)


LOSSES: Final[dict[str, PolicyObjective]] = {"ppo_clip": ppo_clip, "importance_sampling": importance_sampling}
"""Losses of language models by name."""
