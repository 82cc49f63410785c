"""Draw a trace as an SVG picture with a row for each span, indented below its parent, and a bar for
the time in which it ran.

The picture is made as text, without another program, a font file or a script. Text from spans is
escaped. The colours show the kind of step that `normalise` finds. To show another kind, add it to
`_KINDS` and `_kind`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from leyden.adapter.normalise import ModelCallView, is_reward, read_agent, read_model_call, read_tool_call
from leyden.types import Span, get_rewards_from_span, semconv


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A span, and how many levels below the root it is."""

    span: Span
    depth: int


_KINDS = {
    "agent": ("#7c3aed", "agent"),
    "call": ("#2563eb", "model call"),
    "tool": ("#d97706", "tool"),
    "reward": ("#059669", "reward"),
    "virtual": ("#9ca3af", "not recorded"),
    "other": ("#64748b", "other"),
}
"""For each kind of step its colour and its name in the legend."""

# All lengths are in px.
_WIDTH, _ROW, _TOP, _BOTTOM = 960, 26, 44, 40
_LEFT, _INDENT = 20, 18
_BARS, _BARS_END = 560, 850
"""The left and the right end of the area for time bars."""
_CHARACTER = 6.9
"""About the width of a character of 13 px, in px."""


def draw(rows: Sequence[TreeLine]) -> str:
    """Return the rows as an SVG document, 960 px wide."""
    height = _TOP + _ROW * len(rows) + _BOTTOM
    clock = _Clock([row.span for row in rows])
    kinds = [_kind(row.span) for row in rows]
    body = [*_heading(clock, height), *_connectors(rows)]
    for index, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        body += _row(row, kind, _TOP + _ROW * index, clock)
    body += _legend([kind for kind in _KINDS if kind in kinds], height - 16)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">'
    )
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([opening, _STYLE, background, *body, "</svg>\n"])


_STYLE = (
    "<style>"
    ".name{fill:#111827}.note{fill:#6b7280;font-size:12px}.head{fill:#6b7280;font-size:11px}.time{text-anchor:end}"
    ".edge{stroke:#cbd5e1;stroke-width:1.2;fill:none}.grid{stroke:#eef2f7}.failed{fill:#b91c1c;font-size:12px}"
    "</style>"
)


class _Clock:
    """Converts times to positions on the picture."""

    def __init__(self, spans: Sequence[Span]) -> None:
        moments = [moment for span in spans for moment in (span.start_time, span.end_time) if moment is not None]
        self.start = min(moments, default=0.0)
        self.seconds = max(moments, default=0.0) - self.start

    def x(self, moment: float) -> float:
        """Return the position of a time, in px from the left."""
        share = (moment - self.start) / self.seconds if self.seconds > 0 else 0.0
        return _BARS + share * (_BARS_END - _BARS)


def _heading(clock: _Clock, height: int) -> list[str]:
    """Return the SVG lines of the time axis: five grid lines with their times."""
    lines: list[str] = []
    for quarter in range(5):
        x = _BARS + quarter / 4 * (_BARS_END - _BARS)
        lines.append(f'<path class="grid" d="M{x:.1f},{_TOP - 8} V{height - _BOTTOM + 4}"/>')
        if clock.seconds > 0:
            label = _duration(clock.seconds * quarter / 4)
            lines.append(f'<text class="head" x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{label}</text>')
    return lines


def _connectors(rows: Sequence[TreeLine]) -> list[str]:
    """Return the lines that lead from each span, down and to the right, to its children."""
    lines: list[str] = []
    row_of_depth: dict[int, int] = {}
    for index, row in enumerate(rows):
        row_of_depth[row.depth] = index
        if row.depth > 0:
            x = _LEFT + _INDENT * (row.depth - 1) + 5
            top = _TOP + _ROW * row_of_depth[row.depth - 1] + 19
            middle = _TOP + _ROW * index + 13
            lines.append(f'<path class="edge" d="M{x},{top} V{middle} H{x + _INDENT - 7}"/>')
    return lines


def _row(row: TreeLine, kind: str, y: int, clock: _Clock) -> list[str]:
    """Return the SVG lines of one span: dot, label with a note if there is room, and time bar.

    y: the row's top in px.
    """
    span, colour = row.span, _KINDS[kind][0]
    x, middle = _LEFT + _INDENT * row.depth, y + 13
    name, note = _label(span, kind)
    room = max(int((_BARS - 24 - (x + 16)) / _CHARACTER), 8)
    name = _shortened(name, room)
    note = _shortened(note, room - len(name) - 2) if room - len(name) > 6 else ""
    hollow = kind == "virtual"
    dot = f'fill="#ffffff" stroke="{colour}" stroke-dasharray="2 2"' if hollow else f'fill="{colour}"'
    lines = [
        f'<g class="{kind}"><title>{_safe(_tooltip(span))}</title>',
        f'<circle cx="{x + 5}" cy="{middle}" r="5" {dot}/>',
    ]
    lines.append(
        f'<text x="{x + 16}" y="{middle + 4.5}"><tspan class="name">{_safe(name)}</tspan>'
        + (f'<tspan class="note" dx="8">{_safe(note)}</tspan>' if note else "")
        + "</text>"
    )
    lines += _bar(span, colour, y, clock, hollow=hollow)
    return [*lines, "</g>"]


