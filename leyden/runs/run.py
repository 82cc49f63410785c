"""`Run`: the run that an algorithm works for, as the algorithm sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from leyden.loop import Callback, LogWriter, Metrics, Stage


class Reports(Protocol):
    """Receives an algorithm's reports. `RunRecorder` is the shipped implementation."""

    def report(self, metrics: Metrics, *, stage: Stage, iteration: int | None) -> None:
        """Record the metrics of a stage."""
        ...

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Show how far the stage under way is."""
        ...

    def loop_callbacks(self) -> Sequence[Callback]:
        """Return the callbacks for an algorithm's own `TrainLoop`. After this call, the run takes
        its stages from that loop.
        """
        ...

    def loop_writers(self) -> Sequence[LogWriter]:
        """Return the writers for an algorithm's own `TrainLoop`."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as its algorithm sees it: names, places, and two methods that report to the user."""

    run_id: str
    """Names the run. The ids of its rollouts are derived from it, so that a resumed run finds its
    own rollouts."""
    directory: Path | None = None
    """The run's folder; None: the run keeps nothing beside its store."""
    resume: bool = False
    """Continue from the newest checkpoint in `directory`."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Anything the caller wants beside the checkpoints; written to `run.json`."""
    recorder: Reports | None = field(default=None, repr=False, compare=False)
    """Takes the reports; None: reports are dropped."""

    def report(self, metrics: Metrics, *, stage: Stage = "train", iteration: int | None = None) -> None:
        """Record the metrics of a stage: in the folder, in the store, in the loggers, on the
        screen.

        metrics: names to numbers or short texts. The curve and the summary show `reward`.
        iteration: finished iterations, 1 after the first. None: one more than the last that was
            reported; for `val` and `test`, the last of `train`. A row that was reported before is
            replaced.
        May be called from any thread. Does nothing for a run without a recorder. Raises
        InvalidMetrics for a value that is no metric.
        """
        if self.recorder is not None:
            self.recorder.report(metrics, stage=stage, iteration=iteration)

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Show that `done` of `total` pieces of the stage under way are finished.

        counts: further things counted since the stage began, shown as rates (`tokens=960`).
        May be called from any thread, as often as the algorithm likes. Does nothing for a run
        without a recorder.
        """
        if self.recorder is not None:
            self.recorder.progress(done, total, **counts)
