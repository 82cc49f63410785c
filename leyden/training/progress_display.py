"""Show the progress of a run, on a terminal (`Terminal`) or in a log file (`Lines`). The module knows neither loop nor
trainer: `ProgressBar` keeps the `RunProgress` that is shown.

On a terminal, one line for the run and one for its current stage are redrawn in place, and texts that the program
prints or logs appear above them. Elsewhere, plain lines without control characters are printed, one for each iteration
and one now and then during a long one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from leyden._lib.formatting import duration, figure, harmless, one_line, shortened
from leyden.training.terminal import printing_above

_WIDEST_BAR, _NARROWEST_BAR = 24, 4
"""Columns of a bar; with less room than the narrowest, none is drawn."""
_REFRESHES_PER_SECOND = 4
_DIGITS = 3
"""Significant digits of metrics and rates."""


# ---- the state of a run, and its lines -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of the current stage."""

    name: str = ""
    done: int = 0
    total: int | None = None
    counts: dict[str, float] = field(default_factory=dict[str, float])
    started: float = field(default_factory=time.monotonic)
    """When the stage began (`time.monotonic()`)."""
    seconds: float = 0.0
    """Seconds from the stage's beginning to its newest report."""
    reported_at: float = field(default_factory=time.monotonic)
    """When the newest report came (`time.monotonic()`)."""


