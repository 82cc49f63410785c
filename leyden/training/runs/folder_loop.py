"""Record a training loop in a run's folder, for loops that have no event loop and no store."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from leyden._lib.text import error_line
from leyden.training import Callback, LogLevel, LogWriter, MetricsRow, TrainLoop, Vessel
from leyden.training.metrics import Row
from leyden.training.runs.folder import METRICS
from leyden.training.runs.recording import FolderRecorder


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
        """Cut the rows after the restored iteration.

        An iteration of 0 means that there was no checkpoint.
        """
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
