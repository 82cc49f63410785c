"""Show a training loop, and record it in a run's folder, for loops that have no event loop and no store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from leyden._lib.text import error_line
from leyden.training import Callback, LogLevel, LogWriter, MetricsRow, ProgressBar, TrainLoop, Vessel
from leyden.training.live_view import RunPause
from leyden.training.metrics import Row
from leyden.training.runs.display import closing_summary, first_line, show
from leyden.training.runs.folder import METRICS
from leyden.training.runs.recorded_runs import read_rows
from leyden.training.runs.recording import FolderRecorder
from leyden.training.runs.run import Run
from leyden.training.runs.run_metrics import metrics_of
from leyden.training.runs.summary import RunSummary


class FolderWriter(LogWriter):
    """Adds the rows of stages to a folder's `metrics.jsonl`."""

    def __init__(self, folder: FolderRecorder) -> None:
        super().__init__(LogLevel.CRITICAL)  # rows of stages only, so no values of single steps
        self._folder = folder
        self.path = folder.directory / METRICS
        """The writer's file. A loop refuses two writers of one file."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state, because a resumed run cuts the rows by their iterations."""
        return {}

    def write(self, row: Row) -> None:
        """Append the row to `metrics.jsonl`, also after the run has ended, as a later test does."""
        assert isinstance(row, MetricsRow)
        self._folder.add_row(row)


class FolderCallback(Callback):
    """Removes the rows after the checkpoint from which the loop continues, because the loop writes them again."""

    def __init__(self, folder: FolderRecorder) -> None:
        self._folder = folder

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Cut the rows after the restored iteration. An iteration of 0 means that there was no checkpoint."""
        self._folder.cut_rows(after_iteration=loop.current_iter or -1)


@contextlib.contextmanager
def recording(folder: FolderRecorder) -> Generator[None]:
    """Open the folder's files for a run, and record at the end of the block how the run ended.

    Without an error it has succeeded, after Ctrl-C it is stopped, after another error it has failed. A block that
    closes the folder itself decides instead, because only the first close counts.
    """
    folder.open()
    try:
        yield
    except KeyboardInterrupt:
        folder.close("stopped", "interrupted")
        raise
    except BaseException as error:
        folder.close("failed", error_line(error))
        raise
    finally:
        folder.close("succeeded")


class KeptRows(Callback):
    """Keeps the rows of a loop without a folder, for its summary. It costs a simulator's steps nothing."""

    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        if loop.last_row is not None:
            self.rows.append(loop.last_row)

    on_validate_end = on_train_end


@contextlib.contextmanager
def showing(
    loop: TrainLoop,
    config: Mapping[str, Any],
    directory: Path | None,
    *,
    unit: str,
    stopped: Callable[[], str | None],
    pause: RunPause | None,
) -> Generator[None]:
    """Show the run of a loop on standard error: a first line, its progress, and after the block a summary.

    A progress bar is added unless one of the loop's callbacks is one. After an error there is no summary.

    config: the run's configuration, as in `run.json`, with at least the algorithm and the data.
    directory: the run's; None for a run without one.
    unit: what the loop reports as its progress.
    stopped: returns after the block why the run ended early; None if it did not.
    pause: of the run; None for one that cannot be paused.
    """
    show(first_line(Run("", directory), config))
    started, kept = time.monotonic(), KeptRows()
    callbacks = loop.callbacks
    added: list[Callback] = [kept]
    bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    if not bars:
        added.append(bar := ProgressBar(unit=unit))
        bars = [bar]
        if directory is not None:
            bar.earlier_rows = lambda: read_rows(directory / METRICS)
        callbacks.insert(sum(callback.runs_last <= bar.runs_last for callback in callbacks), bar)
    if pause is not None:
        for each in bars:
            each.pause = pause
    callbacks.append(kept)  # last, because other callbacks may add to the rows
    try:
        yield
    finally:
        for callback in added:
            callbacks.remove(callback)
    metrics = metrics_of(kept.rows if directory is None else read_rows(directory / METRICS))
    summary = RunSummary(
        directory,
        stopped=stopped(),
        reward=metrics.reward,
        val_reward=metrics.val_reward,
        metrics=metrics.metrics,
        seconds=time.monotonic() - started,
    )
    show(closing_summary(summary))
