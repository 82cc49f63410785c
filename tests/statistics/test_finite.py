"""The race against a finite population: never more than its error, and certain at the end."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from leyden.errors import ConfigError
from leyden.statistics import ShortfallEvidence, observe_shortfall


def evidence_of(values: Sequence[float], *, population: int, bound: float = 1.0) -> ShortfallEvidence:
    evidence = ShortfallEvidence()
    for value in values:
        evidence = observe_shortfall(evidence, value, population=population, bound=bound)
    return evidence


@pytest.mark.parametrize(
    "values", [(-1, -1, 0, 1, 1), (0, 0, 0, 0, 0), (-1, -0.5, 0.25, 0.25, 1), (1, 1, 1, -1, -1), (-1, 1, -1, 1)]
)
def test_the_expectation_over_all_orders_is_at_most_1_at_every_time_if_the_mean_is_0_or_more(
    values: tuple[float, ...],
) -> None:
    orders = list(itertools.permutations(values))
    for length in range(1, len(values) + 1):
        e_values = [math.exp(evidence_of(order[:length], population=len(values)).log_e) for order in orders]
        assert math.fsum(e_values) / len(orders) <= 1 + 1e-9


def test_a_candidate_as_good_as_the_best_is_stopped_at_most_as_often_as_the_error_says() -> None:
    n_runs, population, error = 600, 40, 0.05
    stopped = 0
    for run in range(n_runs):
        chance = random.Random(run)
        values = [1.0] * 8 + [-1.0] * 8 + [0.0] * (population - 16)
        chance.shuffle(values)
        stopped += evidence_of(values, population=population).refutes(error)
    assert stopped / n_runs <= error


def test_a_much_worse_candidate_is_stopped_long_before_the_end() -> None:
    chance, population, needed = random.Random(1), 50, []
    for _ in range(100):
        values = [-1.0] * 30 + [0.0] * 20
        chance.shuffle(values)
        evidence = ShortfallEvidence()
        for value in values:
            evidence = observe_shortfall(evidence, value, population=population)
            if evidence.refutes(0.05):
                break
        needed.append(evidence.count)
    assert sorted(needed)[50] <= 12


def test_the_end_is_certain() -> None:
    assert evidence_of([1.0, -1.0, -0.5], population=3).log_e == math.inf
    assert not evidence_of([1.0, -1.0, 0.0], population=3).refutes(0.05)
    assert evidence_of([-1.0, -1.0], population=3).log_e == math.inf, "one value cannot make up for two"
    with pytest.raises(ConfigError, match="all of its values were observed"):
        evidence_of([0.0, 0.0], population=1)
    with pytest.raises(ConfigError, match="value is 2"):
        evidence_of([2.0], population=2)
