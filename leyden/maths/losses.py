"""Loss terms of policy optimisation on torch tensors, for language models and simulator policies alike.

torch is loaded by whoever imports this module, so `leyden.maths` does not import it. It knows no model, no buffer and no
optimizer. To add a term, add a function with its source and a test against the formula written out by hand.

Shapes: N samples (tokens of a language model, transitions of a simulator).
"""

from __future__ import annotations

from typing import NamedTuple

from leyden.extras import missing_extra

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise missing_extra(error, extra="torch", needed_by=__name__) from None


class ClippedSurrogate(NamedTuple):
    """The objective of each sample, and what its figures are made of."""

    objective_N: Tensor
    """To be maximised: min(r A, clip(r) A)."""
    ratio_N: Tensor
    log_ratio_N: Tensor
    clipped_N: Tensor
    """The ratio inside the clip range."""

    def n_clipped(self) -> Tensor:
        """How many ratios lie outside the clip range; a tensor of no dimension."""
        return (self.clipped_N != self.ratio_N).sum().float()

    def kl_sum(self) -> Tensor:
        """Sum over N of (r - 1) - log r: an estimate of KL(behaviour || policy) (k3, Schulman 2020)."""
        return (self.ratio_N - 1 - self.log_ratio_N).sum()


def clipped_surrogate(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> ClippedSurrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - behaviour logp) (PPO, arXiv:1707.06347, eq. 7).

    logprobs_N: of what was sampled, under the policy being trained; the gradient flows through them.
    behaviour_N: the same under the policy that sampled.
    """
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    return ClippedSurrogate(objective_N, ratio_N, log_ratio_N, clipped_N)


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, before_N: Tensor, *, clip: float) -> Tensor:
    """Squared error of each sample, the larger of the value's own and that of the value kept within `clip` of what it was.

    max((v - R)^2, (before + clamp(v - before, -clip, clip) - R)^2), as in OpenAI's baselines and tianshou; shape (N,).
    """
    bounded_N = before_N + (values_N - before_N).clamp(-clip, clip)
    return torch.maximum((values_N - returns_N).square(), (bounded_N - returns_N).square())
