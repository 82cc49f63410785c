"""`ProgressBar`: the callback that shows how a run goes, on a terminal, in a notebook or in a log file.

It passes what a loop reports on to a `RunView` (`live_view.py`), which a screen shows (`screens.py`). A job without a
loop, such as a check of many tasks, has the same view (`ProgressBar.job`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TextIO

from leyden._lib.options import check_number
from leyden.training.callbacks import Callback, Progress
from leyden.training.live_view import RolloutTally, RunPause, RunView
from leyden.training.metrics import MetricsRow
from leyden.training.screens import Lines, Notebook, Terminal, open_screen

if TYPE_CHECKING:
    from leyden.training.train_loop import TrainLoop, Vessel


class ProgressBar(Callback):
    """Shows iterations, chosen metrics, rates, the time left and what becomes of the rollouts.

    On a terminal and in a notebook, a few lines are redrawn in place; a narrow or low terminal lacks the less important
    ones. Elsewhere, a line is printed for each iteration and, during a long one, every `line_seconds`.

    metrics: names in `loop.metrics` to show, in this order. The first one has a small curve. A value of a validation is
        shown with the iteration in which it was measured.
    unit: what the vessel counts in `loop.progress(done, total)`, as in `48/128 rollouts 91 rollouts/s`. Other counts
        are shown as rates: `loop.progress(48, 128, tokens=960)` as `1,835 tokens/s`; `cost` is shown as it is.
    activity: a name for what the run does, instead of those of its stages (`train`, `val`).
    stream: where to show it; None: the notebook's cell, or `sys.stderr`, as it is when the run starts.
    line_seconds: the longest time without a line off a terminal.
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("reward", "val/reward", "budget_left"),
        *,
        unit: str = "rollouts",
        activity: str | None = None,
        stream: TextIO | None = None,
        line_seconds: float = 60.0,
    ) -> None:
        check_number("line_seconds", line_seconds, above=0)
        self.metrics, self.unit, self.activity = tuple(metrics), unit, activity
        self.tally = RolloutTally()
        """Counts of the run's rollouts. A trainer sets the one to which the run's collector adds."""
        self.earlier_rows: Callable[[], Sequence[MetricsRow]] = tuple
        """Returns the rows of the run's earlier processes, with which the curve of a resumed run begins."""
        self.pause = RunPause()
        """Of the run. A trainer sets the one of a run that can be paused."""
        self._stream, self._line_seconds = stream, line_seconds
        self._run = RunView(self.metrics, unit)
        self._screen: Terminal | Notebook | Lines | None = None
        self._line_due = False
        """Whether a stage has ended since the last line of an iteration."""

    # ---- a loop ----------------------------------------------------------------------------------

    def begin_setup(self) -> None:
        """Show that the run starts, for an algorithm whose set-up takes a while. `on_fit_start` or `close` follows."""
        self._start(0, None, "starting")

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._start(loop.current_iter, loop.max_iters)
        self._run.every = loop.validation_interval
        self._run.update(loop.metrics)
        if loop.current_iter:
            for row in self.earlier_rows():
                if row.iteration <= loop.current_iter:
                    prefix = "val/" if row.stage == "val" else ""
                    self._run.extend_curve({prefix + name: value for name, value in row.metrics.items()})

    def _start(self, iteration: int, total: int | None, stage: str = "") -> None:
        """Start the display, or start it again from the beginning.

        iteration: the number of finished iterations.
        total: iterations in all; None if unknown. Then only the stage is shown until the first iteration has ended.
        """
        self._run = RunView(self.metrics, self.unit, iteration, total, self.tally, stage, self.pause)
        self._line_due = False
        if self._screen is None:
            self._screen = open_screen(self._run, self._stream, self._line_seconds)
        self._screen.state = self._run

    def on_iter_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Print a line for a validation before the iteration."""
        self._end_line()

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.begin_stage(self.activity or "train")
        self._run.total = loop.max_iters

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.begin_stage(self.activity or "val")

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        self._run.stage = self.activity or loop.current_stage
        self._run.progress(progress)

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.end_stage("train", loop.current_iter, loop.metrics)
        self._line_due = True

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.end_stage("val", loop.current_iter, loop.metrics)
        self._line_due = True

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._run.update(loop.metrics)
        self._end_line()

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._end_line()
        self.close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        self.close()

    def close(self, *, keep: bool = True) -> None:
        """End the display. Safe to repeat.

        keep: leave the last state on the terminal.
        """
        screen, self._screen = self._screen, None
        if screen is not None:
            self._run.ended = True
            screen.close(keep=keep)

    def _end_line(self) -> None:
        if self._line_due and isinstance(self._screen, Lines):
            self._screen.end_iteration()
        self._line_due = False

    # ---- a job without a loop --------------------------------------------------------------------

    @contextmanager
    def job(self, stage: str) -> Generator[Self]:
        """Show a job during the block, beginning with a stage, and remove the display at the end. The job calls
        `begin_stage` and `report`, and may count failures in `tally`.
        """
        self._start(0, None, stage)
        try:
            yield self
        finally:
            self.close(keep=False)

    def begin_stage(self, name: str) -> None:
        self._run.begin_stage(name)

    def report(self, done: int, total: int, **counts: float) -> None:
        """Show that `done` of `total` pieces of the job's stage are finished, as `loop.progress` does."""
        self._run.progress(Progress(done, total, time.monotonic() - self._run.stage_started, counts))


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
