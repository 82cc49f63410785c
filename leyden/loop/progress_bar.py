"""`ProgressBar`: how far the run of a loop is, for the person who watches it or reads its log
later.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TextIO

from leyden.loop.callbacks import Callback, Progress
from leyden.loop.progress_display import ProgressDisplay
from leyden.loop.train_loop import TrainLoop, Vessel


class ProgressBar(Callback):
    """Iterations, chosen metrics, rates, time left; on a terminal as a live bar, elsewhere as plain
    lines.

    A narrow terminal loses the rates, then the bar, and last of all the iteration, the first metric
    and the time left. Off a terminal, an iteration is one line, and a long one gets a line a
    minute.

    metrics: names in `loop.metrics` to show, in this order. The newest value of each is shown, also
        of an earlier iteration; a name without a value yet is left out.
    unit: what the vessel counts in `loop.progress(done, total)`: shown as `48/128 rollouts  91
        rollouts/s`. Other counts that it reports are shown as rates: `loop.progress(48, 128,
        tokens=960)` as `1,835 tokens/s`.
    stream: None: what `sys.stderr` is when the run starts.
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
        """Begin to show."""
        self._display.start(iteration=loop.current_iter, total=loop.max_iters)
        self._display.update(loop.metrics)

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Name the stage."""
        self._display.begin_stage("train")

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Name the stage."""
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
        """Leave the last state on the terminal, and give the terminal back. Safe to repeat."""
        self._display.close()


@contextmanager
def showing_setup(loop: TrainLoop) -> Generator[None]:
    """Let the loop's progress bars show that the run starts, until the block ends and the loop
    begins.
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
