"""Record a training loop in a run's folder, for loops that have no event loop and no store."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from leyden.loop import Callback, LogLevel, LogWriter, MetricsRow, TrainLoop, Vessel
from leyden.loop.metrics import Row
from leyden.runs.folder import METRICS
from leyden.runs.recording import FolderRecorder
from leyden.utils.text import describe_error


class FolderWriter(LogWriter):
    """Adds the rows of stages to a folder's `metrics.jsonl`."""

    def __init__(self, folder: FolderRecorder) -> None:
        super().__init__(LogLevel.CRITICAL)  # it takes nothing of single steps
        self._folder = folder
        self.path = folder.directory / METRICS
        """The writer's file. A loop refuses two writers of one file."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state, because a resumed run cuts the rows by their iterations."""
        return {}

    def write(self, row: Row) -> None:
        """Add the row. A test of the trained policy adds one after the run has ended."""
        assert isinstance(row, MetricsRow)
        self._folder.add_row(row)


class FolderCallback(Callback):
    """Removes the rows after the checkpoint at which the loop continues, because the loop makes
    them again.
    """

    def __init__(self, folder: FolderRecorder) -> None:
        self._folder = folder

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Cut the rows after the restored iteration.

        An iteration of 0 means that there was no checkpoint.
        """
        self._folder.cut_rows(after_iteration=loop.current_iter or -1)


@contextlib.contextmanager
def recording(folder: FolderRecorder) -> Generator[None]:
    """Keep the folder open during a run, and close it with the way in which the run ended.

    Only the first close counts, so the code in the block may close it, too.
    """
    folder.open()
    try:
        yield
    except KeyboardInterrupt:
        folder.close("stopped", "interrupted")
        raise
    except BaseException as error:
        folder.close("failed", f"{type(error).__name__}: {describe_error(error)}")
        raise
    finally:
        folder.close("succeeded")
