"""`Callback`: what happens between the stages of a loop, without the loop knowing it; and the small ones that ship.

A callback sees the loop (its counters, metrics, last row) and the vessel. It may set `loop.should_stop`; it changes nothing else of theirs.
To add one, subclass `Callback`, override the hooks that it needs and, if it must survive a kill, `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from leyden.errors import ConfigError
from leyden.loop.writers import CsvWriter

if TYPE_CHECKING:
    from leyden.loop.train_loop import TrainLoop, Vessel

__all__ = ["Callback", "EarlyStopping", "HookResult", "MetricsWriter", "Progress"]

HookResult: TypeAlias = Awaitable[None] | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the stage under way has come."""

    done: int
    total: int
    seconds: float
    """Since the stage began."""
    counts: dict[str, float] = field(default_factory=dict[str, float])
    """Other things counted since the stage began, by name: tokens, model calls."""


class Callback:
    """Hooks of a `TrainLoop`, all optional, called in the order in which the callbacks were given.

    A hook may be a coroutine function if the loop is driven by `arun`. One that raises ends the run; `on_exception` follows.
    """

    runs_last: ClassVar[bool] = False
    """Call this one's hooks after those of all callbacks that do not say so (`Checkpoint` saves what the others have learned)."""

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint. Give callbacks of one class keys of their own if their order may change."""
        return type(self).__name__.lower()

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Once, before anything else. Counters and this callback's state are restored already; `loop.current_iter` is 0 on a fresh run."""

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Once, when the last iteration has ended or the loop was stopped. Not after an exception."""

    def on_iter_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Before an iteration: one training stage, and a validation when it is due."""

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """After an iteration. When the loop was stopped in it, its validation may still be due (`loop.validation_due`)."""

    def on_train_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Before the vessel's step. `loop.current_iter` is the step's number, from 0."""

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """After the step: counted in `loop.current_iter`, its row in `loop.last_row` and written."""

    def on_validate_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Before a validation; also outside an iteration, for `validate_first` and for one that a stop left due."""

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """After a validation: its row is in `loop.last_row` and written, its metrics are in `loop.metrics` as `val/<name>`."""

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> HookResult:
        """Something raised (also KeyboardInterrupt and cancellation), and is raised again after all callbacks heard of it."""

    def on_progress(self, loop: TrainLoop, progress: Progress) -> None:
        """The vessel reported how far its stage is: from any thread, any number of times a second. Be quick; no coroutine here."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a kill, as JSON: string keys, lists, numbers, strings, None."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` answered. Called before `on_fit_start`, on a resumed run only."""


class EarlyStopping(Callback):
    """Stop when a metric has not improved for `patience` looks in a row.

    monitor: a name in `loop.metrics`. `val/...` is looked at after each validation, any other after each training stage.
    patience: at least 1.
    min_delta: a smaller gain is none.
    Raises ConfigError when the metric is not there. NaN is no improvement. A resumed run goes on counting; one that had been stopped
    stops again at once, unless it is given more patience.
    """

    def __init__(
        self, monitor: str = "val/reward", *, patience: int, mode: Literal["max", "min"] = "max", min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise ConfigError(f"patience is {patience}; it must be at least 1 look without an improvement")
        if mode not in ("max", "min"):
            raise ConfigError(f"mode is {mode!r}; choose 'max' or 'min'")
        if min_delta < 0:
            raise ConfigError(f"min_delta is {min_delta}; it must be 0 or more")
        self.monitor, self.patience, self.mode, self.min_delta = monitor, patience, mode, min_delta
        self._forget()

    @property
    def state_key(self) -> str:
        """One for each metric."""
        return f"earlystopping:{self.monitor}"

    def _forget(self) -> None:
        self.wait = 0
        self.best: float | None = None
        self.best_iter = 0

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Forget what an earlier fit saw; stop again where a resumed run had stopped."""
        if self.monitor.startswith("val/") and not loop.validates:
            raise ConfigError(
                f"EarlyStopping monitors {self.monitor!r}, but the loop never validates; set val_every_n_iters"
            )
        if loop.current_iter == 0:
            self._forget()
        elif self.wait >= self.patience:
            loop.stop()

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Look at a training metric."""
        if not self.monitor.startswith("val/"):
            self._look(loop)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Look at a validation metric."""
        if self.monitor.startswith("val/"):
            self._look(loop)

    def _look(self, loop: TrainLoop) -> None:
        value = loop.metrics.get(self.monitor)
        if value is None or isinstance(value, str):
            raise ConfigError(f"EarlyStopping monitors {self.monitor!r}, which is no number in {sorted(loop.metrics)}")
        if self._improves(value):
            self.best, self.best_iter, self.wait = float(value), loop.current_iter, 0
            return
        self.wait += 1
        if self.wait >= self.patience:
            loop.stop()

    def _improves(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """The best value, where it was, and the looks since."""
        return {"wait": self.wait, "best": self.best, "best_iter": self.best_iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.wait, self.best, self.best_iter = state["wait"], state["best"], state["best_iter"]


class MetricsWriter(Callback):
    """`train_result.csv` and `validation_result.csv` in one directory, a row for each stage."""

    def __init__(self, dirpath: str | Path) -> None:
        self.dirpath = Path(dirpath)
        self._train = CsvWriter(self.dirpath / "train_result.csv")
        self._validation = CsvWriter(self.dirpath / "validation_result.csv")

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Begin the files, or go on after the rows that the checkpoint counts."""
        self._train.open()
        self._validation.open()

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Write the row."""
        if loop.last_row:
            self._train.write(loop.last_row)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Write the row."""
        if loop.last_row:
            self._validation.write(loop.last_row)

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Close the files."""
        self._close()

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> None:
        """Close the files."""
        self._close()

    def _close(self) -> None:
        self._train.close()
        self._validation.close()

    def state_dict(self) -> dict[str, Any]:
        """Where both files are."""
        return {"train": self._train.state_dict(), "validation": self._validation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut both files there when they are opened."""
        self._train.load_state_dict(state["train"])
        self._validation.load_state_dict(state["validation"])
