"""`Checkpoint`: saves loop and vessel together, after everything else of the iteration has happened."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import shutil
import string
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leyden.errors import CheckpointError, ConfigError
from leyden.loop.callbacks import Callback, HookResult
from leyden.loop.checkpoint import CALLBACKS, CheckpointStore, SavedCheckpoint, link_beside
from leyden.loop.pth import write_pth
from leyden.loop.state_files import StatefulVessel, save_vessel
from leyden.utils.atomic import ASIDE, fsync_directory

if TYPE_CHECKING:
    from leyden.loop.train_loop import TrainLoop, Vessel

__all__ = ["Checkpoint"]

_LATEST_FILE = "latest.pth"

logger = logging.getLogger(__name__)


class Checkpoint(Callback):
    """Save every `every_n_iters` iterations, at a new best, and when the fit ends or is stopped (by Ctrl-C too).

    dirpath, config: see `CheckpointStore`.
    every_n_iters: after iterations that are multiples of it, as validations are. None: 1, unless there is a `time_interval`.
    time_interval: after the first iteration that ends so many seconds after the fit began or the last save.
    save_on_fit_end: save what is not saved yet.
    keep: how many to keep, the newest; None: all.
    monitor, mode: a number in `loop.metrics` such as "val/reward", to be made "max" or "min": the checkpoint of its best value is made at
        once and kept beside the newest; see `best`. The policy before the first iteration has none.
    filename: ends in `.pth`: save one file more each time, `torch.load(path, weights_only=True)` reads it. `{iter:03d}`, `{time}` (local,
        20261122T0718 as 20261122071800) and metrics (`{val/reward:.2f}`) are filled in. The vessel must have `state_dict()`.
    save_latest: "link": `latest` or, with a `filename`, `latest.pth` links to the newest one (relatively: the directory may be moved);
        "copy": `latest.pth` is a copy; None: neither. "auto": a link if there is a `filename`.
    clock: seconds that never go back, for `time_interval`.

        checkpoint = Checkpoint(run_dir / "checkpoints")
        loop = TrainLoop(max_iters=100, callbacks=[checkpoint])
        await loop.arun(vessel, resume=checkpoint.latest())

    A fresh run refuses a directory with an earlier run's checkpoints (CheckpointError): its own would be mixed with them.
    """

    runs_last: ClassVar[int] = 1

    def __init__(
        self,
        dirpath: str | Path,
        *,
        every_n_iters: int | None = None,
        time_interval: float | None = None,
        save_on_fit_end: bool = True,
        keep: int | None = 2,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        filename: str | None = None,
        save_latest: Literal["auto", "link", "copy"] | None = "auto",
        config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_n_iters is not None and every_n_iters < 1:
            raise ConfigError(f"every_n_iters is {every_n_iters}; it must be at least 1")
        if time_interval is not None and not time_interval >= 0:
            raise ConfigError(f"time_interval is {time_interval}; it must be 0 seconds or more")
        if mode not in ("max", "min"):
            raise ConfigError(f"mode is {mode!r}; choose 'max' or 'min'")
        if save_latest not in ("auto", "link", "copy", None):
            raise ConfigError(f"save_latest is {save_latest!r}; choose 'link', 'copy' or None")
        if save_latest == "copy" and filename is None:
            raise ConfigError(
                "save_latest is 'copy', which is for files; choose 'link', or give a filename that ends in .pth"
            )
        if filename is not None:
            _check_filename(filename)
        if every_n_iters is None and time_interval is None:
            every_n_iters = 1
        self.every_n_iters, self.time_interval, self.save_on_fit_end = every_n_iters, time_interval, save_on_fit_end
        self.monitor, self.mode, self.filename = monitor, mode, filename
        self.save_latest = ("link" if filename else None) if save_latest == "auto" else save_latest
        link_latest = filename is None and self.save_latest == "link"
        self.store = CheckpointStore(dirpath, keep=keep, link_latest=link_latest, config=config)
        self.last_saved = 0
        """The iteration of the newest checkpoint that this run wrote or was resumed from."""
        self._clock, self._saved_at = clock, 0.0
        self._forget()

    def _forget(self) -> None:
        self.best_value: float | None = None
        self.best_iter: int | None = None
        self._files: dict[str, str] = {}

    def latest(self) -> SavedCheckpoint | None:
        """The checkpoint to resume from, None if there is none yet. Raises CheckpointError; see `CheckpointStore.latest`."""
        return self.store.latest()

    def best(self) -> SavedCheckpoint | None:
        """The one with the best `monitor` so far; None if there is none. Raises CheckpointError if it is damaged."""
        return self.store.best()

    # ---- when ----------------------------------------------------------------------------------------------------------

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Refuse a directory that is ahead of this run; clear away what a kill left, and make good what it left out."""
        if self.filename is not None and not isinstance(vessel, StatefulVessel):
            raise ConfigError(
                f"Checkpoint(filename={self.filename!r}) saves vessel.state_dict(), and {type(vessel).__name__} has no "
                "state_dict() and load_state_dict(); leave the filename out"
            )
        self.last_saved, self._saved_at = loop.current_iter, self._clock()
        if loop.current_iter == 0:
            self._forget()
        for iteration in reversed(self.store.steps()):
            if iteration > loop.current_iter and self.store.damage(iteration) is None:
                raise CheckpointError(
                    f"{self.store.dirpath} holds the checkpoint of iteration {iteration}, this run is at {loop.current_iter}; "
                    "resume from `Checkpoint.latest()`, or give an empty directory"
                )
        if self.best_iter is not None and self.best_iter not in self.store.steps():
            logger.warning(
                "the best checkpoint so far, of iteration %d, is not in %s; the next one counts as the best",
                self.best_iter,
                self.store.dirpath,
            )
            self.best_value = self.best_iter = None
        self.store.tidy(loop.current_iter, best=self.best_iter)
        name = self._files.get(str(loop.current_iter))
        if name is not None:  # killed after the directory, before the file or its link
            if not (self.store.dirpath / name).exists():
                write_pth(self.store.dirpath / name, loop.state_dict(), _state_of(vessel))
            self._point_latest(self.store.dirpath / name)

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Look at a training metric."""
        if self.monitor is not None and not self.monitor.startswith("val/"):
            self._look(loop, self.monitor)

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Look at a validation metric."""
        if self.monitor is not None and self.monitor.startswith("val/"):
            self._look(loop, self.monitor)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save when it is time."""
        return self._save(loop, vessel) if self._due(loop.current_iter) else None

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save iterations that are not saved yet."""
        return self._save(loop, vessel) if self.save_on_fit_end and loop.current_iter > self.last_saved else None

    def _due(self, iteration: int) -> bool:
        return (
            iteration == self.best_iter
            or (self.every_n_iters is not None and iteration % self.every_n_iters == 0)
            or (self.time_interval is not None and self._clock() - self._saved_at >= self.time_interval)
        )

    def _look(self, loop: TrainLoop, monitor: str) -> None:
        value = loop.metrics.get(monitor)
        if value is None or isinstance(value, str):
            raise ConfigError(f"Checkpoint monitors {monitor!r}, which is no number in {sorted(loop.metrics)}")
        if loop.current_iter == 0 or math.isnan(value):
            return
        if self.best_value is None or (value > self.best_value if self.mode == "max" else value < self.best_value):
            self.best_value, self.best_iter = float(value), loop.current_iter

    # ---- saving --------------------------------------------------------------------------------------------------------

    def _save(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        iteration = loop.current_iter
        name = None if self.filename is None else _filled_in(self.filename, iteration, loop.metrics)
        saving = save_vessel(vessel, self.store.prepare(iteration))
        if inspect.isawaitable(saving):
            return self._save_async(saving, loop, vessel, name)
        self._gather(loop, vessel, name)()
        self._saved(iteration)
        return None

    async def _save_async(self, saving: Awaitable[object], loop: TrainLoop, vessel: Vessel, name: str | None) -> None:
        await saving
        iteration = loop.current_iter
        # hashes and fsync take their time; a cancellation waits for them, so that nothing writes on behind its back
        commit = asyncio.ensure_future(asyncio.to_thread(self._gather(loop, vessel, name)))
        try:
            await asyncio.shield(commit)
        except asyncio.CancelledError:
            await commit
            raise
        self._saved(iteration)

    def _gather(self, loop: TrainLoop, vessel: Vessel, name: str | None) -> Callable[[], None]:
        """All that has to be asked of others, now; answers what writes it, in any thread."""
        iteration, best = loop.current_iter, self.best_iter
        gone: set[str] = set()
        if name is not None:
            kept = self.store.kept(iteration, best=best)
            before, self._files = self._files, {**self._files, str(iteration): name}
            self._files = {step: each for step, each in self._files.items() if int(step) in kept}
            gone = set(before.values()) - set(self._files.values())
        loop.save_callback_files(self.store.prepared(iteration) / CALLBACKS)
        state = loop.state_dict()
        vessel_state = None if name is None else _state_of(vessel)

        def write() -> None:
            self.store.commit(iteration, state, best=best)
            if name is not None:
                self._write_file(name, state, vessel_state)
            for each in gone:
                (self.store.dirpath / each).unlink(missing_ok=True)

        return write

    def _write_file(self, name: str, loop_state: Mapping[str, Any], vessel_state: Any) -> None:
        path = self.store.dirpath / name
        write_pth(path, loop_state, vessel_state)
        self._point_latest(path)

    def _point_latest(self, path: Path) -> None:
        if self.save_latest == "link":
            link_beside(path, _LATEST_FILE)
        elif self.save_latest == "copy":
            _copy_beside(path, _LATEST_FILE)

    def _saved(self, iteration: int) -> None:
        self.last_saved, self._saved_at = iteration, self._clock()

    def state_dict(self) -> dict[str, Any]:
        """The best value, where it was, and the names of the files."""
        state: dict[str, Any] = {}
        if self.best_iter is not None:
            state |= {"best": self.best_value, "best_iter": self.best_iter}
        if self._files:
            state["files"] = dict(self._files)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        self.best_value, self.best_iter = state.get("best"), state.get("best_iter")
        self._files = {step: Path(name).name for step, name in state.get("files", {}).items()}


def _state_of(vessel: Any) -> Any:
    return vessel.state_dict()


def _check_filename(filename: str) -> None:
    if not filename.endswith(".pth") or filename == _LATEST_FILE:
        raise ConfigError(f"filename is {filename!r}; it must end in .pth and be another than {_LATEST_FILE}")
    try:
        list(string.Formatter().parse(filename))
    except ValueError as error:
        raise ConfigError(f"filename is {filename!r}, which cannot be filled in: {error}") from error


class _Filename(string.Formatter):
    """Fields are whole names, `val/reward` or `loss.actor`; nothing is looked up in them."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name not in kwargs:
            raise CheckpointError(
                f"the checkpoint's filename needs {{{field_name}}}, which is not among {sorted(kwargs)}; save where that metric exists "
                "(every_n_iters a multiple of val_every_n_iters), or leave it out"
            )
        return kwargs[field_name], field_name


def _filled_in(filename: str, iteration: int, metrics: Mapping[str, Any]) -> str:
    values = {**metrics, "iter": iteration, "time": time.strftime("%Y%m%d%H%M%S")}
    try:
        name = _Filename().vformat(filename, (), values)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's filename {filename!r} cannot be filled in: {error}") from error
    if Path(name).name != name:
        raise CheckpointError(f"the checkpoint's filename {filename!r} becomes {name!r}, which is in another directory")
    return name


def _copy_beside(path: Path, name: str) -> None:
    aside = path.with_name(ASIDE + name)
    shutil.copyfile(path, aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path.with_name(name))
    fsync_directory(path.parent)
