"""A loss that Leyden does not have, as a user would add it: in a module of its own."""

from __future__ import annotations

from dataclasses import dataclass

from leyden.objectives.losses import Loss, LossTerms, TokenBatch, register_loss


@dataclass(frozen=True, slots=True)
class WeightedLikelihood(Loss):
    """Constants of `weighted_likelihood`."""

    factor: float = 1.0


@register_loss("weighted_likelihood", WeightedLikelihood, columns=("score",))
def weighted_likelihood(batch: TokenBatch, constants: WeightedLikelihood) -> LossTerms:
    """Return factor * score * logp."""
    score_N = batch.columns["score"]
    return LossTerms(constants.factor * score_N * batch.logprobs_N, sums={"score": score_N.sum()})