@dataclass(slots=True)
class RunProgress:
    """The progress of a run, and the texts that show it. Times are those of `time.monotonic()`."""

    metrics: tuple[str, ...]
    unit: str
    iteration: int = 0
    total: int | None = None
    stage: StageProgress = field(default_factory=StageProgress)
    newest: dict[str, Any] = field(default_factory=dict[str, Any])
    """The newest value of each metric."""
    first_iteration: int = 0
    """The iterations that were finished when this process began."""
    started_at: float = 0.0
    counted_at: float = 0.0
    """When the newest iteration ended."""

    def begin(self, iteration: int, total: int | None) -> None:
        self.iteration, self.total, self.first_iteration = iteration, total, iteration
        self.stage, self.newest = StageProgress(), {}
        self.started_at = self.counted_at = time.monotonic()

    @property
    def in_iterations(self) -> bool:
        """Whether the run is known to have iterations. Otherwise only its stage is shown."""
        return self.total is not None or self.iteration > 0

    @property
    def label(self) -> str:
        return f"iteration {self.iteration}" + ("" if self.total is None else f"/{self.total}")

    @property
    def fraction(self) -> float | None:
        """The share of the iterations that are done."""
        return self.iteration / self.total if self.total else None

    def values(self) -> list[str]:
        newest = dict(self.newest)  # another thread may add to it
        return [f"{name} {_short(newest[name])}" for name in self.metrics if name in newest]

    def rates(self) -> list[str]:
        stage = self.stage
        if stage.total is None or stage.seconds <= 0 or not stage.done:
            return []
        counts = {self.unit: float(stage.done), **stage.counts}
        return [f"{figure(count / stage.seconds, _DIGITS)} {name}/s" for name, count in counts.items()]

    def seconds_left(self) -> float | None:
        """Return the seconds that the run, or a stage without iterations, will probably still take.

        The estimate assumes that the rest goes as fast as this process has been on average. Return None while nothing
        has been finished, if the total is unknown, and at the end.
        """
        if not self.in_iterations:
            stage = self.stage
            if not stage.total or not stage.done or stage.done >= stage.total:
                return None
            left = stage.seconds * (stage.total - stage.done) / stage.done
            return max(0.0, left - (time.monotonic() - stage.reported_at))
        seen = self.iteration - self.first_iteration
        if seen == 0 or self.total is None or self.iteration >= self.total:
            return None
        mean = (self.counted_at - self.started_at) / seen
        return max(0.0, mean * (self.total - self.iteration) - (time.monotonic() - self.counted_at))

    def left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"{duration(seconds)} left"

    def counts(self) -> str:
        """Return `done/total` of the stage; the time since it began if it has reported none."""
        stage = self.stage
        if stage.total is None:
            return duration(time.monotonic() - stage.started)
        return f"{stage.done:,}/{stage.total:,} {self.unit}"

    def under_way(self) -> str:
        """Return the stage with its counts."""
        return f"{self.stage.name} {self.counts()}".strip()

    def stage_fraction(self) -> float | None:
        stage = self.stage
        return stage.done / stage.total if stage.total else None


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a terminal, cut to its width."""

    label: str
    bar: int
    """Columns of the bar; 0: none."""
    text: str


def fitted(label: str, values: Sequence[str], extras: Sequence[str], left: str, width: int) -> Line:
    """Return a line of those parts that fit into `width` columns.

    In order of importance: the label, the first value, the time left, the other values, a bar, the extras.

    left: the time left as text; empty if unknown.
    """
    fixed = 2 + len(left) if left else 0
    kept = list(values[:1])
    if len("  ".join([label, *kept])) + fixed > width:
        left, fixed = "", 0
    for value in values[1:]:
        if len("  ".join([label, *kept, value])) + fixed <= width:
            kept.append(value)
    for extra in extras:
        if len("  ".join([label, *kept, extra])) + fixed + 2 * _NARROWEST_BAR + 1 <= width:
            kept.append(extra)
    text = "  ".join([*kept, left] if left else kept)
    if len(label) + 2 + len(text) > width:
        return Line(shortened(f"{label}  {text}".rstrip(), width), 0, "")
    room = width - len(label) - len(text) - 3
    return Line(label, min(_WIDEST_BAR, room) if room >= _NARROWEST_BAR else 0, text)


def _short(value: Any) -> str:
    return figure(value, _DIGITS) if isinstance(value, (int, float)) else one_line(str(value))


# ---- off a terminal ------------------------------------------------------------------------------


class Lines:
    """Shows progress off a terminal: a line for each iteration, and one after each `seconds` without a line."""

    def __init__(self, state: RunProgress, stream: TextIO, seconds: float) -> None:
        self._state, self._stream, self._seconds = state, stream, seconds
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._last = time.monotonic()
        self._clock = threading.Thread(target=self._keep_time, name="leyden-progress", daemon=True)
        self._clock.start()

    def end_iteration(self) -> None:
        state = self._state
        self._write([state.label, *state.values(), *state.rates(), state.left()])

    def close(self) -> None:
        self._closed.set()
        self._clock.join()

    def _keep_time(self) -> None:
        """Print a line when none was printed for a while. Runs in a thread until `close`."""
        while not self._closed.wait(max(0.0, self._last + self._seconds - time.monotonic())):
            if time.monotonic() < self._last + self._seconds:  # an iteration ended during the wait
                continue
            state = self._state
            label = [state.label] if state.in_iterations else []
            self._write([*label, state.under_way(), *state.values(), *state.rates(), state.left()])

    def _write(self, parts: Iterable[str]) -> None:
        with self._lock:
            self._last = time.monotonic()
            self._stream.write("  ".join(part for part in parts if part) + "\n")
            self._stream.flush()


# ---- on a terminal -------------------------------------------------------------------------------


class Terminal:
    """Shows progress on a terminal, where rich redraws two lines in place."""

    def __init__(self, state: RunProgress, stream: TextIO) -> None:
        self._state, self._stage_shown = state, True
        self._console = Console(file=stream)
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._stack = ExitStack()
        self._stack.enter_context(self._live)
        self._stack.enter_context(printing_above(self._console))

    def close(self) -> None:
        """Leave the run's line on the terminal, or the stage's if the run has none."""
        self._stage_shown = not self._state.in_iterations
        self._stack.close()

    def _draw(self) -> Group:
        """Return the lines to show now. rich calls this for each redraw."""
        state, width = self._state, self._console.width
        lines: list[Text] = []
        if state.in_iterations:
            run_line = fitted(state.label, state.values(), (), state.left(), width)
            lines.append(self._drawn(run_line, state.fraction))
        if self._stage_shown and (state.stage.name or state.stage.total):
            if state.in_iterations:
                line = fitted(f"  {state.stage.name}", [state.counts()], state.rates(), "", width)
            else:  # it has the metrics too
                line = fitted(state.under_way(), state.values(), state.rates(), state.left(), width)
            lines.append(self._drawn(line, state.stage_fraction()))
        return Group(*lines)

    def _drawn(self, line: Line, fraction: float | None) -> Text:
        """Return a line with its bar.

        fraction: the part of the bar that is full; None: no bar.
        """
        text = Text(harmless(line.label), no_wrap=True, overflow="crop")
        if fraction is not None and line.bar:
            full = round(line.bar * min(1.0, max(0.0, fraction)))
            stroke = "━" if self._console.encoding.startswith("utf") else "-"
            finished = "bar.finished" if fraction >= 1.0 else "bar.complete"
            text.append(" ")
            text.append(stroke * full, style=finished)
            text.append((stroke if self._console.color_system else " ") * (line.bar - full), style="bar.back")
        return text.append(f"  {harmless(line.text)}" if line.text else "")
