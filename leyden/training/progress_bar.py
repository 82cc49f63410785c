"""`ProgressBar`: the callback that shows the progress of a run on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TextIO

from leyden._lib.options import check_number
from leyden.training.callbacks import Callback, Progress
from leyden.training.progress_display import Lines, RunProgress, StageProgress, Terminal
from leyden.training.terminal import is_terminal
from leyden.training.train_loop import TrainLoop, Vessel


class ProgressBar(Callback):
    """Shows iterations, chosen metrics, rates and the time left: on a terminal as a live bar, elsewhere as plain lines.

    A narrow terminal lacks first the rates, then the bar, then further metrics. Off a terminal, a line is printed for
    each iteration and, during a long one, every `line_seconds`.

    metrics: names in `loop.metrics` to show, in this order, each with its newest value, which may be an earlier
        iteration's. A name without a value yet is left out.
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

    def begin_setup(self) -> None:
        """Show that the run starts, for an algorithm whose set-up takes a while.

        `on_fit_start` or `close` follows.
        """
        self._start(0, None)
        self._run.stage = StageProgress("starting")

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Start the display, with the metrics of a resumed run."""
        self._start(loop.current_iter, loop.max_iters)
        self._run.newest.update(loop.metrics)

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show that the training stage begins."""
        self._run.stage = StageProgress("train")

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show that the validation begins."""
        self._run.stage = StageProgress("val")

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        """Show how far the stage is."""
        started = self._run.stage.started
        self._run.stage = StageProgress(
            loop.current_stage, progress.done, progress.total, dict(progress.counts), started, progress.seconds
        )

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Count the step, and show its metrics. Its validation may still follow."""
        self._run.iteration, self._run.counted_at = loop.current_iter, time.monotonic()
        self._run.newest.update(loop.metrics)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show the validation's metrics."""
        self._run.newest.update(loop.metrics)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Print a line for the iteration if the output is not a terminal."""
        self._run.newest.update(loop.metrics)
        if isinstance(self._shown, Lines):
            self._shown.end_iteration()

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Leave the last state on the terminal."""
        self.close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        """Leave the last state on the terminal."""
        self.close()

    def close(self) -> None:
        """Leave the last state on the terminal, and end the display. Safe to repeat."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.close()

    def _start(self, iteration: int, total: int | None) -> None:
        """Start the display, or start it again from the beginning.

        iteration: the number of finished iterations.
        total: iterations in all; None if unknown. Then only the stage is shown until the first iteration has ended.
        """
        self._run.begin(iteration, total)
        if self._shown is None:
            stream = self._stream or sys.stderr
            lines = not is_terminal(stream)
            self._shown = Lines(self._run, stream, self._line_seconds) if lines else Terminal(self._run, stream)


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
