"""Means and deviations over rollouts. A rollout counts once, however many calls it made.

Shapes: R rollouts, C_r calls of rollout r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values_R: Sequence[float]) -> float:
    """Return the mean, exactly the common value if all values are equal."""
    return min(max(math.fsum(values_R) / len(values_R), min(values_R)), max(values_R))


def centred(values_R: Sequence[float]) -> list[float]:
    middle = mean(values_R)
    return [value - middle for value in values_R]


def deviation(values_R: Sequence[float], *, ddof: float) -> float:
    """Return the standard deviation, whose variance is a sum of squares divided by R - ddof."""
    return math.sqrt(math.fsum(value * value for value in centred(values_R)) / (len(values_R) - ddof))


def centre_and_variance(rows: Sequence[Sequence[float]], *, ddof: float) -> tuple[float, float]:
    """Return mean and variance of the numbers of all calls. Each rollout r has weight 1, each of its C_r calls 1 / C_r.

    rows: shape (R, C_r).
    ddof: the variance is multiplied by R / (R - ddof). If R <= ddof, ddof counts as 0.
    """
    n = len(rows)
    ddof = ddof if n > ddof else 0.0
    middle = mean([mean(row) for row in rows])
    squares = [mean([(value - middle) ** 2 for value in row]) for row in rows]
    return middle, math.fsum(squares) / (n - ddof)


def whitened(rows: Sequence[Sequence[float]], *, epsilon: float, ddof: float) -> list[list[float]]:
    """Return (x - mean) / sqrt(variance + epsilon) of each number x, with the moments of `centre_and_variance`."""
    middle, variance = centre_and_variance(rows, ddof=ddof)
    scale = math.sqrt(variance + epsilon)
    return [[(value - middle) / scale for value in row] for row in rows]
