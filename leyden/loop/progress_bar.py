"""`ProgressBar`: the callback that shows the progress of a run on a terminal or in a log."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TextIO

from leyden.loop.callbacks import Callback, Progress
from leyden.loop.progress_display import ProgressDisplay
from leyden.loop.train_loop import TrainLoop, Vessel


class ProgressBar(Callback):
    """Shows iterations, chosen metrics, rates and the time left: on a terminal as a live bar,
    elsewhere as plain lines.

    A narrow terminal lacks first the rates, then the bar, then further metrics. Off a terminal, a
    line is printed for each iteration and, during a long one, each minute.

    metrics: names in `loop.metrics` to show, in this order, each with its newest value, which may
        be an earlier iteration's. A name without a value yet is left out.
    unit: what the vessel counts in `loop.progress(done, total)`, as in `48/128 rollouts  91
        rollouts/s`. Other counts are shown as rates: `loop.progress(48, 128, tokens=960)` as
        `1,835 tokens/s`.
    stream: where to show it; None: `sys.stderr`, as it is when the run starts.
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("reward", "val/reward", "budget_left"),
        *,
        unit: str = "rollouts",
        stream: TextIO | None = None,
    ) -> None:
        self.metrics, self.unit = tuple(metrics), unit
        self._display = ProgressDisplay(self.metrics, unit=unit, stream=stream)

    def begin_setup(self) -> None:
        """Show that the run starts, for an algorithm whose set-up takes a while.

        `on_fit_start` or `close` follows.
        """
        self._display.start()
        self._display.begin_stage("starting")

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Start the display, with the metrics of a resumed run."""
        self._display.start(iteration=loop.current_iter, total=loop.max_iters)
        self._display.update(loop.metrics)

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show that the training stage begins."""
        self._display.begin_stage("train")

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show that the validation begins."""
        self._display.begin_stage("val")

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        """Show how far the stage is."""
        self._display.progress(
            progress.done,
            progress.total,
            seconds=progress.seconds,
            counts=progress.counts,
            stage=loop.current_stage,
        )

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show the step's metrics."""
        self._display.end_step(loop.current_iter)
        self._display.update(loop.metrics)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Show the validation's metrics."""
        self._display.update(loop.metrics)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Print a line for the iteration if the output is not a terminal."""
        self._display.update(loop.metrics)
        self._display.end_iteration()

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Leave the last state on the terminal."""
        self.close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        """Leave the last state on the terminal."""
        self.close()

    def close(self) -> None:
        """Leave the last state on the terminal, and end the display. Safe to repeat."""
        self._display.close()


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
