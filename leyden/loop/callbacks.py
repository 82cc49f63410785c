"""`Callback`: what happens between the stages of a loop, without the loop knowing it; and the small
ones that ship.

A callback sees the loop (its counters, metrics, last row) and the vessel. It may set
`loop.should_stop`; it changes nothing else of theirs. To add one, subclass `Callback`, override the
hooks that it needs and, if it must survive a kill, `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import inspect
import logging
import math
import shutil
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from leyden.errors import ConfigError
from leyden.loop.metrics import MetricsRow, monitored, warn_of_misspelling
from leyden.loop.state_files import load_vessel, save_vessel
from leyden.loop.writers import CsvWriter
from leyden.options import NamedOptions, check_number

if TYPE_CHECKING:
    from leyden.loop.train_loop import TrainLoop, Vessel

HookResult: TypeAlias = Awaitable[None] | None

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the stage under way."""

    done: int
    total: int
    seconds: float
    """Seconds since the stage began."""
    counts: dict[str, float] = field(default_factory=dict[str, float])
    """Other things counted since the stage began, by name: tokens, model calls."""


class Callback(NamedOptions):
    """Hooks of a `TrainLoop`, all optional, called in the order in which the callbacks were given.

    A hook may be a coroutine function if the loop is driven by `arun`. One that raises ends the
    run; `on_exception` follows.
    """

    runs_last: ClassVar[int] = 0
    """Callbacks with a higher number are called after those with a lower one.

    `Checkpoint` has 1, because it saves the state that the others have changed. A callback that
    replaces the policy when a fit ends has 2, so that the trained policy is saved first."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint.

        Give callbacks of one class keys of their own if their order may change.
        """
        return type(self).__name__.lower()

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called once, before any stage.

        Counters and this callback's state are restored already; `loop.current_iter` is 0 on a fresh
        run.
        """

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called once when the last iteration has ended or the loop was stopped, but not after an
        error.
        """

    def on_iter_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before an iteration: one training stage, and a validation when it is due."""

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called after an iteration.

        If the loop was stopped in it, its validation may still be due (`loop.validation_due`).
        """

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before the vessel's step. `loop.current_iter` is the step's number, from 0."""

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called after the step, when it is counted in `loop.current_iter`.

        Its row is in `loop.last_row`, and the writers have it.
        """

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Called before a validation.

        A validation may run outside an iteration: with `validate_first`, and when a stopped run
        left one due.
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

        The call may come from any thread, many times a second. Return quickly; a coroutine function
        is not allowed here.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a kill, as JSON: string keys, lists, numbers, strings,
        None.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Called before `on_fit_start`, on a resumed run only.
        """

    def save(self, path: Path) -> None:
        """Write state that is not JSON, such as weights, into the empty directory `path`.

        Only callbacks that override this method get a directory.
        """

    def load(self, path: Path) -> None:
        """Restore the files that `save` wrote.

        Called after `load_state_dict`; the files may be gone when this returns and the fit
        continues.
        """


class EarlyStopping(Callback):
    """Stop when a metric has not improved for `patience` looks in a row.

    monitor: a name in `loop.metrics`; None: "val/reward". `val/...` is looked at after each
        validation, any other after each training stage.
    min_delta: a smaller gain is none.
    patience: 0 and 1 both stop at the first look that is no improvement.
    baseline: an improvement that does not beat it does not count as one for `patience` (it is the
        best all the same).
    restore_best_weights: when the fit ends, stopped or not, the vessel is given the state that it
        had at the best look. The last checkpoint holds the last state, so a run that is resumed
        continues from there; the best one is beside it in the checkpoint.
    compat: "qlib" for the rules that Qlib took from Keras 2.9: monitor is "reward" by default, it
        looks at validations for any monitor, and each look counts before it is judged, so that
        patience 0 stops at the second iteration even if it improved. A missing metric is a warning.
    Raise ConfigError with the nearest names when the metric is missing. NaN is no improvement. A
    resumed run continues to count; one that had been stopped stops again at once, unless it is
    given more patience.
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
        if mode not in ("max", "min"):
            raise ConfigError(f"mode is {mode!r}; choose 'max' or 'min'")
        if compat not in (None, "qlib"):
            raise ConfigError(f"compat is {compat!r}; choose 'qlib', or None")
        self.monitor = monitor or ("reward" if compat == "qlib" else "val/reward")
        self.patience, self.mode, self.min_delta, self.baseline = patience, mode, min_delta, baseline
        self.restore_best_weights, self.compat = restore_best_weights, compat
        self._at_validations = compat == "qlib" or self.monitor.startswith("val/")
        self._best_weights: tempfile.TemporaryDirectory[str] | None = None
        self._name_checked = False
        self._reset()

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint: one for each metric."""
        return f"earlystopping:{self.monitor}"

    def _reset(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.best_iter = 0
        """The number that `Checkpoint` gives to the same policy."""
        self._drop_weights()

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Reset the counters of an earlier fit. Stop again if the resumed run had been stopped."""
        if self._at_validations and not loop.validates:
            raise ConfigError(
                f"EarlyStopping monitors {self.monitor!r}, but the loop never validates; set val_every_n_iters"
            )
        if loop.current_iter == 0:
            self._reset()
        elif self.wait >= max(self.patience, 1):
            loop.stop()

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Compare a training metric with the best value.

        The first time, warn of a validation metric that looks misspelt.
        """
        if not self._at_validations:
            return self._look(loop, vessel)
        if not self._name_checked:
            self._name_checked = True
            warn_of_misspelling(loop.metrics, self.monitor, "EarlyStopping")
        return None

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Compare a validation metric with the best value."""
        return self._look(loop, vessel) if self._at_validations else None

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Give the vessel its best state; `Checkpoint` has saved the last one already."""
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
        """Remove the temporary files."""
        self._drop_weights()

    def _look(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Read the metric, stop the loop after `patience` readings without improvement, and keep
        the best.

        Return the vessel's save in progress if this reading is the best and its weights are kept.
        """
        try:
            value = monitored(loop.metrics, self.monitor, "EarlyStopping")
        except ConfigError as error:
            if self.compat != "qlib":
                raise
            logger.warning("%s", error)
            return None
        improved = self._beats(value, self.best)
        self.wait += 1
        if improved and (self.baseline is None or self._beats(value, self.baseline)):
            self.wait = 0
        if self.compat == "qlib":
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
        gain = value - other if self.mode == "max" else other - value
        return gain > self.min_delta

    def _drop_weights(self) -> None:
        if self._best_weights is not None:
            self._best_weights.cleanup()
        self._best_weights = None

    async def _drop_weights_after(self, loading: Awaitable[object]) -> None:
        await loading
        self._drop_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its iteration, and the number of looks since then."""
        return {"wait": self.wait, "best": self.best, "best_iter": self.best_iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._drop_weights()
        self.wait, self.best, self.best_iter = state["wait"], state["best"], state["best_iter"]

    def save(self, path: Path) -> None:
        """Write the best weights, if the fit is to restore them."""
        if self._best_weights is not None:
            shutil.copytree(self._best_weights.name, path, dirs_exist_ok=True)

    def load(self, path: Path) -> None:
        """Reload the best weights."""
        if self.restore_best_weights and any(path.iterdir()):
            self._drop_weights()
            self._best_weights = tempfile.TemporaryDirectory(prefix="leyden-best-")
            shutil.copytree(path, self._best_weights.name, dirs_exist_ok=True)


class MetricsWriter(Callback):
    """Write `train_result.csv` and `validation_result.csv` in one directory: a row for each stage,
    named as in `loop.metrics`.

    Warn of a stage without metrics, and of a metric that a row lacks although earlier rows have it.
    """

    def __init__(self, dirpath: str | Path) -> None:
        self.dirpath = Path(dirpath)
        self._train = CsvWriter(self.dirpath / "train_result.csv")
        self._validation = CsvWriter(self.dirpath / "validation_result.csv")
        self._seen: dict[str, set[str]] = {}

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Begin the files, or continue after the rows that the checkpoint counts."""
        if loop.current_iter == 0:
            self._seen = {}
        self._train.open()
        self._validation.open()

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Write the row."""
        if row := loop.last_row:
            self._warn_of_missing(row)
            self._train.write(row)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Write the row."""
        if row := loop.last_row:
            self._warn_of_missing(row)
            self._validation.write(replace(row, metrics={f"val/{name}": value for name, value in row.metrics.items()}))

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Close the files."""
        self._close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        """Close the files."""
        self._close()

    def _warn_of_missing(self, row: MetricsRow) -> None:
        seen = self._seen.setdefault(row.stage, set())
        place = f"stage {row.stage!r} of iteration {row.iteration}"
        if not row.metrics:
            logger.warning("MetricsWriter: %s has no metrics; the vessel returned none, and no episode ended", place)
        elif missing := sorted(seen - row.metrics.keys()):
            logger.warning("MetricsWriter: %s lacks %s, which earlier rows have", place, ", ".join(missing))
            seen.difference_update(missing)  # named once
        seen.update(row.metrics)

    def _close(self) -> None:
        self._train.close()
        self._validation.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each of the two files."""
        return {"train": self._train.state_dict(), "validation": self._validation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore how far both CSV files were written. They are cut there when they are opened."""
        self._train.load_state_dict(state["train"])
        self._validation.load_state_dict(state["validation"])
