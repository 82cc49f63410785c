"""Estimate KL(policy || reference) from the log-probabilities of sampled tokens.

The estimators are Schulman's k1, k2 and k3 (http://joschu.net/blog/kl-approx.html), as functions of the difference
d = logp - reference logp of each token that the policy drew. In expectation, k1 and k3 equal the divergence. k2 is only
close to it, but its gradient is the divergence's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from leyden._lib.options import check_choice
from leyden.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

D = TypeVar("D", float, "Tensor")
"""One difference, or a tensor of them."""


def k1(difference: D) -> D:
    """Return d, an estimate without bias. It is negative for many tokens, up to about half."""
    return difference


def k2(difference: D) -> D:
    """Return d^2 / 2, a biased estimate that is never negative and has the divergence's gradient."""
    return difference * difference / 2


def k3(difference: D) -> D:
    """Return exp(-d) - 1 + d, an estimate without bias that is never negative (GRPO, arXiv:2402.03300, eq. 4)."""
    opposite: Any = -difference
    ratio_less_1 = math.expm1(opposite) if isinstance(difference, float) else opposite.expm1()
    return cast(D, ratio_less_1 + difference)


KL_ESTIMATORS: Mapping[str, Callable[[Any], Any]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators by name."""


def reward_penalty(
    logprobs_T: Sequence[float], reference_logprobs_T: Sequence[float], *, coefficient: float, estimator: str = "k1"
) -> float:
    """Return the KL penalty that is subtracted from the reward of one rollout.

    It is coefficient * the sum of the estimates over the T tokens that the policy drew in the rollout (PPO for language
    models, arXiv:1909.08593, eq. 2, with k1).

    logprobs_T: log-probabilities under the policy that drew the tokens.
    Raise ConfigError for an unknown estimator, and for lists of unequal length.
    """
    check_choice("kl_estimator", estimator, KL_ESTIMATORS)
    if len(logprobs_T) != len(reference_logprobs_T):
        raise ConfigError(
            f"{len(logprobs_T)} logprobs and {len(reference_logprobs_T)} reference_logprobs; they must have the same length"
        )
    estimate = KL_ESTIMATORS[estimator]
    differences = (float(a) - float(b) for a, b in zip(logprobs_T, reference_logprobs_T, strict=True))
    return coefficient * math.fsum(estimate(difference) for difference in differences)
