"""A betting e-process on the share of the treated arm, which finds a *sample ratio mismatch*.

A comparison of arms is exact only if requests are assigned with the probability that it assumes. A wrong setting, a
cache or lost records of one arm change the share of observed requests.

Source: the capital process of `leyden.statistics.difference`, with the indicator of the arm as the value. Lindon and
Malek, arXiv:2011.03567, test counts of assignments sequentially for the same purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leyden.errors import ConfigError
from leyden.statistics.difference import FRACTIONS, STAKES, average_log_e


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
