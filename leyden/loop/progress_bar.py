"""`ProgressBar`: how far a run is, for someone who watches it, or for a log file that someone reads later.

On a terminal: one line for the run, one for the stage under way, redrawn in place; what is printed or logged meanwhile appears above
them. Anywhere else: one plain line for each iteration, no control characters.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as LiveDisplay

from leyden.loop.callbacks import Callback, Progress
from leyden.loop.metrics import MetricValue
from leyden.loop.train_loop import TrainLoop, Vessel
from leyden.loop.writers.console import one_line

__all__ = ["ProgressBar"]


class ProgressBar(Callback):
    """Iterations, chosen metrics, rates, time left.

    metrics: names in `loop.metrics` to show, in this order. The newest value of each is shown, also
        of an earlier iteration; a name without a value yet is left out.
    unit: what the vessel counts in `loop.progress(done, total)`: shown as `48/128 rollouts  91 rollouts/s`.
        Other counts that it reports are shown as rates: `loop.progress(48, 128, tokens=960)` as `1.8k tokens/s`.
    stream: None: what `sys.stderr` is when the run starts.
    """

    def __init__(
        self, metrics: Sequence[str] = ("reward",), *, unit: str = "rollouts", stream: TextIO | None = None
    ) -> None:
        self.metrics, self.unit = tuple(metrics), unit
        self._stream = stream
        self._display: _Terminal | _Lines | None = None
        self._clock = _Clock()
        self._progress: Progress | None = None
        self._newest: dict[str, MetricValue] = {}

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Begin to show."""
        self._newest = {}
        stream = self._stream or sys.stderr
        self._clock = _Clock(loop.current_iter)
        self._display = _Terminal(stream) if _is_terminal(stream) else _Lines(stream)
        self._show_run(loop)

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Name the stage."""
        self._begin_stage("train")

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Name the stage."""
        self._begin_stage("val")

    def _begin_stage(self, stage: str) -> None:
        self._progress = None
        if self._display:
            self._display.show_stage(stage, 0, None, "")

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        """Redraw the stage's line."""
        self._progress = progress
        if self._display:
            text = "  ".join([f"{progress.done}/{progress.total} {self.unit}", *_rates(progress, self.unit)])
            self._display.show_stage(loop.current_stage, progress.done, progress.total, text)

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Redraw the run's line."""
        self._clock.count(loop.current_iter)
        self._show_run(loop)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Redraw the run's line, validation metrics included; off a terminal, print the iteration."""
        self._show_run(loop)
        if self._display:
            self._display.end_iteration(self._run_label(loop), self._run_text(loop))

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Leave the last state on the terminal."""
        self._end(loop)

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        """Leave the last state on the terminal."""
        self._end(loop)

    def _end(self, loop: TrainLoop) -> None:
        if self._display:
            self._show_run(loop)
            self._display.close()
        self._display = None

    def _show_run(self, loop: TrainLoop) -> None:
        if self._display:
            self._newest.update(loop.metrics)
            self._display.show_run(self._run_label(loop), loop.current_iter, loop.max_iters, self._run_text(loop))

    def _run_label(self, loop: TrainLoop) -> str:
        return f"iteration {loop.current_iter}" + ("" if loop.max_iters is None else f"/{loop.max_iters}")

    def _run_text(self, loop: TrainLoop) -> str:
        parts = [f"{name} {_number(self._newest[name])}" for name in self.metrics if name in self._newest]
        if self._progress and isinstance(self._display, _Lines):
            parts += _rates(self._progress, self.unit)
        max_iters = loop.current_iter if loop.max_iters is None else loop.max_iters
        seconds_left = self._clock.seconds_left(loop.current_iter, max_iters)
        if seconds_left is not None and loop.current_iter < max_iters:
            parts.append(f"{_duration(seconds_left)} left")
        return "  ".join(parts)


class _Clock:
    """Time left, from the mean duration of the iterations that this process has seen."""

    def __init__(self, first_iter: int = 0) -> None:
        self._first_iter = first_iter
        self._started = self._counted = time.monotonic()

    def count(self, current_iter: int) -> None:
        """An iteration has ended."""
        self._counted = time.monotonic()

    def seconds_left(self, current_iter: int, max_iters: int) -> float | None:
        """None until an iteration has ended."""
        seen = current_iter - self._first_iter
        if seen == 0:
            return None
        mean = (self._counted - self._started) / seen
        return max(0.0, mean * (max_iters - current_iter) - (time.monotonic() - self._counted))


class _Lines:
    """Off a terminal: an iteration is a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show_run(self, label: str, done: int, total: int | None, text: str) -> None:
        """Nothing until the iteration ends."""

    def show_stage(self, stage: str, done: int, total: int | None, text: str) -> None:
        """Nothing until the iteration ends."""

    def end_iteration(self, label: str, text: str) -> None:
        """Print it."""
        self._stream.write(f"{label}  {text}".rstrip() + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is held."""


class _Terminal:
    """On a terminal: rich redraws two lines in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stack = ExitStack()
        self._live = LiveDisplay(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=stream),
            refresh_per_second=8,
            # what goes to a file or a pipe must get there, not onto this terminal
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        self._stack.enter_context(self._live)
        self._stack.enter_context(_handlers_follow_stderr())
        self._run = self._live.add_task("", text="")
        self._stage = self._live.add_task("", text="", visible=False)

    def show_run(self, label: str, done: int, total: int | None, text: str) -> None:
        """The first line."""
        self._live.update(self._run, description=label, completed=done, total=total, text=text)

    def show_stage(self, stage: str, done: int, total: int | None, text: str) -> None:
        """The second line; no total: the bar pulses."""
        self._live.update(self._stage, description=f"  {stage}", total=total, completed=done, text=text, visible=True)

    def end_iteration(self, label: str, text: str) -> None:
        """The first line says it."""

    def close(self) -> None:
        """Leave the first line, give the terminal back."""
        self._live.update(self._stage, visible=False)
        self._stack.close()


@contextmanager
def _handlers_follow_stderr() -> Generator[None]:
    """Let logging handlers that hold the terminal's streams write above the display: rich replaces `sys.stderr`, not their copies."""
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in _stream_handlers():
        stream: TextIO | None = handler.stream
        if stream is not None and stream in (sys.__stdout__, sys.__stderr__) and _is_terminal(stream):
            moved.append((handler, handler.setStream(sys.stderr)))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _stream_handlers() -> Iterable[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler):
                yield handler  # pyright: ignore[reportUnknownVariableType] -- the stream's type is not known


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and Console(file=stream).is_terminal and not Console(file=stream).is_dumb_terminal


def _rates(progress: Progress, unit: str) -> list[str]:
    if progress.seconds <= 0:
        return []
    counts = {unit: float(progress.done), **progress.counts}
    return [f"{_number(count / progress.seconds)} {name}/s" for name, count in counts.items()]


def _number(value: MetricValue) -> str:
    if isinstance(value, str):
        return one_line(value)
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / divisor:.3g}{suffix}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
