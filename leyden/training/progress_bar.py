"""`ProgressBar`: the callback that shows the progress of a run, on a terminal or in a log file.

On a terminal (`leyden.training.terminal`), one line for the run and one for its current stage are redrawn in place, and
texts that the program prints or logs appear above them. Elsewhere, plain lines without control characters are printed,
one for each iteration and one now and then during a long one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from leyden._lib.formatting import duration, figure, is_on_terminal, one_line, shortened
from leyden._lib.options import check_number
from leyden.training.callbacks import Callback, Progress

if TYPE_CHECKING:
    from leyden.training.terminal import Terminal
    from leyden.training.train_loop import TrainLoop, Vessel

_MAX_BAR, _MIN_BAR = 24, 4
"""Columns of a bar; with less room than the minimum, none is drawn."""
_DIGITS = 3
"""Significant digits of metrics and rates."""


class ProgressBar(Callback):
    """Shows iterations, chosen metrics, rates and the time left: on a terminal as a live bar, elsewhere as plain lines.

    A narrow terminal lacks first the rates, then the bar, then further metrics. Off a terminal, a line is printed for
    each iteration and, during a long one, every `line_seconds`.

    metrics: names in `loop.metrics` to show, in this order. A value is shown with the iteration in which it was
        measured, and until the next training stage has ended.
    unit: what the vessel counts in `loop.progress(done, total)`, as in `48/128 rollouts 91 rollouts/s`. Other counts
        are shown as rates: `loop.progress(48, 128, tokens=960)` as `1,835 tokens/s`.
    stream: where to show it; None: `sys.stderr`, as it is when the run starts.
    line_seconds: the longest time without a line off a terminal.
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("reward", "val/reward", "budget_left"),
        *,
        unit: str = "rollouts",
        stream: TextIO | None = None,
        line_seconds: float = 60.0,
    ) -> None:
        check_number("line_seconds", line_seconds, above=0)
        self.metrics, self.unit = tuple(metrics), unit
        self._stream, self._line_seconds = stream, line_seconds
        self._run = RunProgress(self.metrics, unit)
        self._shown: Terminal | Lines | None = None
        self._line_due = False
        """Whether a stage has ended since the last line of an iteration."""

    def begin_setup(self) -> None:
        """Show that the run starts, for an algorithm whose set-up takes a while. `on_fit_start` or `close` follows."""
        self._start(0, None)
        self._run.stage = StageProgress("starting")

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._start(loop.current_iter, loop.max_iters)
        self._run.measured = dict(loop.metrics)

    def _start(self, iteration: int, total: int | None) -> None:
        """Start the display, or start it again from the beginning.

        iteration: the number of finished iterations.
        total: iterations in all; None if unknown. Then only the stage is shown until the first iteration has ended.
        """
        self._run = RunProgress(self.metrics, self.unit, iteration, total)
        self._line_due = False
        if self._shown is not None:
            self._shown.state = self._run
            return
        stream = self._stream or sys.stderr
        if is_on_terminal(stream):
            from leyden.training.terminal import Terminal, can_redraw  # a program without a terminal does without rich

            if can_redraw(stream):
                self._shown = Terminal(self._run, stream)
                return
        self._shown = Lines(self._run, stream, self._line_seconds)

    def on_iter_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Print a line for a validation before the iteration."""
        self._end_line()

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.stage = StageProgress("train")

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.stage = StageProgress("val")

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        self._run.stage = StageProgress(loop.current_stage, progress, self._run.stage.started)

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.iteration, self._run.counted_at = loop.current_iter, time.monotonic()
        self.on_validate_end(loop, vessel)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.measured, self._line_due = dict(loop.metrics), True

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.measured = dict(loop.metrics)
        self._end_line()

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._end_line()
        self.close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last state on the terminal, and end the display. Safe to repeat."""
        shown, self._shown = self._shown, None
        if shown is not None:
            self._run.ended = True
            shown.close()

    def _end_line(self) -> None:
        if self._line_due and isinstance(self._shown, Lines):
            self._shown.end_iteration()
        self._line_due = False


@contextmanager
def showing_setup(loop: TrainLoop) -> Generator[None]:
    """Let the loop's progress bars show during the block that the run is being set up.

    The loop itself goes on with them; after an error they are closed.
    """
    bars = [callback for callback in loop.callbacks if isinstance(callback, ProgressBar)]
    for bar in bars:
        bar.begin_setup()
    try:
        yield
    except BaseException:
        for bar in bars:
            bar.close()
        raise


# ---- the state of a run, and its lines -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of the current stage. Times are those of `time.monotonic()`."""

    name: str = ""
    report: Progress | None = None
    """The newest report; None before the first one."""
    started: float = field(default_factory=time.monotonic)
    reported_at: float = field(default_factory=time.monotonic)

    def counts(self, unit: str) -> str:
        """Return `done/total` of the stage; the time since it began if it has reported none."""
        if self.report is None:
            return duration(time.monotonic() - self.started)
        return f"{self.report.done:,}/{self.report.total:,} {unit}"

    @property
    def fraction(self) -> float | None:
        return self.report.done / self.report.total if self.report and self.report.total else None


class Line(NamedTuple):
    """One line of a terminal, cut to its width."""

    label: str
    bar: int
    """Columns of the bar; 0: none."""
    text: str
    fraction: float | None = None
    """The part of the bar that is full; None: no bar."""


