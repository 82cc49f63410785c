"""Losses that weigh the log-probability of each token: REINFORCE, CISPO and cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

from leyden._lib.options import check_number, named_options
from leyden.objectives.losses.loss import Loss, LossTerms, TokenBatch, register_loss
from leyden.objectives.losses.policy import PolicyLoss, policy_terms, proximal_logprobs


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """Constants of the loss `reinforce`. Raise ConfigError for one out of its range."""


@register_loss("reinforce", ReinforceLoss, columns=("logprobs", "advantages"))
def reinforce(batch: TokenBatch, constants: ReinforceLoss) -> LossTerms:
    """Return the loss terms of the objective A log pi (REINFORCE, Williams 1992, "Simple statistical gradient-following
    algorithms", eq. 4), with the KL and entropy terms of every policy loss.

    There is no ratio, so it is meant for one optimizer step on each batch of samples.
    """
    return policy_terms(batch, constants, batch.columns["advantages"] * batch.logprobs_N)


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """Constants of the loss `cispo`. Raise ConfigError for one out of its range."""

    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low; at least 0. None: no lower bound, as in the paper."""
    clip_high: float = 4.0
    """The ratio is clipped above 1 + clip_high; at least 0. The default limits the weight of a token to 5."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)  # super() does not work in a dataclass with slots
        check_number("clip_low", self.clip_low, at_least=0, or_none="no lower bound")
        check_number("clip_high", self.clip_high, at_least=0)


@register_loss("cispo", CISPOLoss, columns=("logprobs", "advantages"))
def cispo(batch: TokenBatch, constants: CISPOLoss) -> LossTerms:
    """Return the terms of the objective sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, MiniMax-M1,
    arXiv:2506.13585, eq. 4 and 5), with the terms that `policy_terms` adds.

    sg stops the gradient, so the ratio r is only a weight: a token whose ratio is clipped keeps its gradient.

    Metric in addition to those of `policy_terms`: `clip_fraction`, the share of ratios outside the clip range.
    """
    ratio_N = (batch.logprobs_N - proximal_logprobs(batch, constants)).exp().detach()
    lowest = None if constants.clip_low is None else 1 - constants.clip_low
    clipped_N = ratio_N.clamp(lowest, 1 + constants.clip_high)
    objective_N = clipped_N * batch.columns["advantages"] * batch.logprobs_N
    return policy_terms(batch, constants, objective_N, {"clip_fraction": (clipped_N != ratio_N).sum().float()})


@dataclass(frozen=True, slots=True)
class CrossEntropyLoss(Loss):
    """The loss `cross_entropy`, which has no constants."""


@register_loss("cross_entropy", CrossEntropyLoss, columns=())
def cross_entropy(batch: TokenBatch, constants: CrossEntropyLoss) -> LossTerms:
    """Return the objective log pi, the log-likelihood of the given tokens (supervised fine-tuning).

    Metric: `cross_entropy`, the mean of - log pi over tokens, in nats, whatever their weights.
    """
    return LossTerms(batch.logprobs_N, sums={"cross_entropy": -batch.logprobs_N.detach().sum()})
