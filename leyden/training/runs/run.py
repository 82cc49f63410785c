"""`Run`: the run that an algorithm works for, as the algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from leyden.training import Callback, LogWriter, Metrics, Stage
from leyden.training.live_view import RolloutTally


class Reports(Protocol):
    """Receives an algorithm's reports. `RunRecorder` is the shipped implementation."""

    def report(self, metrics: Metrics, *, stage: Stage, iteration: int | None) -> None:
        """Record the metrics of a stage."""
        ...

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Show that `done` of `total` pieces of the current stage are finished."""
        ...

    async def step_ended(self, n_finished: int, goes_on: Callable[[], bool]) -> None:
        """Do what was asked of a run whose algorithm has no `TrainLoop` (`Algorithm.step_ended`)."""
        ...

    def loop_callbacks(self) -> Sequence[Callback]:
        """Return the callbacks for an algorithm's own `TrainLoop`, from which the run then takes its stages."""
        ...

    def loop_writers(self) -> Sequence[LogWriter]:
        """Return the writers for an algorithm's own `TrainLoop`."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as its algorithm sees it: its id and folder, and methods that report to the user."""

    run_id: str
    """The run's id. The ids of its rollouts are derived from it, so that a resumed run finds its own rollouts."""
    directory: Path | None = None
    """The run's folder; None: the run keeps nothing beside its store."""
    resume: bool = False
    """Continue from the newest checkpoint in `directory`."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """JSON data of the caller, kept in `run.json` for a resume."""
    recorder: Reports | None = field(default=None, repr=False, compare=False)
    """Receives the reports; None drops them."""
    tally: RolloutTally | None = field(default=None, repr=False, compare=False)
    """Counts the run's rollouts, for a live view of it; None: no view."""

    def report(self, metrics: Metrics, *, stage: Stage = "train", iteration: int | None = None) -> None:
        """Record the metrics of a stage in the run's folder, its store and its loggers, and show them.

        metrics: names to numbers or short texts. The curve and the summary show `reward`.
        iteration: the number of finished iterations, 1 after the first. None takes the last reported iteration, and for
            `train` one more. A second report of a stage and iteration adds to the first, and replaces metrics of the
            same names.
        May be called from any thread. Does nothing for a run without a recorder. Raises InvalidMetrics for a value that
        is no metric.
        """
        if self.recorder is not None:
            self.recorder.report(metrics, stage=stage, iteration=iteration)

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Show that `done` of `total` pieces of the current stage are finished.

        counts: further numbers counted since the stage began, shown as rates (`tokens=960`); `cost` is shown as it is.
        May be called from any thread, as often as the algorithm likes. Does nothing for a run without a recorder.
        """
        if self.recorder is not None:
            self.recorder.progress(done, total, **counts)
