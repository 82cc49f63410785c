"""The common part of policy losses: ratios of probabilities, the KL penalty and the entropy term.

Three policies occur. The *trained* policy has the gradient. The *proximal* policy is the denominator of ratios: the
learner's policy at the start of the step. The *sampler* drew the tokens. Sampler and proximal policy are the same
unless the sampler computes with other kernels or older weights. Then truncated importance sampling corrects for the
difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from leyden._lib.options import check_choice, check_number
from leyden.objectives.losses.kl import KL_ESTIMATORS, k3
from leyden.objectives.losses.loss import Loss, LossTerms, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(Loss):
    """Base of the constants of policy losses. Raise ConfigError for one out of its range."""

    kl_coefficient: float = 0.0
    """Factor of the KL divergence from the reference policy, which is subtracted from the objective; at least 0. Above
    0, the column `reference_logprobs` is needed."""
    kl_estimator: str = "k3"
    """The estimator of the divergence: `k1`, `k2` or `k3` (`leyden.objectives.losses.kl`). The gradient of `k1` is 0 in
    expectation, so use `k1` only for a penalty in the reward."""
    entropy_coefficient: float = 0.0
    """Factor of the entropy, which is added to the objective; negative values lower the entropy."""
    importance_cap: float | None = None
    """Largest weight of truncated importance sampling; above 0. With it the column `learner_logprobs` is needed:
    log-probabilities under the proximal policy. None: the sampler is the proximal policy."""

    def __post_init__(self) -> None:
        check_number("kl_coefficient", self.kl_coefficient, at_least=0)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_number("entropy_coefficient", self.entropy_coefficient)
        check_number("importance_cap", self.importance_cap, above=0, or_none="no importance sampling")

    @property
    def further_columns(self) -> tuple[str, ...]:
        return columns_in_use(self)

    @property
    def uses_entropies(self) -> bool:
        return self.entropy_coefficient != 0


def columns_in_use(constants: PolicyLoss) -> tuple[str, ...]:
    """Return the columns that the KL penalty and importance sampling need, if they are in use."""
    reference = ("reference_logprobs",) if constants.kl_coefficient else ()
    learner = () if constants.importance_cap is None else ("learner_logprobs",)
    return reference + learner


def proximal_logprobs(batch: TokenBatch, constants: PolicyLoss) -> Tensor:
    """Return the proximal policy's log-probabilities, shape (N,): the denominators of the ratios."""
    return batch.columns["logprobs" if constants.importance_cap is None else "learner_logprobs"]


def importance_weights(learner_N: Tensor, sampler_N: Tensor, *, cap: float) -> Tensor:
    """Return min(exp(learner logp - sampler logp), cap), shape (N,), without a gradient (truncated importance
    sampling).

    Source: Ionides 2008, "Truncated importance sampling"; for a sampler with other kernels than the learner, Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    return (learner_N - sampler_N).exp().clamp(max=cap).detach()


def token_entropies(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy of each distribution over V tokens, - sum_v p_v log p_v in nats, shape (N,)."""
    # A token with probability 0 gives 0 * -inf = nan, which counts as 0.
    return -(logprobs_NV.exp() * logprobs_NV).nan_to_num().sum(-1)


def policy_terms(
    batch: TokenBatch, constants: PolicyLoss, objective_N: Tensor, sums: Mapping[str, Tensor] | None = None
) -> LossTerms:
    """Return the terms of a policy loss: the weighted objective, less KL penalty, plus entropy.

    w_t objective_t - kl_coefficient KL_t + entropy_coefficient H_t

    w_t is the truncated importance weight, and 1 without `importance_cap`.
    sums: metrics of the loss itself, summed over tokens. To these are added

    - `kl`: the divergence of the proximal from the trained policy (k3);
    - `ratio`, `max_ratio`: the mean and the largest trained / proximal probability of a token;
    - `max_logprob_difference`: the largest |logp - sampler's logp|, about 0 right after sampling;
    - `importance_weight`: the mean of w_t, with `importance_cap`;
    - `reference_kl`: the mean estimate of the penalty, with `kl_coefficient`.
    """
    found = dict(sums or {})
    difference_N = proximal_logprobs(batch, constants) - batch.logprobs_N.detach()
    ratio_N = (-difference_N).exp()
    found["kl"] = k3(difference_N).sum()
    found["ratio"] = ratio_N.sum()
    if constants.importance_cap is not None:
        learner_N, sampler_N = batch.columns["learner_logprobs"], batch.columns["logprobs"]
        weights_N = importance_weights(learner_N, sampler_N, cap=constants.importance_cap)
        objective_N = objective_N * weights_N
        found["importance_weight"] = weights_N.sum()
    if constants.kl_coefficient:
        estimate = KL_ESTIMATORS[constants.kl_estimator]
        penalty_N: Tensor = estimate(batch.logprobs_N - batch.columns["reference_logprobs"])
        objective_N = objective_N - constants.kl_coefficient * penalty_N
        found["reference_kl"] = penalty_N.detach().sum()
    if constants.entropy_coefficient:
        assert batch.entropies_N is not None, "the engine computes them because the loss uses_entropies"
        objective_N = objective_N + constants.entropy_coefficient * batch.entropies_N
    largest = (batch.logprobs_N.detach() - batch.columns["logprobs"]).abs().max()
    return LossTerms(objective_N, sums=found, maxima={"max_logprob_difference": largest, "max_ratio": ratio_N.max()})


class Surrogate(NamedTuple):
    """The clipped objective of each of N samples, and the tensors for its metrics."""

    objective_N: Tensor
    """The objective to maximise."""
    ratio_N: Tensor
    """exp(logp - behaviour logp)."""
    log_ratio_N: Tensor
    clipped_N: Tensor
    """The ratio, clipped."""

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
    objective_N, clipped_N = clipped_objective(ratio_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
    return Surrogate(objective_N, ratio_N, log_ratio_N, clipped_N)


def clipped_objective(
    ratio_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return min(r A, c A) and c = clip(r, 1 - clip_low, 1 + clip_high), each of shape (N,)."""
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return (ratio_N * advantages_N).minimum(clipped_N * advantages_N), clipped_N