def _bar(span: Span, colour: str, y: int, clock: _Clock, *, hollow: bool) -> list[str]:
    """Return the SVG lines of a span's time bar and its duration. A span without a duration gets a
    marker, one without a start gets nothing.

    hollow: outline the bar, as for a virtual span.
    """
    if span.start_time is None:
        return []
    start = clock.x(span.start_time)
    seconds = None if span.end_time is None else span.end_time - span.start_time
    if not seconds or seconds < 0:
        marker = f'<path d="M{start:.1f},{y + 7} l6,6 l-6,6 l-6,-6 z" fill="{colour}"/>'
        return [marker]
    width = max(clock.x(span.start_time + seconds) - start, 2.0)
    paint = (
        f'fill="none" stroke="{colour}" stroke-dasharray="3 2"' if hollow else f'fill="{colour}" fill-opacity="0.85"'
    )
    failed = span.status.status_code == "ERROR"
    text, style = ("failed", "failed") if failed else (_duration(seconds), "note")
    return [
        f'<rect x="{start:.1f}" y="{y + 7}" width="{width:.1f}" height="12" rx="3" {paint}/>',
        f'<text class="{style} time" x="{_WIDTH - 20}" y="{y + 17.5}">{text}</text>',
    ]


def _legend(kinds: Sequence[str], y: int) -> list[str]:
    """Return the SVG lines of the legend: a dot and a name for each kind. y: the text's
    baseline.
    """
    lines: list[str] = []
    x = _LEFT
    for kind in kinds:
        colour, name = _KINDS[kind]
        lines.append(
            f'<circle cx="{x + 5}" cy="{y - 4}" r="4" fill="{colour}"/><text class="note" x="{x + 14}" y="{y}">{name}</text>'
        )
        x += 34 + int(len(name) * _CHARACTER)
    return lines


def _kind(span: Span) -> str:
    """Return the kind of a step, a key of `_KINDS`."""
    if span.name == semconv.VIRTUAL:
        return "virtual"
    if is_reward(span):
        return "reward"
    if read_model_call(span) is not None:
        return "call"
    if read_tool_call(span) is not None:
        return "tool"
    return "agent" if read_agent(span) is not None else "other"


def _label(span: Span, kind: str) -> tuple[str, str]:
    """Return the name of a row, and its details, which are drawn in grey."""
    if kind == "virtual":
        return "not recorded", ""
    if kind == "reward":
        return span.name, ", ".join(
            f"{value:g}" if name == semconv.PRIMARY_REWARD else f"{name} {value:g}"
            for name, value in get_rewards_from_span(span).items()
        )
    if kind == "call" and (call := read_model_call(span)) is not None:
        return span.name, _call_details(call)
    if kind == "tool" and (tool := read_tool_call(span)) is not None:
        return span.name, "" if tool.name in span.name else tool.name
    if (agent := read_agent(span)) is not None:
        return span.name, "" if agent.name in span.name else agent.name
    operation = span.attributes.get(semconv.OPERATION_NAME)
    return span.name, operation if isinstance(operation, str) and operation != span.name else ""


def _call_details(call: ModelCallView) -> str:
    """Return the model of a call, unless the span's name has it, and its counts of tokens."""
    counts = call.usage
    if call.tokens is not None:
        counts = (len(call.tokens.prompt_ids), len(call.tokens.response_ids))
    details = [call.model] if call.model and call.model not in call.span.name else []
    if counts is not None:
        details.append(f"{counts[0]:,} → {counts[1]:,} tokens")
    return ", ".join(details)


def _tooltip(span: Span) -> str:
    parts = [span.name, f"span {span.span_id}"]
    if span.status.description:
        parts.append(span.status.description)
    return "\n".join(parts)


def _duration(seconds: float) -> str:
    if seconds >= 60:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def _shortened(text: str, length: int) -> str:
    """Return a text in one line, cut to `length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: max(length - 1, 1)] + "…"


def _safe(text: str) -> str:
    """Escape text for XML, and replace characters that XML does not have."""
    return escape(_NOT_XML.sub("\ufffd", text))


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
