"""DPO: learn from pairs of a chosen and a rejected answer, whose tokens need not be in one batch.

The gradient of a pair's loss with respect to the parameters is a weighted gradient of the two answers' log-likelihoods.
The weight is a function of four numbers, which a forward pass gives. So a step has three parts: a forward pass over all
answers, `dpo_weights`, and the loss `dpo` with the weights as a column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leyden._lib.options import check_number, named_options
from leyden.errors import ConfigError
from leyden.objectives.losses.loss import Loss, LossTerms, TokenBatch, register_loss


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class DPOLoss(Loss):
    """Constants of DPO, which are arguments of `dpo_weights`. Raise ConfigError for one out of its range."""

    beta: float = 0.1
    """How strongly the policy is held to the reference policy; above 0."""
    label_smoothing: float = 0.0
    """Probability that a pair's answers are swapped by mistake; from 0 to 0.5."""

    def __post_init__(self) -> None:
        _check_constants(self.beta, self.label_smoothing)


@register_loss("dpo", DPOLoss, columns=("coefficients",))
def dpo(batch: TokenBatch, constants: DPOLoss) -> LossTerms:
    """Return the objective coefficient * log pi. Its gradient is minus that of the DPO loss; its value is not the loss,
    which `dpo_weights` returns.

    The column `coefficients` holds the pair's weight (`DPOWeights.weights_P`) at the tokens of a chosen answer, and
    minus the weight at those of a rejected answer. With 1 / P as the weight of every token of P pairs, an engine that
    maximises the objective minimises the mean loss. The weights depend on the policy, so compute them again before each
    optimizer step.
    """
    return LossTerms(batch.columns["coefficients"] * batch.logprobs_N)


class DPOWeights(NamedTuple):
    """The loss of P pairs, and the weights of its gradient."""

    loss: float
    """Mean over pairs."""
    weights_P: list[float]
    """Shape (P,): minus the derivative of each pair's loss with respect to the log-probability of its chosen answer.
    For the rejected answer the derivative has the opposite sign."""
    accuracy: float
    """Share of pairs with a margin above 0."""
    margin: float
    """Mean over pairs of beta * ((chosen - reference) - (rejected - reference)), in nats."""


def dpo_weights(
    chosen_P: Sequence[float],
    rejected_P: Sequence[float],
    reference_chosen_P: Sequence[float],
    reference_rejected_P: Sequence[float],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> DPOWeights:
    """Return the mean loss of P pairs of answers and the weights of its gradient (DPO, arXiv:2305.18290, eq. 7). With
    e = label_smoothing (conservative DPO, Mitchell 2023),

        m = beta ((chosen - reference_chosen) - (rejected - reference_rejected))
        loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m)
        weight = beta ((1 - e) sigmoid(-m) - e sigmoid(m))

    chosen_P, rejected_P: log-probabilities of whole answers under the policy, sums over tokens.
    reference_chosen_P, reference_rejected_P: the same under the reference policy.
    Raise ConfigError without a pair, and for lists of unequal length.
    """
    _check_constants(beta, label_smoothing)
    lists = (chosen_P, rejected_P, reference_chosen_P, reference_rejected_P)
    lengths = [len(each) for each in lists]
    if not lengths[0] or len(set(lengths)) > 1:
        raise ConfigError(
            f"the four lists have {lengths} log-probabilities; they must have the same length, at least 1"
        )
    margins_P = [beta * ((a - c) - (b - d)) for a, b, c, d in zip(*lists, strict=True)]
    losses_P = [-(1 - label_smoothing) * _log_sigmoid(m) - label_smoothing * _log_sigmoid(-m) for m in margins_P]
    weights_P = [
        beta * ((1 - label_smoothing) * math.exp(_log_sigmoid(-m)) - label_smoothing * math.exp(_log_sigmoid(m)))
        for m in margins_P
    ]
    n = len(margins_P)
    return DPOWeights(
        loss=math.fsum(losses_P) / n,
        weights_P=weights_P,
        accuracy=sum(margin > 0 for margin in margins_P) / n,
        margin=math.fsum(margins_P) / n,
    )


def _log_sigmoid(value: float) -> float:
    """Return log(1 / (1 + exp(-value))) without overflow."""
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))


def _check_constants(beta: float, label_smoothing: float) -> None:
    check_number("beta", beta, above=0)
    check_number("label_smoothing", label_smoothing, at_least=0, at_most=0.5)
