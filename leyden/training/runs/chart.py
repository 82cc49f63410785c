"""Curves of runs: as text for a terminal, as SVG, and as PNG where matplotlib is installed.

It knows series of numbers, and neither runs nor their files. A series is drawn over its iterations; values that are not
finite are left out.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden.errors import ConfigError

_BLOCKS = "▁▂▃▄▅▆▇█"
"""The characters of a sparkline, from the lowest value to the highest."""
MARKERS = "●○▲△■□◆◇"
"""The characters that mark the first, second, ... series in a terminal."""
COLOURS = ("#4363d8", "#e6694f", "#2f9e6e", "#9a6bc9", "#c9992e", "#3aa6b9", "#d1589f", "#7a7a7a")
"""The colours of the series, in order, in a terminal and in files."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character by row and column of its 4 x 2 dots."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: N points in order of iterations."""

    name: str
    iterations: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """The ranges that all series share."""

    first: int
    last: int
    low: float
    high: float

    def across(self, iteration: float) -> float:
        return (iteration - self.first) / (self.last - self.first) if self.last > self.first else 0.5

    def up(self, value: float) -> float:
        return share(value, self.low, self.high) if self.high > self.low else 0.5


def draw_text(series: Sequence[Series], *, width: int = 80, height: int = 12) -> list[str]:
    """Return the lines of a chart with labelled axes.

    One series is drawn as a line of braille dots. Of several, each has a marker, which a legend names.
    width: columns in all; fewer than 30 are taken for 30.
    height: lines of the drawing, without axis and legend.
    Raise ConfigError if no series has a finite value.
    """
    series = _finite(series)
    frame = _frame(series)
    labelled = sorted({0, (height - 1) // 2, height - 1})
    labels = {row: figure(_at(frame.high, frame.low, row / max(1, height - 1)), 3) for row in labelled}
    margin = max(len(label) for label in labels.values())
    columns = max(10, max(30, width) - margin - 2)
    rows = _braille(series[0], frame, columns, height) if len(series) == 1 else _marks(series, frame, columns, height)
    lines = [
        f"{labels.get(number, ''):>{margin}} {'┤' if number in labels else '│'}{row}" for number, row in enumerate(rows)
    ]
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    lines.append(f"{'':>{margin}}  {_iteration_labels(frame, columns)}")
    if len(series) > 1:
        legend = [f"{_marker(number)} {each.name}" for number, each in enumerate(series)]
        is_long = len("   ".join(legend)) > columns
        lines += [f"{'':>{margin}}  {each}" for each in (legend if is_long else ["   ".join(legend)])]
    return [line.rstrip() for line in lines]


def _at(start: float, end: float, share: float) -> float:
    return start * (1 - share) + end * share  # the difference itself may be infinite


def _iteration_labels(frame: _Frame, columns: int) -> str:
    left, right = str(frame.first), str(frame.last)
    if frame.first == frame.last:
        return left.center(columns)
    middle = "iteration"
    space = columns - len(left) - len(right)
    return f"{left}{middle.center(space) if space >= len(middle) + 2 else ' ' * max(1, space)}{right}"


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def _braille(series: Series, frame: _Frame, columns: int, height: int) -> list[str]:
    """Return the lines of a chart of one series, in braille characters: 2 by 4 dots for each character."""
    wide, tall = 2 * columns, 4 * height
    cells = [[0] * columns for _ in range(height)]

    def dot(x: int, y: int) -> None:
        row = tall - 1 - y
        cells[row // 4][x // 2] |= _DOTS[row % 4][x % 2]

    points = [
        (round(frame.across(iteration) * (wide - 1)), round(frame.up(value) * (tall - 1)))
        for iteration, value in zip(series.iterations, series.values, strict=True)
    ]
    for (x, y), (next_x, next_y) in zip(points, [*points[1:], points[-1]], strict=True):
        steps = max(abs(next_x - x), abs(next_y - y), 1)
        for step in range(steps + 1):
            dot(round(_at(x, next_x, step / steps)), round(_at(y, next_y, step / steps)))
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def _marks(series: Sequence[Series], frame: _Frame, columns: int, height: int) -> list[str]:
    """Return the lines of a chart of several series: a marker at each value, and dots between.

    Where series overlap, the marker of the first one is shown, and no dot covers a marker.
    """
    cells = [[" "] * columns for _ in range(height)]
    for number, each in reversed(list(enumerate(series))):  # the first series is drawn last, above the others
        points = [
            (frame.across(iteration) * (columns - 1), (1 - frame.up(value)) * (height - 1))
            for iteration, value in zip(each.iterations, each.values, strict=True)
        ]
        for (x, y), (next_x, next_y) in itertools.pairwise(points):
            for column in range(round(x) + 1, round(next_x)):
                row = round(_at(y, next_y, (column - x) / (next_x - x)))
                if cells[row][column] == " ":
                    cells[row][column] = "·"
        for x, y in points:
            cells[round(y)][round(x)] = _marker(number)
    return ["".join(row) for row in cells]


# ---- files ---------------------------------------------------------------------------------------


def draw_file(series: Sequence[Series], path: Path, *, title: str) -> None:
    """Write the chart to an `.svg` or `.png` file.

    Raise ConfigError for another ending, for PNG without matplotlib, and without a finite value.
    """
    series = _finite(series)
    _frame(series)  # raises if there is nothing to draw
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--output is {str(path)!r}; its name must end in .svg or .png")
    try:
        if path.suffix == ".png":
            _write_png(series, path, title)
        else:
            path.write_text(draw_svg(series, title=title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def draw_svg(series: Sequence[Series], *, title: str, width: int = 720, height: int = 400) -> str:
    """Return the chart as an SVG document of this size in pixels."""
    series = _finite(series)
    frame = _frame(series)
    in_a_row = 3 if all(len(each.name) <= 28 for each in series) else 1  # a longer name would run into the next one
    left, right, top, bottom = 70, 20, 40, 44 + 20 * math.ceil(len(series) / in_a_row)

    def x(iteration: float) -> float:
        return left + frame.across(iteration) * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - frame.up(value) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for value in ticks(frame.low, frame.high):
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{figure(value, 3)}</text>')
    for iteration in sorted({round(value) for value in ticks(frame.first, frame.last)}):
        parts.append(f'<text x="{x(iteration):.1f}" y="{height - bottom + 18}" text-anchor="middle">{iteration}</text>')
    for number, each in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(i), y(value)) for i, value in zip(each.iterations, each.values, strict=True)]
        if len(points) == 1:
            parts.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>')
        else:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend_x, legend_y = left + (number % in_a_row) * 210, height - bottom + 42 + 20 * (number // in_a_row)
        parts.append(f'<rect x="{legend_x}" y="{legend_y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{legend_x + 20}" y="{legend_y - 3}">{escape(each.name)}</text>')
    return "\n".join([*parts[:2], '<g font-family="sans-serif" font-size="12">', *parts[2:], "</g>", "</svg>"]) + "\n"


def _write_png(series: Sequence[Series], path: Path, title: str) -> None:
    """Draw the series into a PNG file. Raise ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"--output {path}: PNG needs matplotlib (pip install matplotlib); an .svg file needs nothing"
        ) from None
    drawing: Any = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = drawing.add_subplot()
    for number, each in enumerate(series):
        marker = "o" if len(each.values) == 1 else None
        axes.plot(each.iterations, each.values, label=each.name, color=COLOURS[number % len(COLOURS)], marker=marker)
    axes.set_xlabel("iteration")
    axes.set_title(title, loc="left")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    drawing.savefig(path, dpi=150)


