"""A betting e-process on the mean of a finite population that is drawn without replacement.

A validation set is such a population: its tasks are measured in random order, at most once each. The bets are that the
mean is below 0. If the hypothesis holds, the values that are left must make up for those that were seen. So the test
ends sooner than one for unlimited draws, and it is certain after the last value.

Sources: Waudby-Smith and Ramdas, Confidence sequences for sampling without replacement, arXiv:2006.04347; bets by
capital processes, the same authors, arXiv:2010.09686, section 5; Ville's inequality, 1939.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.statistics.difference import average_log_e

BETS = (0.9, 0.6, 0.3, 0.1)
"""Bets, as fractions of the largest one that cannot lose more than the capital. They are larger than those of
`difference`, because a population of some tens of values leaves no time for small ones."""


@dataclass(frozen=True, slots=True)
class ShortfallEvidence:
    """Evidence against the hypothesis that the mean of a population is at least 0."""

    log_capitals: tuple[float, ...] = (0.0,) * len(BETS)
    """Logarithm of the capital of each bet of `BETS`; each starts with 1."""
    peak: float = 0.0
    """Largest `log_e` so far. It exceeds log(1 / error) with a probability of at most `error`."""
    count: int = 0
    """The number of values so far."""
    total: float = 0.0
    """Sum of the values so far."""

    @property
    def log_e(self) -> float:
        """The logarithm of the e-process, which is the mean of the capitals.

        Infinite if the mean is certainly below 0.
        """
        return math.inf if math.inf in self.log_capitals else average_log_e(self.log_capitals)

    def refutes(self, error: float) -> bool:
        """Return whether the hypothesis is refuted. If it holds, this is True with a probability of at most `error`."""
        return self.peak >= -math.log(error)


def observe_shortfall(
    evidence: ShortfallEvidence, value: float, *, population: int, bound: float = 1.0
) -> ShortfallEvidence:
    """Return the evidence after one more value: each capital is multiplied by `1 + bet * (m - value)`.

    m is the smallest mean that the values to come, this one included, can have if the hypothesis
    holds: `-total / (population - count)`. The bet is a fraction of the largest one that cannot lose more than the
    capital. So every capital is a supermartingale under the hypothesis, if the order of the values is random.

    value: in [-bound, bound].
    population: the number of values in all.
    Raise ConfigError for a number out of its range, and for more values than the population has.
    """
    check_number("value", value, at_least=-bound, at_most=bound)
    left = population - evidence.count
    if left < 1:
        raise ConfigError(f"population is {population}, and all of its values were observed")
    mean_left = -evidence.total / left
    total = evidence.total + value
    if total + bound * (left - 1) < 0:  # the mean is below 0 whatever the values to come are
        log_capitals = (math.inf,) * len(BETS)
    elif mean_left < bound:
        largest_bet = 1 / (bound - mean_left)
        log_capitals = tuple(
            log_capital + math.log1p(fraction * largest_bet * (mean_left - value))
            for log_capital, fraction in zip(evidence.log_capitals, BETS, strict=True)
        )
    else:  # the hypothesis needs the largest value each time, and this value was the largest
        log_capitals = evidence.log_capitals
    after = ShortfallEvidence(log_capitals, evidence.peak, evidence.count + 1, total)
    return replace(after, peak=max(evidence.peak, after.log_e))
