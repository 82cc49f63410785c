"""Charts: every point is at its place, whatever the numbers."""

from __future__ import annotations

import math
import random

import pytest

from leyden.errors import ConfigError
from leyden.runs.chart import Series, draw_svg, draw_text, sparkline, ticks


def series(values: list[float]) -> Series:
    return Series("train", tuple(range(1, len(values) + 1)), tuple(values))


@pytest.mark.parametrize("seed", range(12))
def test_a_chart_fits_its_width_and_height(seed: int) -> None:
    numbers = random.Random(seed)
    values = [numbers.uniform(-1, 1) * 10 ** numbers.randint(-8, 9) for _ in range(numbers.randint(1, 40))]
    width, height = numbers.randint(30, 120), numbers.randint(3, 20)
    lines = draw_text([series(values)], width=width, height=height)
    assert len(lines) == height + 2
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("seed", range(12))
def test_ticks_are_inside_and_few(seed: int) -> None:
    numbers = random.Random(seed)
    low, width = numbers.uniform(-1e6, 1e6), 10 ** numbers.uniform(-3, 6)
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-6 * width <= each <= low + width * (1 + 1e-6) for each in found)


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = draw_text([series([0.0, 1.0])], width=40, height=4)
    drawn = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[:4]]
    starts = [len(line) - len(line.lstrip()) for line in drawn]
    assert starts == sorted(starts, reverse=True)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    assert draw_text([series([math.nan, 1.0, math.inf, 2.0])])[0].startswith("   2 ┤")
    with pytest.raises(ConfigError, match="no finite value"):
        draw_text([series([math.nan])])


def test_names_are_escaped_in_svg() -> None:
    assert "a &lt;b&gt; &amp; c" in draw_svg([Series("a <b> & c", (1,), (1.0,))], title="x")


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ([], 8, ""),
        ([0.5, 0.5], 8, "▄▄"),
        ([0.0, 1.0], 8, "▁█"),
        ([float(number) for number in range(16)], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, math.nan, 1.0], 8, "▁ █"),
    ],
)
def test_a_sparkline_shows_the_shape(values: list[float], width: int, shown: str) -> None:
    assert sparkline(values, width) == shown
