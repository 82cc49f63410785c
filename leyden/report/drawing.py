"""Inline SVG: curves and histograms, coloured by the page's style sheet. It knows series of numbers, and no runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from leyden._lib.formatting import figure
from leyden._lib.json import Json
from leyden.report.html import Html, tag
from leyden.training.runs.chart import share, ticks

_MARKED = 120
"""The most points that show their value under the pointer."""


def curves(lines: Sequence[tuple[str, Json]], *, width: int, height: int, title: str) -> Html:
    """Return a chart of curves over the iterations.

    lines: each with its class, and a curve as `leyden.report.curves.curve` returns it.
    width, height: in pixels. The chart is never stretched, so that its letters keep their size.
    """
    points = [(x, y) for _, each in lines for x, *ys in (*each["train"], *each["val"]) for y in ys if y is not None]
    if not points:
        return Html()
    (first, last), (low, high) = ((min(of), max(of)) for of in zip(*points, strict=True))
    if low == high:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    marks = ticks(low, high, 5 if height > 160 else 3) or [low, high]
    left, right, top, bottom = 14 + 7 * max(len(figure(mark, 3)) for mark in marks), 14, 10, 24

    def at(x: float, y: float) -> tuple[float, float]:
        across = share(x, first, last) if last > first else 0.5
        up = share(y, low, high)
        return round(left + across * (width - left - right), 1), round(top + (1 - up) * (height - top - bottom), 1)

    parts = [tag("title", title)]
    for mark in marks:
        y = at(first, mark)[1]
        parts += [tag("line", class_="grid", x1=left, x2=width - right, y1=y, y2=y)]
        parts += [tag("text", figure(mark, 3), x=left - 8, y=y + 4, text_anchor="end")]
    for mark in sorted({round(each) for each in ticks(first, last, max(4, min(8, width // 110)))}):
        parts += [tag("text", f"{mark:,}", x=at(mark, low)[0], y=height - 6, text_anchor="middle")]
    for colour, each in lines:
        raw, smooth = [at(*point) for point in each["train"]], [at(*point) for point in each["smooth"]]
        parts += [_line(raw, f"{'raw' if smooth else 'line'} {colour}"), _line(smooth, f"line {colour}")]
        parts += [_line([at(x, mean) for x, mean, *_ in each["val"]], f"val line {colour}")]
        for n, mean, low_end, high_end in each["val"]:
            (x, y), known = at(n, mean), f"validation {n:,}: {figure(mean)}"
            if low_end is not None:
                path = f"M{x} {at(n, low_end)[1]}V{at(n, high_end)[1]}"
                known += f" (95 % interval {figure(low_end, 3)} to {figure(high_end, 3)})"
                parts += [tag("path", class_=f"val whisker {colour}", d=path)]
            diamond = f"M{x} {y - 5}l5 5l-5 5l-5-5z"
            parts += [tag("path", tag("title", known), class_=f"val dot {colour}", d=diamond)] * (
                len(each["val"]) <= 40
            )
        for (n, value), (x, y) in zip(each["train"], raw, strict=True) if len(raw) <= _MARKED else ():
            kind = "touch" if len(raw) > 1 else f"dot {colour}"
            known = tag("title", f"step {n:,}: {figure(value)}")
            parts += [tag("circle", known, class_=kind, cx=x, cy=y, r=7 if len(raw) > 1 else 3)]
    return _svg(parts, width, height)


def _svg(parts: Sequence[Html], width: int, height: int) -> Html:
    return tag("svg", parts, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img")


def _line(points: Sequence[tuple[float, float]], kind: str) -> Html:
    path = " ".join(f"{x},{y}" for x, y in points)
    return tag("polyline", class_=kind, points=path) if len(points) > 1 else Html()


def histogram(measure: Json, *, colour: str, title: str, width: int = 290, height: int = 150) -> Html:
    """Return a histogram, of a `MeasureSummary` as JSON, with a mark at the mean."""
    edges, counts = measure["histogram"]["edges"], measure["histogram"]["counts"]
    floor, room, low, high = height - 24, height - 44, edges[0], edges[-1]
    parts = [tag("title", title)]

    def across(value: float) -> float:
        return round(8 + (share(value, low, high) if high > low else 0.45) * (width - 16), 1)

    for (start, end), count in zip(pairwise(edges), counts, strict=True):
        if count:
            x, tall, percent = (
                across(start),
                max(1.5, room * count / max(counts)),
                f"{100 * count / measure['count']:.3g} %",
            )
            wide = max(1.0, across(end) - x - 1.5) if high > low else 28
            known = f"{figure(start, 3)} to {figure(end, 3)}: {count:,} ({percent})"
            place = {"x": x, "y": round(floor - tall, 1), "width": round(wide, 1), "height": round(tall, 1), "rx": 1.5}
            parts += [tag("rect", tag("title", known), class_=f"bar {colour}", **place)]
            if sum(each > 0 for each in counts) <= 5:
                anchor, at = (
                    ("start", x) if x < 40 else ("end", x + wide) if x > width - 60 else ("middle", x + wide / 2)
                )
                parts += [tag("text", percent, x=round(at, 1), y=round(floor - tall - 5, 1), text_anchor=anchor)]
    parts += [tag("line", class_="axis", x1=8, x2=width - 8, y1=floor, y2=floor)]
    parts += [tag("path", class_="mean", d=f"M{across(measure['mean'])} {floor + 1}l4 7h-8z")]
    for value, anchor, x in ((low, "start", 8), (high, "end", width - 8)):
        parts += [tag("text", figure(value, 3), x=x, y=height - 6, text_anchor=anchor)]
    return _svg(parts, width, height)


def advantage_bar(value: float, largest: float) -> Html:
    """Return a bar from the middle, to the right for a positive advantage, as long as it is large."""
    length = 48 * value / largest if largest else 0.0
    bar = {"x": round(min(50, 50 + length), 1), "y": 2, "width": round(abs(length), 1), "height": 10, "rx": 1.5}
    axis = tag("line", class_="axis", x1=50, x2=50, y1=0, y2=14)
    return _svg([tag("rect", class_="up" if value > 0 else "down", **bar), axis], 100, 14)
