"""Numbers for people: significant digits, never a zero that is none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden._lib.formatting import duration, figure, harmless, one_line, shortened


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(0.53125, "0.5312"), (91.234567, "91.23"), (7.0, "7"), (-0.5, "-0.5"), (0.99996, "1")],
        *[(0.001, "0.001"), (1e-4, "1e-04"), (-0.00001234567, "-1.235e-05"), (0.0, "0"), (-0.0, "0")],
        *[(1234567, "1,234,567"), (1234.5678, "1,235"), (999.96, "1,000"), (2.5e15, "2.5e+15")],
        *[(math.nan, "nan"), (-math.inf, "-inf"), (True, "1"), ("so\x1b[31mso\n", "so [31mso ")],
    ],
)
def test_a_figure_has_significant_digits(value: float | str, shown: str) -> None:
    assert figure(value) == shown


@given(st.floats(-1e300, 1e300), st.integers(1, 6))
def test_a_figure_is_the_number_to_its_digits_and_short(value: float, digits: int) -> None:
    shown = figure(value, digits)
    assert float(shown.replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits), abs=0)
    assert len(shown) <= 17


def test_durations_and_texts_are_short() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]
    assert one_line("a\nb\tc") == "a b c"
    assert [shortened("abcdef", width) for width in (6, 5, 1)] == ["abcdef", "abcd…", "…"]
    assert harmless("a\n\tb\x1b[2J\x9b1m 日本\u3000語 👩\u200d🚀") == "a\n\tb�[2J�1m 日本\u3000語 👩\u200d🚀"
