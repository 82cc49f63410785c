"""Detect a drop of a mean below a reference, at an unknown time, with an e-detector.

A Shiryaev-Roberts e-detector sums, over every possible time of the change, the capital of a bet that begins there.
While the mean stays at or above the reference, the expected number of observations until the detector exceeds c is at
least c. An alarm at c = 10,000 is therefore false once in 10,000 observations at most, on average.

Source: Shin, Ramdas and Rinaldo, arXiv:2203.03532 (Shiryaev-Roberts e-detectors and their mixtures).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.statistics.difference import FRACTIONS, STAKES, average_log_e


@dataclass(frozen=True, slots=True)
class ChangeEvidence:
    """Evidence that a mean has dropped below the reference."""

    log_sums: tuple[float, ...] = (-math.inf,) * len(FRACTIONS)
    """Logarithm of the detector of each bet of `FRACTIONS`; each starts with 0."""
    count: int = 0
    """Observations so far."""

    @property
    def log_e(self) -> float:
        """Logarithm of the detector, the mean over the bets weighted by `STAKES`. Raise an alarm when it exceeds
        log(c), for one false alarm in c observations at most.
        """
        return average_log_e(self.log_sums, STAKES)


def observe_change(evidence: ChangeEvidence, *, value: float, reference: float) -> ChangeEvidence:
    """Return the evidence after one value: each detector R becomes `(R + 1) * (1 + bet * (reference - value))`.

    Each detector's bet is its fraction of 1 / (1 - reference), the largest bet that keeps the factor at or above 0.
    value: in [0, 1].
    reference: in (0, 1), the smallest mean that is acceptable.
    Raise ConfigError for a number out of its range.
    """
    check_number("value", value, at_least=0, at_most=1)
    if not 0 < reference < 1:
        raise ConfigError(f"reference is {reference!r}; a mean can drop below it only if it is between 0 and 1")
    gain = (reference - value) / (1 - reference)
    log_sums = tuple(
        _log_plus_one(log_sum) + math.log1p(fraction * gain)
        for log_sum, fraction in zip(evidence.log_sums, FRACTIONS, strict=True)
    )
    return ChangeEvidence(log_sums, evidence.count + 1)


def _log_plus_one(log_value: float) -> float:
    """Return log(exp(log_value) + 1) without overflow."""
    return max(log_value, 0.0) + math.log1p(math.exp(-abs(log_value)))
