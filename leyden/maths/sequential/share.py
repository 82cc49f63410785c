"""A betting e-process on the share of the treated arm itself (a *sample ratio mismatch*).

A comparison of arms is exact only if requests are assigned with the probability that it assumes. A
wrong setting, a cache or lost records of one arm change the share, and this test finds it.

Source: the same capital process as in `difference`, on the indicator of the arm. Lindon and Malek,
arXiv:2011.03567, test counts of assignments sequentially for the same purpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leyden.errors import ConfigError
from leyden.maths.sequential.difference import FRACTIONS, STAKES, average_log_e


@dataclass(frozen=True, slots=True)
class ShareEvidence:
    """Evidence that the treated arm has another share than assumed."""

    log_capitals: tuple[float, ...] = (0.0,) * (2 * len(FRACTIONS))
    """Logarithm of each bet's capital: on a larger share by each of `FRACTIONS`,
    then on a smaller one."""
    peak: float = 0.0
    """Largest logarithm so far of the e-process, the mean of the capitals weighted by `STAKES`."""


def observe_share(evidence: ShareEvidence, *, treated: bool, share: float) -> ShareEvidence:
    """Return the evidence after one request that was assigned with the probability
    `share`, in (0, 1).

    A bet on a larger share multiplies its capital by 1 + fraction (treated - share) / share,
    one on a smaller share by 1 + fraction (share - treated) / (1 - share). Raise ConfigError
    for another share.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share is {share!r}; a comparison needs a probability between 0 and 1, both excluded")
    larger, smaller = (treated - share) / share, (share - treated) / (1 - share)
    gains = [fraction * larger for fraction in FRACTIONS] + [fraction * smaller for fraction in FRACTIONS]
    log_capitals = tuple([old + math.log1p(gain) for old, gain in zip(evidence.log_capitals, gains, strict=True)])
    return ShareEvidence(log_capitals, max(evidence.peak, average_log_e(log_capitals, STAKES + STAKES)))
