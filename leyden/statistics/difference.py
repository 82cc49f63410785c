"""A betting e-process on the difference of two means, under randomisation with known shares.

Each observation is a request whose arm was drawn with a known probability (the *share* of the treated arm), with a
value in [0, 1]. The bets are on the inverse-propensity weighted difference, which is an unbiased estimate of
mean(treated) - mean(control) from that one request. Therefore the test stays exact with unequal and changing shares,
and with a drift that both arms have.

That holds only if requests are assigned with the probability that is assumed. A wrong setting, a cache or lost records
of one arm change the share of observed requests, a *sample ratio mismatch*. `observe_share` finds it by the same
capital process, with the indicator of the arm as the value.

Sources: capital processes for bounded means and a grid of bets, Waudby-Smith and Ramdas, arXiv:2010.09686, section 4;
the weighted difference with a predictable centre (doubly robust pseudo-outcome), Waudby-Smith et al., arXiv:2210.10768;
averages of e-values, Vovk and Wang, arXiv:1912.06116, section 3; sequential tests of counts of assignments, Lindon and
Malek, arXiv:2011.03567.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leyden.errors import ConfigError

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Bets, as fractions of the largest bet that cannot lose more than the capital. Large bets find large differences
within tens of requests, small ones small differences.
"""
STAKES = tuple(1 / place for place in range(1, len(FRACTIONS) + 1))
"""The parts of the starting capital for each fraction, relative to each other.

The largest bet gets 41 % and the smallest 7 %. So the mean of all capitals is below that of the best single bet by at
most a factor of 2.5 for large differences and 15 for small ones.
"""
_PRIOR_COUNT = 1.0
"""Weight of the assumed mean 0.5 in the centre, in observations."""


@dataclass(frozen=True, slots=True)
class ArmTotals:
    """Count and sum of the values of one arm."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def plus(self, value: float) -> ArmTotals:
        return ArmTotals(self.count + 1, self.total + value)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence against the hypothesis that mean(treated) - mean(control) <= margin."""

    log_capitals: tuple[float, ...] = (0.0,) * len(FRACTIONS)
    """Logarithm of the capital of each bet of `FRACTIONS`; each starts with 1."""
    log_e: float = 0.0
    """The logarithm of the e-process, which is the mean of the capitals, weighted by `STAKES`."""
    peak: float = 0.0
    """Largest `log_e` so far. By Ville's inequality it exceeds log(1 / error) with a probability of at most `error`."""
    treated: ArmTotals = ArmTotals()
    control: ArmTotals = ArmTotals()


def observe_difference(
    evidence: Evidence, *, treated: bool, value: float, share: float, margin: float = 0.0
) -> Evidence:
    """Return the evidence after one request: each capital is multiplied by `1 + bet * (d - margin)`.

    d is `weighted_difference`, and bet is a fraction of the largest value that keeps the factor at or above 0 for every
    arm and every value in [0, 1]. Centre and bet depend on earlier requests alone, which makes the capital a
    supermartingale if mean(treated) - mean(control) <= margin.

    value: in [0, 1]. To test that the treated arm is *worse*, pass 1 - value.
    share: probability, known before the request, that it was assigned to the treated arm; in (0, 1).
    margin: in (-1, 1). -0.02 tests "worse by 0.02 or more" as the null hypothesis (non-inferiority).
    Raise ConfigError for a number out of its range.
    """
    if not 0 <= value <= 1:
        raise ConfigError(f"value is {value!r}; scale values to the range from 0 to 1 before they are compared")
    if not 0 < share < 1:
        raise ConfigError(
            f"share is {share!r}; a comparison needs a probability between 0 and 1, both excluded, of either arm"
        )
    if not -1 < margin < 1:
        raise ConfigError(f"margin is {margin!r}; differences of values in [0, 1] are above -1 and below 1")
    centre = _centre(evidence, share)
    gain = weighted_difference(treated=treated, value=value, share=share, centre=centre) - margin
    largest_bet = 1 / (max(centre / share, (1 - centre) / (1 - share)) + margin)
    # tuple([...]) is faster than tuple(...) of a generator, and this runs for every request.
    log_capitals = tuple(
        [
            log_capital + math.log1p(fraction * largest_bet * gain)
            for log_capital, fraction in zip(evidence.log_capitals, FRACTIONS, strict=True)
        ]
    )
    log_e = average_log_e(log_capitals, STAKES)
    return Evidence(
        log_capitals=log_capitals,
        log_e=log_e,
        peak=max(evidence.peak, log_e),
        treated=evidence.treated.plus(value) if treated else evidence.treated,
        control=evidence.control if treated else evidence.control.plus(value),
    )


def weighted_difference(*, treated: bool, value: float, share: float, centre: float) -> float:
    """Return an unbiased estimate of mean(treated) - mean(control) from one request.

    It is (value - centre) / share for a treated request and -(value - centre) / (1 - share) for one of the control arm.
    For every centre its expectation over the draw of the arm is the difference of the means; the centre reduces its
    variance.
    """
    return (value - centre) / share if treated else -(value - centre) / (1 - share)


def average_log_e(log_values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the logarithm of the weighted mean of e-values.

    The mean of e-processes with fixed weights is an e-process, whatever their dependence, so it combines the evidence
    of several metrics or bets (arXiv:1912.06116, section 3).

    log_values: the logarithms of the e-values, at least one.
    weights: positive numbers, which are scaled to a sum of 1; None: equal weights.
    """
    largest = max(log_values)
    if largest == -math.inf:
        return largest
    if weights is None:
        return largest + math.log(sum([math.exp(each - largest) for each in log_values]) / len(log_values))
    weighted = sum([weight * math.exp(each - largest) for each, weight in zip(log_values, weights, strict=True)])
    return largest + math.log(weighted / sum(weights))


def _centre(evidence: Evidence, share: float) -> float:
    """Return the centre with the smallest variance for the means so far: (1 - share) treated + share control."""
    treated, control = evidence.treated, evidence.control
    treated_mean = (treated.total + 0.5 * _PRIOR_COUNT) / (treated.count + _PRIOR_COUNT)
    control_mean = (control.total + 0.5 * _PRIOR_COUNT) / (control.count + _PRIOR_COUNT)
    return (1 - share) * treated_mean + share * control_mean


# ---- the share of the treated arm ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShareEvidence:
    """Evidence that the treated arm has a different share than assumed."""

    log_capitals: tuple[float, ...] = (0.0,) * (2 * len(FRACTIONS))
    """Logarithms of the capitals of bets on a larger share, one for each of `FRACTIONS`, then of bets on a smaller
    share."""
    peak: float = 0.0
    """Largest logarithm so far of the e-process, the mean of the capitals weighted by `STAKES`."""


def observe_share(evidence: ShareEvidence, *, treated: bool, share: float) -> ShareEvidence:
    """Return the evidence after one request.

    A bet on a larger share multiplies its capital by 1 + fraction (treated - share) / share, one on a smaller share by
    1 + fraction (share - treated) / (1 - share).
    treated: whether the request was assigned to the treated arm.
    share: the assumed probability of that, in (0, 1). Raise ConfigError for another number.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share is {share!r}; a comparison needs a probability between 0 and 1, both excluded")
    larger, smaller = (treated - share) / share, (share - treated) / (1 - share)
    gains = [fraction * larger for fraction in FRACTIONS] + [fraction * smaller for fraction in FRACTIONS]
    log_capitals = tuple([old + math.log1p(gain) for old, gain in zip(evidence.log_capitals, gains, strict=True)])
    return ShareEvidence(log_capitals, max(evidence.peak, average_log_e(log_capitals, STAKES + STAKES)))
