"""A run in words: one line that fits, a curve, and a summary."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.runs import Run
from leyden.runs.display import first_line, sparkline


def test_a_curve_rises_where_the_values_rise() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█", "each character is a mean"
    assert sparkline([1.0, None, math.nan, 2.0], 4) == "▁  █"
    assert sparkline([0.5] * 5, 10) == "▄▄▄▄▄"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert sparkline([None, math.inf], 10) == "  "


@given(st.lists(st.floats() | st.none(), max_size=50), st.integers(0, 20))
def test_a_curve_fits_and_takes_any_numbers(values: list[float | None], width: int) -> None:
    curve = sparkline(values, width)
    assert len(curve) == min(len(values), width)
    assert set(curve) <= set(" ▁▂▃▄▅▆▇█")


CONFIG: dict[str, Any] = {
    "algorithm": {
        "name": "leyden.algorithm.policy_gradient.algorithm.PolicyGradient",
        "options": {"tasks_per_step": 8, "rollouts_per_task": 16},
    },
    "model": {"name": "/models/tiny-model", "digest": None, "n_weights": 117_312},
    "data": {"train": {"length": 32, "digest": None}, "val": None},
}
RUN = Run("ab12cd34", Path(".leyden/20261122-101500-ab12"))


def test_the_first_line_says_what_a_run_is_about_in_the_room_that_there_is() -> None:
    assert first_line(RUN, CONFIG, width=120) == (
        "run 20261122-101500-ab12 | PolicyGradient on tiny-model (117k weights) | 32 tasks, 8 x 16 rollouts a step"
    )
    assert first_line(RUN, CONFIG, width=84) == (
        "run 20261122-101500-ab12 | PolicyGradient on tiny-model (117k weights) | 32 tasks"
    )
    assert first_line(RUN, CONFIG, width=60) == "run 20261122-101500-ab12 | PolicyGradient on tiny-model"
    assert first_line(Run("dev"), {}, width=60) == "run"


@pytest.mark.parametrize("width", range(1, 130, 7))
def test_the_first_line_is_one_line_of_any_width(width: int) -> None:
    line = first_line(RUN, {**CONFIG, "model": {"name": "two\nlines\x1b[31m"}}, width=width)
    assert len(line) <= width and line.isprintable()
