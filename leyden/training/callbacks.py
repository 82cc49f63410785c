"""`Callback`: code that a loop calls between its stages; and two callbacks, `EarlyStopping` and `MetricsWriter`.

A callback reads the loop (its counters, metrics, last row) and the vessel. It may call `loop.stop()`, and record a
number of its own with `loop.log(name, value)` or `loop.metrics[name] = value`; it changes nothing else of the loop. To
add one, subclass `Callback` and override the hooks that it needs. If its state must survive a kill, override
`state_dict` and `load_state_dict` too.
"""

from __future__ import annotations

import inspect
import logging
import math
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from leyden._lib.options import NamedOptions, check_number
from leyden.errors import ConfigError
from leyden.training.metrics import MetricsRow, monitored, warn_of_misspelling
from leyden.training.state_files import load_vessel, save_vessel
from leyden.training.writers import CsvWriter

if TYPE_CHECKING:
    from leyden.training.train_loop import TrainLoop, Vessel

HookResult: TypeAlias = Awaitable[None] | None

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the current stage: `done` of `total` pieces are finished."""

    done: int
    total: int
    seconds: float
    """Seconds since the stage began."""
    counts: dict[str, float] = field(default_factory=dict[str, float])
    """Other things counted since the stage began, by name: tokens, model calls."""


class Callback(NamedOptions):
    """Hooks of a `TrainLoop`, all optional, called in the order in which the callbacks were given.

    A hook may be a coroutine function if the loop is driven by `arun`. An error of a hook ends the run, after
    `on_exception` of all callbacks.
    """

    runs_last: ClassVar[int] = 0
    """Callbacks with a higher number are called after those with a lower one.

    `Checkpoint` has 1, because it saves the state that the others have changed. `EarlyStopping`, which may replace the
    policy when a fit ends, has 2, so that the trained policy is saved first."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint.

        Several callbacks of one class are numbered in their order; override this if the order may change between a run
        and its resume.
        """
        return type(self).__name__.lower()

    def check_validations(self, loop: TrainLoop) -> None:
        """Raise ConfigError if this callback needs validations at other times than those of the loop."""

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called once, before any stage.

        Counters and this callback's state are restored already; `loop.current_iter` is 0 on a fresh run.
        """

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called once when the last iteration has ended or the loop was stopped, but not after an error."""

    def on_iter_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before an iteration: one training stage, and a validation when it is due."""

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called after an iteration.

        If the loop was stopped in it, its validation may still be due (`loop.validation_due`).
        """

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before the vessel's step. `loop.current_iter` is the step's number, from 0."""

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called after the step, which `loop.current_iter` counts already.

        The step's row is in `loop.last_row`, and the writers have it.
        """

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before a validation.

        A validation may run outside an iteration: with `validate_first`, and when a stopped run left one due.
        """

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called after a validation, when the writers have its row.

        The row is in `loop.last_row`, and its metrics are in `loop.metrics` as `val/<name>`.
        """

    def on_test_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before a test (`leyden.rl.Trainer.test`), which is no part of a fit."""

    def on_test_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called after a test, when the writers have its row."""

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> HookResult:
        """Called when a stage or hook raises, KeyboardInterrupt and cancellation included.

        The error is raised again after all callbacks have been called.
        """

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        """Called when the vessel reports how far its stage is.

        The call may come from any thread, many times a second. Return quickly; a coroutine function is not allowed
        here.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a kill, as JSON: string keys, lists, numbers, strings, None."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Called before `on_fit_start`, on a resumed run only."""

    def save(self, path: Path) -> None:
        """Write state that is not JSON, such as weights, into the empty directory `path`.

        Only callbacks that override this method get a directory.
        """

    def load(self, path: Path) -> None:
        """Restore from the files that `save` wrote into `path`.

        Called after `load_state_dict`. Copy what is needed: the files may be removed later.
        """