def share(value: float, low: float, high: float) -> float:
    """Return where a value lies between two others, from 0 to 1, also where their difference overflows a float."""
    if math.isfinite(high - low):
        return (value - low) / (high - low)
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def ticks(low: float, high: float, at_most: int = 6) -> list[float]:
    """Return round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = high / max(1, at_most - 1) - low / max(1, at_most - 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 1e-300 else 0.0
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)), 0.0)
    if step <= 0:  # as narrow as the smallest numbers
        return [low, high]
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


# ---- the series ---------------------------------------------------------------------------------


def _finite(series: Sequence[Series]) -> list[Series]:
    """Return the series without values that are not finite; a series without any other is left out."""
    kept: list[Series] = []
    for each in series:
        points = [(i, v) for i, v in zip(each.iterations, each.values, strict=True) if math.isfinite(v)]
        if points:
            kept.append(Series(each.name, tuple(i for i, _ in points), tuple(v for _, v in points)))
    return kept


def _frame(series: Sequence[Series]) -> _Frame:
    """Return the ranges of all series together. Raise ConfigError if there is no series."""
    if not series:
        raise ConfigError("there is no finite value to draw")
    values = [value for each in series for value in each.values]
    iterations = [iteration for each in series for iteration in each.iterations]
    low, high = min(values), max(values)
    if low == high:  # a flat line in the middle
        margin = abs(low) * 0.1 or (0.5 if not low else abs(low))
        low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
    return _Frame(min(iterations), max(iterations), low, high)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the curve of `values` in at most `width` characters.

    Each character is the mean of its share of the values. The lowest mean is `▁`, the highest `█`; if all are equal,
    every character is `▄`. Values that are None, NaN or infinite leave a gap.
    """
    n = min(len(values), max(0, width))
    parts = [values[index * len(values) // n : (index + 1) * len(values) // n] for index in range(n)]
    numbers = [[value for value in part if value is not None and math.isfinite(value)] for part in parts]
    means = [mean_of(part) if part else None for part in numbers]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return " " * n
    low, high, top = min(finite), max(finite), len(_BLOCKS) - 1
    if math.isclose(low, high, rel_tol=1e-9):  # means of equal rewards differ by rounding
        return "".join(" " if mean is None else _BLOCKS[3] for mean in means)
    return "".join(" " if mean is None else _BLOCKS[round(share(mean, low, high) * top)] for mean in means)
