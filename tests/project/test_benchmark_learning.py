"""What the benchmark of learning says about curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rl_learning import costs, first, learned, mean_of, value_at

CURVE = [[2000, 20.0], [4100, 300.0], [6000, 480.0], [8100, 470.0]]


@given(st.integers(0, 10_000))
def test_between_evaluations_a_curve_is_straight_and_level_outside(steps):
    assert value_at(CURVE, steps) == pytest.approx(np.interp(steps, *np.transpose(CURVE)))


def test_the_mean_of_a_curve_is_taken_at_the_same_steps_for_every_side():
    assert mean_of(CURVE, 8000, 2000) == pytest.approx(np.interp([2000, 4000, 6000, 8000], *np.transpose(CURVE)).mean())


def test_the_first_evaluation_that_reaches_the_aim_counts():
    assert (first(CURVE, 475.0), first(CURVE, 300.0), first(CURVE, 481.0)) == (6000, 4100, None)


def test_the_table_says_how_many_runs_came_to_the_aim_and_the_row_what_a_cpu_second_brings():
    low = [[steps, reward / 2] for steps, reward in CURVE]
    run = {"steps": 8000, "iteration": 2000, "cpu_s": 2.0}
    runs = [{**run, "curve": CURVE}] * 3 + [{**run, "curve": low}] * 2
    assert learned({"CartPole-v1": {"leyden": runs}}).rows[0][3:] == ["3 of 5", "6,000 (6,000 to 6,000)"]
    alone = costs("CartPole-v1", {"leyden": runs})
    assert (alone.leyden, alone.peer, alone.n) == (4050.0, None, 5)
