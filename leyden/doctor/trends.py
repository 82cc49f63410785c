"""`levels`: a metric over windows of a run, each with the error of its mean, so that rules tell a change from noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden.doctor.evidence import Evidence
from leyden.training import Stage

_LONG, _SHORT = 5, 3
"""Steps in a window: of runs that have two long ones, and of shorter runs."""


@dataclass(frozen=True, slots=True)
class Level:
    """The mean of a metric over successive steps."""

    mean: float
    error: float
    """The standard error of the mean."""
    at: int
    """The iteration of the last of the steps."""

    def above(self, other: Level) -> float:
        """Return by how many standard errors this mean is above another."""
        return (self.mean - other.mean) / max(math.hypot(self.error, other.error), 1e-12)

    def __str__(self) -> str:
        return figure(self.mean, 3)


def levels(run: Evidence, name: str = "reward", stage: Stage = "train", *, window: int | None = None) -> list[Level]:
    """Return the level of each window of a metric; an empty list for a run that is shorter than two windows.

    window: steps; None: five, or three in a run of fewer than ten steps.

    The error of one step is the largest of three: what successive steps usually differ by, what the spread of its
    rewards makes likely, and one rollout's share of the range of rewards. Successive validations differ by what was
    learned between them, so the first counts for them only if they have no spread.
    """
    points = run.series(name, stage)
    n = window or (_LONG if len(points) >= 2 * _LONG else _SHORT)
    if len(points) < 2 * n:
        return []
    errors = [1e-9 * max(abs(value) for _, value in points)]
    if name == "reward":
        spread = [dict(run.series(each, stage)) for each in ("reward_std", "rollouts", "reward_min", "reward_max")]
        deviations, counts, low, high = ([by.get(at) for at, _ in points] for by in spread)
        known = [(d, c) for d, c in zip(deviations, counts, strict=True) if d is not None and c]
        if known:
            errors.append(math.sqrt(mean_of(d * d / c for d, c in known)))
            lows, highs = [each for each in low if each is not None], [each for each in high if each is not None]
            if lows and highs:
                errors.append((max(highs) - min(lows)) / min(c for _, c in known))
    if len(points) > _SHORT and (stage == "train" or len(errors) == 1):
        errors.append(1.4826 * median(abs(b - a) for (_, a), (_, b) in pairwise(points)) / math.sqrt(2))
    error = max(errors) / math.sqrt(n)
    return [
        Level(mean_of(value for _, value in points[end - n : end]), error, points[end - 1][0])
        for end in range(n, len(points) + 1)
    ]


def rose(found: Sequence[Level], errors: float = 3.0) -> bool:
    """Return whether a metric ends above its beginning by more than noise."""
    return len(found) > 1 and found[-1].above(found[0]) > errors


def best_of(found: Sequence[Level]) -> Level:
    return max(found, key=lambda each: each.mean)
