"""Charts: every point is at its place, whatever the numbers."""

from __future__ import annotations

import math
import random
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.training.runs.chart import Series, draw_svg, draw_text, sparkline, ticks


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


HUGE, TINY = sys.float_info.max, 5e-324


@pytest.mark.parametrize(
    "values",
    [
        (1e308, -1e308),
        (HUGE, -HUGE, 0.0),
        (HUGE, HUGE),
        (-HUGE,),
        (TINY, 2 * TINY),
        (TINY, TINY),
        (0.0, TINY),
        (1e-310, 3e-310, 2e-310),
        (1.0, math.nextafter(1.0, 2.0)),
        (0.0, 0.0),
        (1.0, math.nan, math.inf, -math.inf, 2.0),
        (1e15, 1e15 + 1),
    ],
)
def test_numbers_of_any_size_are_drawn(values: tuple[float, ...]) -> None:
    one = Series("a", tuple(range(len(values))), values)
    for both in ([one], [one, Series("b", (0,), (values[0],))]):
        lines = draw_text(both, width=40, height=5)
        assert max(map(len, lines)) <= 40
        drawn = "".join(lines)
        assert "nan" not in drawn and "inf" not in drawn
        svg = draw_svg(both, title="t")
        ElementTree.fromstring(svg)
        assert "nan" not in svg and "inf" not in svg
    finite = [value for value in values if math.isfinite(value)]
    marks = sparkline(values, 10).replace(" ", "")
    assert len(marks) == len(finite)
    if max(finite) == HUGE and min(finite) == -HUGE:
        assert (marks[0], marks[1]) == ("█", "▁")


@given(st.lists(st.floats(), min_size=1, max_size=8).filter(lambda values: any(map(math.isfinite, values))))
def test_any_floats_are_drawn(values: list[float]) -> None:
    assert len(draw_text([series(values)], width=40, height=5)) == 7
    ElementTree.fromstring(draw_svg([series(values)], title="t"))
