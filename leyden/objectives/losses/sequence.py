"""GSPO: the ratio of a whole call's probabilities in place of each token's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leyden._lib.options import check_number, named_options
from leyden.objectives.losses.loss import LossTerms, TokenBatch, register_loss
from leyden.objectives.losses.policy import PolicyLoss, clipped_objective, policy_terms, proximal_logprobs

if TYPE_CHECKING:
    from torch import Tensor


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class GSPOLoss(PolicyLoss):
    """Constants of the loss `gspo`. Raise ConfigError for one out of its range."""

    clip_low: float = 3e-4
    """The ratio is clipped below 1 - clip_low; at least 0. The paper's value: the ratio is a geometric mean over
    tokens, so it moves far less than a token's."""
    clip_high: float = 4e-4
    """The ratio is clipped above 1 + clip_high; at least 0. The paper's value."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)  # super() does not work in a dataclass with slots
        check_number("clip_low", self.clip_low, at_least=0)
        check_number("clip_high", self.clip_high, at_least=0)


@register_loss("gspo", GSPOLoss, columns=("logprobs", "advantages", "calls"))
def gspo(batch: TokenBatch, constants: GSPOLoss) -> LossTerms:
    """Return the terms of the objective min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A) (GSPO-token,
    arXiv:2507.18071, eq. 13 and 14), with the terms that `policy_terms` adds.

    s_t = sg(s) pi_t / sg(pi_t), where sg stops the gradient and s = exp(mean of log r over the tokens of one model
    call). The paper's sequence is one call here: a sequence that holds several calls, which the column `calls` numbers,
    has one ratio for each call. If all tokens of a call have the same advantage and weight, value and gradient are
    those of the paper's sequence objective (eq. 5).

    Metric in addition to those of `policy_terms`: `clip_fraction`, the share of tokens whose ratio is clipped.
    """
    log_ratio_N = batch.logprobs_N - proximal_logprobs(batch, constants)
    means_N = call_means(log_ratio_N.detach(), batch.sequence_N, batch.columns["calls"])
    ratio_N = (means_N + batch.logprobs_N - batch.logprobs_N.detach()).exp()
    objective_N, clipped_N = clipped_objective(
        ratio_N, batch.columns["advantages"], clip_low=constants.clip_low, clip_high=constants.clip_high
    )
    return policy_terms(batch, constants, objective_N, {"clip_fraction": (clipped_N != ratio_N).sum().float()})


def call_means(values_N: Tensor, sequence_N: Tensor, calls_N: Tensor) -> Tensor:
    """Return for each token the mean of `values_N` over the tokens of its model call, shape (N,).

    sequence_N: the number of each token's sequence.
    calls_N: the number of each token's call within its sequence.
    The tokens of one call must be next to each other.
    """
    # A call begins where either number changes. Then number the K calls of the batch from 0.
    begins_N = (sequence_N.diff(prepend=sequence_N[:1]) != 0) | (calls_N.diff(prepend=calls_N[:1]) != 0)
    call_N = begins_N.cumsum(0)
    n_calls = int(call_N[-1]) + 1
    sums_K = values_N.new_zeros(n_calls).index_add_(0, call_N, values_N)
    return (sums_K / call_N.bincount(minlength=n_calls))[call_N]
