"""The clipped surrogate of PPO, with DAPO's asymmetric range and dual clipping, and an optional critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leyden._lib.options import check_number, named_options
from leyden.objectives.losses.critic import check_value_clip, value_errors
from leyden.objectives.losses.loss import LossTerms, TokenBatch, register_loss
from leyden.objectives.losses.policy import (
    PolicyLoss,
    clipped_surrogate,
    columns_in_use,
    policy_terms,
    proximal_logprobs,
)

if TYPE_CHECKING:
    from torch import Tensor


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class PPOLoss(PolicyLoss):
    """Constants of the loss `ppo`, the clipped surrogate objective. Raise ConfigError for one out of its range."""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low; at least 0."""
    clip_high: float = 0.28
    """The ratio is clipped above 1 + clip_high; at least 0. A bound that is wider than `clip_low` keeps exploration
    (DAPO, arXiv:2503.14476, section 3.1)."""
    dual_clip: float | None = None
    """With a negative advantage the objective is at least dual_clip * A, so that a large ratio does not dominate the
    step; above 1. None: no such bound."""
    value_coefficient: float = 0.0
    """Factor of the critic's squared error, which is subtracted from the objective; at least 0. Above 0, the columns
    `returns` and `values` and a backend with a value head are needed."""
    value_clip: float | None = None
    """How far a value may move from the one before the step (`clipped_value_loss`); above 0. None: no limit."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)  # super() does not work in a dataclass with slots
        check_number("clip_low", self.clip_low, at_least=0)
        check_number("clip_high", self.clip_high, at_least=0)
        check_number("dual_clip", self.dual_clip, above=1, or_none="no bound")
        check_number("value_coefficient", self.value_coefficient, at_least=0)
        check_value_clip(self.value_clip)

    @property
    def further_columns(self) -> tuple[str, ...]:
        critic = ("returns", "values") if self.value_coefficient else ()
        return columns_in_use(self) + critic

    @property
    def uses_values(self) -> bool:
        return self.value_coefficient > 0


@register_loss("ppo", PPOLoss, columns=("logprobs", "advantages"))
def ppo(batch: TokenBatch, constants: PPOLoss) -> LossTerms:
    """Return the terms of the objective min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where r is the ratio of
    probabilities and A the advantage (PPO, arXiv:1707.06347, eq. 7; DAPO, arXiv:2503.14476).

    With `dual_clip` and A < 0, it is the larger of that and dual_clip A (dual-clip PPO, arXiv:1912.09729, eq. 5). With
    `value_coefficient`, the critic's squared error is subtracted. `policy_terms` adds KL penalty, entropy and
    importance weights.

    Metrics in addition to those of `policy_terms`: `clip_fraction`, the share of ratios outside the clip range;
    `dual_clip_fraction`, the share of tokens at the bound of `dual_clip`; `value_error`, the squared error.
    """
    advantages_N = batch.columns["advantages"]
    surrogate = clipped_surrogate(
        batch.logprobs_N,
        proximal_logprobs(batch, constants),
        advantages_N,
        clip_low=constants.clip_low,
        clip_high=constants.clip_high,
    )
    objective_N = surrogate.objective_N
    sums: dict[str, Tensor] = {"clip_fraction": surrogate.n_clipped()}
    if constants.dual_clip is not None:
        bounded_N = (advantages_N < 0) & (objective_N < constants.dual_clip * advantages_N)
        objective_N = objective_N.where(~bounded_N, constants.dual_clip * advantages_N)
        sums["dual_clip_fraction"] = bounded_N.sum().float()
    terms = policy_terms(batch, constants, objective_N, sums)
    if not constants.value_coefficient:
        return terms
    errors_N = value_errors(batch, clip=constants.value_clip)
    return LossTerms(
        terms.objective_N - constants.value_coefficient * errors_N,
        sums={**terms.sums, "value_error": errors_N.detach().sum()},
        maxima=terms.maxima,
    )