class MonitoringCallback(Callback, ABC):
    """A base of callbacks that compare a metric with earlier values: override `compare`, call `set_monitor`."""

    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    at_validations: bool = False
    """Whether the metric is compared after validations, and not after training stages."""
    _name_checked: bool = False

    def set_monitor(self, monitor: str | None, mode: Literal["max", "min"]) -> None:
        """Set the metric to compare; None: no metric. Raise ConfigError for the mode "min" without a metric.

        mode: whether its highest ("max") or its lowest ("min") value is the best.
        """
        if mode not in ("max", "min"):
            raise ConfigError(f"mode is {mode!r}; choose 'max' or 'min'")
        if monitor is None and mode == "min":
            raise ConfigError(
                "mode is 'min', and no metric is monitored; name one (Checkpoint: monitor, an algorithm: keep_best), or leave "
                "the mode out"
            )
        self.monitor, self.mode = monitor, mode
        self.at_validations = monitor is not None and monitor.startswith("val/")

    @abstractmethod
    def compare(self, loop: TrainLoop, vessel: Vessel, monitor: str) -> HookResult:
        """Compare the metric `monitor` of the stage that has ended."""

    def is_better(self, value: float, other: float, *, by: float = 0.0) -> bool:
        return (value - other if self.mode == "max" else other - value) > by

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Compare a monitored training metric. For a validation metric, warn once if its name looks misspelt."""
        if self.monitor is not None and not self.at_validations:
            return self.compare(loop, vessel, self.monitor)
        if self.monitor is not None and not self._name_checked:
            self._name_checked = True
            warn_of_misspelling(loop.metrics, self.monitor, type(self).__name__)
        return None

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        return self.compare(loop, vessel, self.monitor) if self.monitor and self.at_validations else None


class EarlyStopping(MonitoringCallback):
    """Stop the run when a metric has not improved for `patience` checks in a row.

    monitor: a name in `loop.metrics`; None: "val/reward". A name that begins with `val/` is checked after each
        validation, any other after each training stage.
    min_delta: a gain counts as an improvement if it is larger than this.
    patience: 0 and 1 both stop at the first check without improvement.
    mode: whether a higher ("max") or a lower ("min") value is better.
    baseline: a value that is not better than this does not reset the count, even if it is the best so far.
    restore_best_weights: give the vessel its best state when the fit ends, stopped or not. The last checkpoint holds
        the last state, from which a resumed run continues, and beside it the best one.
    compat: "qlib" for the rules that Qlib took from Keras 2.9. `monitor` is "reward" by default; every metric is
        checked at validations; a missing metric is a warning. Each check counts before it is judged, so patience 0
        stops at the second iteration even if it improved.
    Raise ConfigError, with the nearest names, when the metric is missing. NaN is no improvement. A resumed run
    continues to count; a run that this callback had stopped stops again at once, unless it is given more patience.
    """

    runs_last: ClassVar[int] = 2

    def __init__(
        self,
        monitor: str | None = None,
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Literal["max", "min"] = "max",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        *,
        compat: Literal["qlib"] | None = None,
    ) -> None:
        check_number("patience", patience, at_least=0, whole=True)
        check_number("min_delta", min_delta, at_least=0)
        check_number("baseline", baseline, or_none="no value to beat")
        if compat not in (None, "qlib"):
            raise ConfigError(f"compat is {compat!r}; choose 'qlib', or None")
        self.set_monitor(monitor or ("reward" if compat == "qlib" else "val/reward"), mode)
        self.at_validations = self.at_validations or compat == "qlib"
        self.patience, self.min_delta, self.baseline = patience, min_delta, baseline
        self.restore_best_weights, self.compat = restore_best_weights, compat
        self._best_weights: tempfile.TemporaryDirectory[str] | None = None
        self._reset()

    @property
    def state_key(self) -> str:
        return f"earlystopping:{self.monitor}"

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.best_iter = 0
        """The iteration of the best value, as in `loop.current_iter` and in checkpoints."""
        self._drop_weights()

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Reset the counters of an earlier fit. Stop again if the resumed run had been stopped. Raise ConfigError if
        the metric is one of validations and the loop has none.
        """
        if self.at_validations and not loop.validates:
            raise ConfigError(
                f"EarlyStopping monitors {self.monitor!r}, but the loop has no interval of validations; set "
                "val_every_n_iters (PolicyGradient: val_every_n_steps)"
            )
        if loop.current_iter == 0:
            self._reset()
        elif self.wait >= max(self.patience, 1):
            loop.stop()

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Load the best state into the vessel, if `restore_best_weights` is set.

        `Checkpoint` has saved the last state already.
        """
        if not self.restore_best_weights or self.best is None:
            return None
        if self._best_weights is None:
            logger.warning(
                "the weights of iteration %d, the best, are not in the checkpoint that was resumed; the last ones stay",
                self.best_iter,
            )
            return None
        loading = load_vessel(vessel, Path(self._best_weights.name))
        if inspect.isawaitable(loading):
            return self._drop_weights_after(loading)
        self._drop_weights()
        return None

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        self._drop_weights()

    def compare(self, loop: TrainLoop, vessel: Vessel, monitor: str) -> HookResult:
        """Compare the metric with the best value, and stop the loop when patience is over.

        For a new best, save the vessel's weights if they are to be restored. Return the awaitable of an asynchronous
        save.
        """
        try:
            value = monitored(loop.metrics, monitor, "EarlyStopping")
        except ConfigError as error:
            if self.compat != "qlib":
                raise
            logger.warning("%s", error)
            return None
        improved = self._beats(value, self.best)
        self.wait += 1
        if improved and (self.baseline is None or self._beats(value, self.baseline)):
            self.wait = 0
        if self.compat == "qlib":  # Keras never stops in its first epoch
            stop = self.wait >= self.patience and loop.current_iter > 1
        else:
            stop = self.wait >= max(self.patience, 1)
        if stop:
            loop.stop()
        if not improved:
            return None
        self.best, self.best_iter = value, loop.current_iter
        if not self.restore_best_weights:
            return None
        self._drop_weights()
        self._best_weights = tempfile.TemporaryDirectory(prefix="leyden-best-")
        return save_vessel(vessel, Path(self._best_weights.name))

    def _beats(self, value: float, other: float | None) -> bool:
        if math.isnan(value) or other is None:
            return not math.isnan(value)
        return self.is_better(value, other, by=self.min_delta)

    def _drop_weights(self) -> None:
        if self._best_weights is not None:
            self._best_weights.cleanup()
        self._best_weights = None

    async def _drop_weights_after(self, loading: Awaitable[object]) -> None:
        await loading
        self._drop_weights()

    def state_dict(self) -> dict[str, Any]:
        return {"wait": self.wait, "best": self.best, "best_iter": self.best_iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop_weights()
        self.wait, self.best, self.best_iter = state["wait"], state["best"], state["best_iter"]

    def save(self, path: Path) -> None:
        if self._best_weights is not None:
            shutil.copytree(self._best_weights.name, path, dirs_exist_ok=True)

    def load(self, path: Path) -> None:
        if self.restore_best_weights and any(path.iterdir()):
            self._drop_weights()
            self._best_weights = tempfile.TemporaryDirectory(prefix="leyden-best-")
            shutil.copytree(path, self._best_weights.name, dirs_exist_ok=True)


class MetricsWriter(Callback):
    """Write `train_result.csv` and `validation_result.csv` in one directory, with a row for each stage.

    Columns have the names of `loop.metrics`, so those of validations begin with `val/`. A stage without metrics, and a
    row that lacks a metric of earlier rows, are logged as warnings.
    """

    def __init__(self, dirpath: str | Path) -> None:
        self.dirpath = Path(dirpath)
        self._writers = {
            "train": CsvWriter(self.dirpath / "train_result.csv"),
            "val": CsvWriter(self.dirpath / "validation_result.csv"),
        }
        self._seen: dict[str, set[str]] = {}
        """The metrics that earlier rows of each stage had."""

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        if loop.current_iter == 0:
            self._seen = {}
        for writer in self._writers.values():
            writer.open()

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._write(loop.last_row, "train")

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._write(loop.last_row, "val", prefix="val/")

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        for writer in self._writers.values():
            writer.close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        self.on_fit_end(loop, vessel)

    def _write(self, row: MetricsRow | None, stage: str, *, prefix: str = "") -> None:
        if row is not None:
            seen = self._seen.setdefault(row.stage, set())
            where = f"stage {row.stage!r} of iteration {row.iteration}"
            if not row.metrics:
                logger.warning(
                    "MetricsWriter: %s has no metrics; the vessel returned none, and no episode ended", where
                )
            elif missing := sorted(seen - row.metrics.keys()):
                logger.warning("MetricsWriter: %s lacks %s, which earlier rows have", where, ", ".join(missing))
                seen.difference_update(missing)  # so that each is named once
            seen.update(row.metrics)
            named = {prefix + name: value for name, value in row.metrics.items()}
            self._writers[stage].write(replace(row, metrics=named))

    def state_dict(self) -> dict[str, Any]:
        return {"train": self._writers["train"].state_dict(), "validation": self._writers["val"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._writers["train"].load_state_dict(state["train"])
        self._writers["val"].load_state_dict(state["validation"])
