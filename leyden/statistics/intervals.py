"""Confidence intervals of means and of their differences, for data that is looked at once.

The intervals hold for numbers that were all collected before they are read. For numbers that are read as they come, use
the sequential tests beside this module.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of

_RESAMPLES = 2000
"""Resamples of the bootstrap for one interval."""
_CONFIDENCE = 0.95
_MAX_TIMES = 10
"""With n simultaneous intervals, each has n times as many resamples, but at most this many times."""
_Z = statistics.NormalDist().inv_cdf(0.975)
"""The 0.975 quantile of the normal distribution, for 95 % intervals."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float | None
    """Lower end of the interval; None for a single task, which shows no spread."""
    high: float | None
    method: str
    """How the interval was computed: `Wilson`, `bootstrap`, or `none`."""

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{figure(self.mean, 3)} (one task: no interval)"
        interval = f"{figure(self.low, 3)} to {figure(self.high, 3)}"
        return f"{figure(self.mean, 3)} (95 % interval {interval}, {self.method} over tasks)"


def estimate(rewards: Sequence[Sequence[float]], *, n_compared: int = 1) -> Estimate:
    """Return the mean over tasks of each task's mean reward, with a 95 % confidence interval.

    rewards: for each task its rewards, at least one; at least one task.
    n_compared: how many means are estimated together. All of their intervals hold at once with a probability of 95 %
        (Bonferroni).

    The tasks are the sample, because rollouts of one task are not independent. If each task has one reward of 0 or 1,
    the interval is Wilson's, which also holds near 0 and 1. Otherwise it is the percentile bootstrap over tasks with a
    fixed seed, with 2,000 resamples for each of at most ten means. A single task has no interval.
    """
    means = [mean_of(of_task) for of_task in rewards]
    mean, n = mean_of(means), len(means)
    if n == 1:
        return Estimate(mean, None, None, "none")
    outside = (1 - _CONFIDENCE) / n_compared
    if all(len(of_task) == 1 and of_task[0] in (0.0, 1.0) for of_task in rewards):
        return Estimate(mean, *wilson_interval(mean, n, confidence=1 - outside), "Wilson")
    numbers, resamples = random.Random(0), _RESAMPLES * min(n_compared, _MAX_TIMES)
    resampled = sorted(mean_of(numbers.choices(means, k=n)) for _ in range(resamples))
    cut = round(outside / 2 * resamples)
    return Estimate(mean, resampled[cut], resampled[-cut - 1], "bootstrap")


def wilson_interval(mean: float, n: int, *, confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's confidence interval of a proportion.

    mean: the mean of `n` values, each 0 or 1.
    """
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return 0.0 if mean == 0.0 else max(0.0, centre - half), 1.0 if mean == 1.0 else min(1.0, centre + half)


# ---- differences ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of which the mean is compared with that of other ones."""

    values: list[float]
    exact: bool = False
    """Whether the mean is known exactly."""

    @property
    def mean(self) -> float:
        return mean_of(self.values)

    @property
    def squared_error(self) -> float:
        """The squared standard error of the mean; 0 if it is exact."""
        return 0.0 if self.exact else statistics.variance(self.values) / len(self.values)

    def proportion(self) -> tuple[float, float]:
        """Return the 95 % interval of the mean of values that are all 0 or 1."""
        return (self.mean, self.mean) if self.exact else wilson_interval(self.mean, len(self.values))


def unpaired_difference(before: Sample, after: Sample) -> Estimate:
    """Return mean(after) - mean(before) of two independent samples, with a 95 % confidence interval.

    If all values are 0 or 1, the interval is Newcombe's of a difference of proportions (Statistics in Medicine 17,
    1998, method 10), which also holds for few values. Otherwise it is Welch's, which needs three values on each side,
    unless its mean is exact. There is none with fewer, and it has the width 0 if the values of each side are all equal.
    """
    mean = after.mean - before.mean
    if all(value in (0.0, 1.0) for side in (before, after) for value in side.values):
        (low_0, high_0), (low_1, high_1) = before.proportion(), after.proportion()
        low = mean - math.hypot(after.mean - low_1, high_0 - before.mean)
        high = mean + math.hypot(high_1 - after.mean, before.mean - low_0)
        return Estimate(mean, low, high, "Newcombe")
    if any(len(side.values) < 3 and not side.exact for side in (before, after)):
        return Estimate(mean, None, None, "none")
    half = _welch_half_width(before, after)
    return Estimate(mean, mean - half, mean + half, "Welch")


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean of after - before over the same tasks, at least one, with the interval of `estimate`.

    Pairs remove the tasks' difficulty from the difference.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if mean_of(differences) >= 0:
        return estimate([[each] for each in differences])
    found = estimate([[-each] for each in differences])  # so that the interval is the same in both directions
    low, high = (None if end is None else -end for end in (found.high, found.low))
    return Estimate(-found.mean, low, high, found.method)


def _welch_half_width(before: Sample, after: Sample) -> float:
    """Return half the width of Welch's 95 % interval of the difference of two means (Welch 1947). The degrees of
    freedom are Satterthwaite's; a side whose mean is exact adds no variance.
    """
    variance = before.squared_error + after.squared_error
    if variance == 0.0:
        return 0.0
    freedom = variance**2 / sum(
        side.squared_error**2 / (len(side.values) - 1) for side in (before, after) if not side.exact
    )
    return _t_quantile(freedom) * math.sqrt(variance)


def _t_quantile(freedom: float) -> float:
    """Return the 0.975 quantile of Student's t distribution (Abramowitz and Stegun, 26.7.5).

    freedom: the degrees of freedom. The result is 0.7 % too small for 2, and 0.1 % for 3.
    """
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