@dataclass(slots=True)
class RunProgress:
    """The progress of a run, and the texts that show it. Times are those of `time.monotonic()`."""

    metrics: tuple[str, ...]
    unit: str
    iteration: int = 0
    total: int | None = None
    stage: StageProgress = field(default_factory=StageProgress)
    measured: dict[str, Any] = field(default_factory=dict[str, Any])
    """The metrics of the newest iteration that has any."""
    ended: bool = False
    first_iteration: int = field(init=False)
    """The iterations that were finished when this process began."""
    started_at: float = field(default_factory=time.monotonic)
    counted_at: float = field(default_factory=time.monotonic)
    """When the newest iteration ended."""

    def __post_init__(self) -> None:
        self.first_iteration = self.iteration

    @property
    def in_iterations(self) -> bool:
        """Whether the run is known to have iterations. Otherwise only its stage is shown."""
        return self.total is not None or self.iteration > 0

    @property
    def label(self) -> str:
        return f"iteration {self.iteration}" + ("" if self.total is None else f"/{self.total}")

    def values(self) -> list[str]:
        measured = self.measured
        shown = [(name, measured[name]) for name in self.metrics if name in measured]
        return [
            f"{name} {figure(value, _DIGITS) if isinstance(value, (int, float)) else one_line(str(value))}"
            for name, value in shown
        ]

    def rates(self) -> list[str]:
        report = self.stage.report
        if report is None or report.seconds <= 0 or not report.done:
            return []
        counts = {self.unit: float(report.done), **report.counts}
        return [f"{figure(count / report.seconds, _DIGITS)} {name}/s" for name, count in counts.items()]

    def left(self) -> str:
        """Return the time that the run, or a stage without iterations, will probably still take.

        The estimate assumes that the rest goes as fast as this process has been on average. Return an empty text while
        nothing has been finished, if the total is unknown, and at the end.
        """
        report = self.stage.report
        if self.in_iterations:
            done, total = self.iteration - self.first_iteration, (self.total or 0) - self.first_iteration
            seconds, at = self.counted_at - self.started_at, self.counted_at
        elif report is not None:
            done, total, seconds, at = report.done, report.total, report.seconds, self.stage.reported_at
        else:
            return ""
        if not 0 < done < total:
            return ""
        return f"{duration(max(0.0, seconds * (total - done) / done - (time.monotonic() - at)))} left"

    def lines(self, width: int) -> list[Line]:
        """Return the lines of a terminal: the run's, and its stage's until the end. A run without iterations has only
        the stage's, with the metrics.
        """
        stage, lines = self.stage, list[Line]()
        if self.in_iterations:
            fraction = self.iteration / self.total if self.total else None
            lines.append(fitted(self.label, self.values(), (), self.left(), width)._replace(fraction=fraction))
        if (stage.name or stage.report) and not (self.ended and self.in_iterations):
            counts = stage.counts(self.unit)
            line = (
                fitted(f"  {stage.name}", [counts], self.rates(), "", width)
                if self.in_iterations
                else fitted(f"{stage.name} {counts}".strip(), self.values(), self.rates(), self.left(), width)
            )
            lines.append(line._replace(fraction=stage.fraction))
        return lines


def fitted(label: str, values: Sequence[str], extras: Sequence[str], left: str, width: int) -> Line:
    """Return a line of those parts that fit into `width` columns.

    In order of importance: the label, the first value, the time left, the other values, a bar, the extras.

    left: the time left as text; empty if unknown.
    """
    kept = list(values[:1])
    end = [left] if left and len("  ".join([label, *kept, left])) <= width else []
    beside_bar = 2 * _MIN_BAR + 1
    for part, room in [*((value, 0) for value in values[1:]), *((extra, beside_bar) for extra in extras)]:
        if len("  ".join([label, *kept, part, *end])) + room <= width:
            kept.append(part)
    text = "  ".join([*kept, *end])
    if len(label) + 2 + len(text) > width:
        return Line(shortened(f"{label}  {text}".rstrip(), width), 0, "")
    room = width - len(label) - len(text) - 3
    return Line(label, min(_MAX_BAR, room) if room >= _MIN_BAR else 0, text)


class Lines:
    """Shows progress off a terminal: a line for each iteration, and one after each `seconds` without a line."""

    def __init__(self, state: RunProgress, stream: TextIO, seconds: float) -> None:
        self.state, self._stream, self._seconds = state, stream, seconds
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._last = time.monotonic()
        self._clock = threading.Thread(target=self._keep_time, name="leyden-progress", daemon=True)
        self._clock.start()

    def end_iteration(self) -> None:
        state = self.state
        self._write([state.label, *state.values(), *state.rates(), state.left()])

    def close(self) -> None:
        self._closed.set()
        self._clock.join()

    def _keep_time(self) -> None:
        """Print a line when none was printed for a while. Runs in a thread until `close`."""
        while not self._closed.wait(max(0.0, self._last + self._seconds - time.monotonic())):
            if time.monotonic() < self._last + self._seconds:  # an iteration ended during the wait
                continue
            state = self.state
            under_way = f"{state.stage.name} {state.stage.counts(state.unit)}".strip()
            label = [state.label] if state.in_iterations else []
            self._write([*label, under_way, *state.values(), *state.rates(), state.left()])

    def _write(self, parts: Iterable[str]) -> None:
        with self._lock:
            self._last = time.monotonic()
            self._stream.write("  ".join(part for part in parts if part) + "\n")
            self._stream.flush()
