"""Qlib's callbacks: early stopping by its rules, and checkpoints of one file each."""

from __future__ import annotations

import logging
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from leyden.errors import CheckpointError, ConfigError
from leyden.training import Callback, TrainLoop
from leyden.training import EarlyStopping as NativeEarlyStopping
from leyden.training.callbacks import HookResult
from leyden.training.pth import write_pth

logger = logging.getLogger("leyden.compat.qlib.callbacks")


class EarlyStopping(NativeEarlyStopping):
    """Stop when a metric has not improved for `patience` validations, by the rules of Keras 2.9."""

    def __init__(
        self,
        monitor: str = "reward",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: Literal["min", "max"] = "max",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        super().__init__(monitor, min_delta, patience, mode, baseline, restore_best_weights, compat="qlib")

    def on_fit_start(self, loop: TrainLoop, vessel: Any) -> None:
        """Reset the count of validations without improvement. Warn if the run never validates, because then it is never
        stopped.
        """
        if loop.validates:
            super().on_fit_start(loop, vessel)
        else:
            logger.warning("EarlyStopping needs validations, and the run has none; set val_every_n_iters")


class Checkpoint(Callback):
    """Save the state of trainer and vessel in one file each time, for `torch.load` and `Trainer.fit(ckpt_path=...)`.

    filename: `{iter:03d}`, `{time}` and names of metrics are filled in. An unknown name is an error.
    save_latest: "link" or "copy": `latest.pth` is the newest file; None: there is no such file.
    every_n_iters: as in Qlib, save after iterations n - 1, 2 n - 1, ..., counted from 0.
    time_interval: seconds between saves; the first iteration saves.
    save_on_fit_end: save the last iteration, unless it is saved already.

    Files of earlier runs are overwritten, and none is removed. The link is relative, so the directory can be moved.
    `leyden.training.Checkpoint` keeps complete states and verifies them.
    """

    runs_last = 1

    def __init__(
        self,
        dirpath: Path,
        filename: str = "{iter:03d}.pth",
        save_latest: Literal["link", "copy"] | None = "link",
        every_n_iters: int | None = None,
        time_interval: int | None = None,
        save_on_fit_end: bool = True,
    ) -> None:
        if save_latest not in ("link", "copy", None):
            raise ConfigError(f"save_latest is {save_latest!r}; choose 'link', 'copy' or None")
        self.dirpath = Path(dirpath)
        self.filename = filename
        self.save_latest = save_latest
        self.every_n_iters = every_n_iters
        self.time_interval = time_interval
        self.save_on_fit_end = save_on_fit_end
        self._last_checkpoint_name: str | None = None
        self._last_checkpoint_iter: int | None = None
        self._last_checkpoint_time: float | None = None

    def on_iter_end(self, loop: TrainLoop, vessel: Any) -> HookResult:
        """Save if `every_n_iters` or `time_interval` says so."""
        due = self.every_n_iters is not None and (loop.current_iter + 1) % self.every_n_iters == 0
        if self.time_interval is not None:
            last = self._last_checkpoint_time
            due = due or last is None or time.monotonic() - last >= self.time_interval
        if due:
            self._save(loop, vessel)

    def on_fit_end(self, loop: TrainLoop, vessel: Any) -> HookResult:
        """Save the last iteration if `save_on_fit_end` is set and it is not saved yet."""
        if self.save_on_fit_end and loop.current_iter != self._last_checkpoint_iter:
            self._save(loop, vessel)

    def _save(self, loop: TrainLoop, vessel: Any) -> None:
        """Write a checkpoint, then make `latest.pth` a link to it or a copy (`save_latest`)."""
        self.dirpath.mkdir(parents=True, exist_ok=True)
        self._last_checkpoint_iter = loop.current_iter
        self._last_checkpoint_time = time.monotonic()
        name = self._last_checkpoint_name = self._filled_in(loop)
        write_pth(self.dirpath / name, loop.run_state(), vessel.state_dict())
        latest = self.dirpath / "latest.pth"
        if self.save_latest is None:
            return
        latest.unlink(missing_ok=True)
        if self.save_latest == "link":
            latest.symlink_to(self.dirpath / name if self.dirpath.is_absolute() else name)
        else:
            shutil.copyfile(self.dirpath / name, latest)

    def _filled_in(self, loop: TrainLoop) -> str:
        """Return the file name with iteration, time and metrics filled in. Raise CheckpointError for a metric that the
        iteration does not have.
        """
        values = {"iter": loop.current_iter, "time": datetime.now().strftime("%Y%m%d%H%M%S"), **loop.metrics}
        try:
            return self.filename.format(**cast("dict[str, Any]", values))
        except KeyError as error:
            raise CheckpointError(
                f"Checkpoint's filename {self.filename!r} needs {error}, which iteration {loop.current_iter} does not have; "
                f"it has {', '.join(sorted(values))}"
            ) from None
