"""`ReportedLoop`: the `TrainLoop` of an algorithm that owns its loop and calls `Run.report`.

Writers and the progress bar see the same rows, counters and hooks as with an `IterativeAlgorithm`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from leyden.errors import ConfigError
from leyden.training import Callback, LogWriter, Metrics, MetricsRow, Stage, TrainLoop
from leyden.training.metrics import clean_metrics


class KeepsEarlierRows:
    """Mixin of a writer that keeps the rows of earlier processes itself: they are not written to it again."""


class ReportedLoop(TrainLoop):
    """A loop that the algorithm's reports move forward. Call `begin`, then `report` and `progress` from any thread,
    then `end`.

    started_at: when the algorithm began (`time.monotonic()`).
    callbacks: their hooks must be synchronous.
    earlier: returns the rows of earlier processes of the run. Writers of a file get them again, because a new file
        replaces the old one.
    """

    def __init__(
        self,
        *,
        started_at: float,
        callbacks: Sequence[Callback] = (),
        writers: Sequence[LogWriter] = (),
        earlier: Callable[[], Sequence[MetricsRow]] = tuple,
    ) -> None:
        super().__init__(max_iters=None, callbacks=callbacks, writers=writers)
        self._reporting = threading.Lock()
        self._earlier = earlier
        self._began_at = started_at
        self._trained = 0
        """The last iteration whose training stage was reported."""
        self._writers_are_open = False
        self._ends_later = False
        """Whether the callbacks' `on_iter_end` of the current iteration is still to be called."""

    def begin(self) -> None:
        """Restore iteration and time from the earlier rows, and call the callbacks' first hook."""
        self._started_at = self._began_at
        rows = self._earlier()
        self.current_iter = self._trained = max((row.iteration for row in rows if row.stage == "train"), default=0)
        self._seconds_before = max((row.seconds for row in rows), default=0.0)
        self._hook("on_fit_start")

    def report(self, metrics: Metrics, *, stage: Stage, iteration: int | None) -> None:
        """Write the row of a stage, and call the hooks that follow the stage.

        A row of another iteration ends the current one first.
        iteration: None takes the current one, and for `train` the next one.
        Raise InvalidMetrics for a value that is no metric, ConfigError for another stage or an iteration that is no
        whole number from 0.
        """
        if stage not in ("train", "val", "test"):
            raise ConfigError(f"stage is {stage!r}; possible: 'train', 'val', 'test'")
        if iteration is not None and (type(iteration) is not int or iteration < 0):
            raise ConfigError(f"iteration is {iteration!r}; it must be a whole number from 0 (1 after the first step)")
        metrics = clean_metrics(metrics, source="Run.report")  # before any change, because it may raise
        with self._reporting:
            if iteration is None:
                iteration = self.current_iter + (stage == "train")
            if iteration != self.current_iter:
                self._end_iteration()
                self.initialize_iter()
            self._ends_later = False
            self.current_iter, self.current_stage = iteration, stage
            self._open_writers()
            self._write(stage, metrics, "Run.report")
            self._stage_started_at = time.monotonic()
            self._hook({"train": "on_train_end", "val": "on_validate_end", "test": "on_test_end"}[stage])
            if stage == "train":
                self._trained = iteration
            if iteration <= self._trained:
                self._hook("on_iter_end")
            else:  # a validation before its iteration's training stage, which may come next, or never
                self._ends_later = True

    def add(self, metrics: Metrics) -> None:
        """Add metrics to those of the stage that was reported last, without calling the hooks again."""
        with self._reporting:
            self._write_own(clean_metrics(metrics, source="Run"), self.current_stage)

    def end(self, error: BaseException | None = None) -> None:
        """End the current iteration, call the callbacks' last hook and close the writers.

        error: why the run has failed; None if it has not.
        """
        with self._reporting:
            self._end_iteration()
            if error is None:
                self._hook("on_fit_end")
            else:
                for callback in self.callbacks:
                    callback.on_exception(self, cast(Any, None), error)
            if self._writers_are_open:
                for writer in self.writers:
                    writer.close()

    def _open_writers(self) -> None:
        """Open the writers, once. A new file gets the rows of earlier processes, unless its writer keeps them."""
        if self._writers_are_open:
            return
        self._writers_are_open = True
        for writer in self.writers:
            writer.open()
            keeps_a_file = getattr(writer, "path", None) is not None and writer.row_kind == "stage"
            if keeps_a_file and not isinstance(writer, KeepsEarlierRows):
                for row in self._earlier():
                    writer.write(row)

    def _end_iteration(self) -> None:
        if self._ends_later:
            self._hook("on_train_end")
            self._hook("on_iter_end")
        self._ends_later = False

    def _hook(self, name: str) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, None)
