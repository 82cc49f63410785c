"""Intervals of differences: the same in both directions, and as wide as an independent formula says."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from leyden.statistics import Sample, estimate, paired_difference, unpaired_difference


@pytest.mark.parametrize("seed", range(3))
def test_a_paired_difference_is_the_same_in_both_directions(seed: int) -> None:
    numbers = random.Random(seed)
    before, after = ([numbers.choice([0.0, 0.5, 1.0]) for _ in range(20)] for _ in range(2))
    one, other = paired_difference(before, after), paired_difference(after, before)
    assert (one.mean, one.method) == (-other.mean, other.method)
    assert one.low is not None and one.high is not None and other.high is not None and other.low is not None
    assert (one.low, one.high) == (-other.high, -other.low)
    assert one.low <= one.mean <= one.high


def test_a_task_that_was_only_lost_is_no_certainty() -> None:
    lost = paired_difference([1.0] * 4, [0.0] * 4)
    assert lost.mean == -1.0 and lost.low == -1.0 and lost.high is not None and lost.high > -0.6
    won = estimate([[1.0]] * 4)
    assert won.low is not None and lost.high == -won.low


def test_an_unpaired_difference_of_many_values_is_that_of_the_normal_distribution() -> None:
    numbers = random.Random(0)
    before, after = ([numbers.gauss(mean, 2.0) for _ in range(4000)] for mean in (1.0, 1.5))
    found = unpaired_difference(Sample(before), Sample(after))
    error = math.sqrt(statistics.variance(before) / 4000 + statistics.variance(after) / 4000)
    assert found.method == "Welch" and found.low is not None and found.high is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.001)
    assert unpaired_difference(Sample([1.0, 2.0]), Sample([3.0])).low is None
