"""`Checkpoint`: the callback that saves loop and vessel together, at the end of an iteration."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import shutil
import string
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from leyden._lib.atomic import ASIDE, fsync_directory
from leyden._lib.options import check_number
from leyden.errors import CheckpointError, ConfigError, EngineError
from leyden.training.callbacks import HookResult, MonitoringCallback
from leyden.training.checkpoint import CALLBACKS, CheckpointStore, SavedCheckpoint, link_beside
from leyden.training.metrics import monitored, nearest
from leyden.training.pth import write_pth
from leyden.training.state_files import StatefulVessel, save_vessel

if TYPE_CHECKING:
    from leyden.training.train_loop import TrainLoop, Vessel

_LATEST_FILE = "latest.pth"

logger = logging.getLogger(__name__)


class Checkpoint(MonitoringCallback):
    """Save every `every_n_iters` iterations, at a new best, and when the fit ends or is stopped (by Ctrl-C too).

        checkpoint = Checkpoint(run_dir / "checkpoints")
        loop = TrainLoop(max_iters=100, callbacks=[checkpoint])
        await loop.arun(vessel, resume=checkpoint.latest())

    dirpath: the directory of the run's checkpoints.
    config: JSON that must be the same when the run is resumed.
    filename: a name that ends in `.pth`. Each save then writes such a file as well, which `torch.load(path,
        weights_only=True)` reads; the vessel must have `state_dict()`. `{iter:03d}`, `{time}` (local, such as
        20261122071800) and metrics (`{val/reward:.2f}`) are filled in. A missing metric is `nan` in a save by time, at
        the end or after a stop, and raises CheckpointError in any other save.
    save_latest: "link" keeps a relative link to the newest checkpoint, `latest` or, with a `filename`, `latest.pth`;
        "copy" makes `latest.pth` a copy; None keeps neither. "auto" is "link" with a `filename`, else None.
    every_n_iters: save after iterations that are multiples of this number. None: 1, or never if there is a
        `time_interval`.
    time_interval: save after the first iteration that ends this many seconds after the fit began or the last save.
    save_on_fit_end: save the last iteration when the fit ends, if it is not saved yet.
    keep: how many of the newest checkpoints to keep; None: all.
    monitor: a metric in `loop.metrics` such as "val/reward". The checkpoint of its best value is saved at once and kept
        beside the newest; `best` returns it. The policy before the first iteration does not count.
    mode: whether the highest ("max") or the lowest ("min") value of `monitor` is the best.
    small_bytes: larger checkpoints are not saved by `every_n_iters`, only by `time_interval`; None: no checkpoint
        counts as large.
    clock: returns seconds that never go back, for `time_interval`.

    An asynchronous `save` of the vessel may return a function once it has copied the state. The checkpoint is then
    completed while training continues, before the next one begins. If writing it fails (a full disk), the error is
    logged and the run goes on with the older checkpoints. The save at the end of the fit is waited for, and its failure
    is raised.

    A fresh run refuses a directory with an earlier run's checkpoints (CheckpointError), because its own would be mixed
    with them. A run that is resumed from one of the directory's checkpoints moves all newer ones, with their files,
    into `superseded/`, where `latest` does not find them.
    """

    runs_last: ClassVar[int] = 1

    def __init__(
        self,
        dirpath: str | Path,
        filename: str | None = None,
        save_latest: Literal["auto", "link", "copy"] | None = "auto",
        every_n_iters: int | None = None,
        time_interval: float | None = None,
        save_on_fit_end: bool = True,
        *,
        keep: int | None = 2,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        small_bytes: int | None = None,
        config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_number("every_n_iters", every_n_iters, at_least=1, whole=True, or_none="saves by time_interval alone")
        check_number("time_interval", time_interval, at_least=0, or_none="saves by every_n_iters alone")
        check_number("small_bytes", small_bytes, at_least=0, whole=True, or_none="any size")
        if small_bytes is not None and time_interval is None:
            raise ConfigError(f"small_bytes is {small_bytes}, and larger checkpoints need a time_interval; give one")
        if save_latest not in ("auto", "link", "copy", None):
            raise ConfigError(f"save_latest is {save_latest!r}; choose 'link', 'copy' or None")
        if save_latest == "copy" and filename is None:
            raise ConfigError(
                "save_latest is 'copy', which is for files; choose 'link', or give a filename that ends in .pth"
            )
        if filename is not None:
            if not filename.endswith(".pth") or filename == _LATEST_FILE:
                raise ConfigError(f"filename is {filename!r}; it must end in .pth and be another than {_LATEST_FILE}")
            try:
                _fields(filename)  # raises if it cannot be parsed
            except ValueError as error:
                raise ConfigError(f"filename is {filename!r}, which cannot be filled in: {error}") from error
        if every_n_iters is None and time_interval is None:
            every_n_iters = 1
        self.every_n_iters, self.time_interval, self.save_on_fit_end = every_n_iters, time_interval, save_on_fit_end
        self.set_monitor(monitor, mode)
        self.filename = filename
        self.save_latest = ("link" if filename else None) if save_latest == "auto" else save_latest
        link_latest = filename is None and self.save_latest == "link"
        self.store = CheckpointStore(dirpath, keep=keep, link_latest=link_latest, config=config)
        self._best_before: tuple[float | None, int | None] = (None, None)
        """Value and iteration of the best checkpoint before the current one."""
        self.last_saved = 0
        """The iteration of the newest checkpoint that this run wrote or was resumed from."""
        self._small_bytes = small_bytes
        self._clock, self._saved_at = clock, 0.0
        self._n_bytes = 0
        """Bytes of the newest checkpoint, which are compared with `small_bytes`."""
        self._writing: asyncio.Task[None] | None = None
        """The checkpoint that is being written while training continues."""
        self._reset()

    def _reset(self) -> None:
        self.best_value: float | None = None
        self.best_iter: int | None = None
        self._files: dict[str, str] = {}
        """The `.pth` file of each kept checkpoint, by iteration."""
        self._gone: set[str] = set()
        """`.pth` files that the newest save replaced; they are removed after it, or after a kill."""

    def latest(self) -> SavedCheckpoint | None:
        """Return the checkpoint to resume from, or None if there is none yet.

        Raise CheckpointError if all checkpoints are damaged, or if the newest intact one was made with another `config`
        or by a newer Leyden.
        """
        return self.store.latest()

    def best(self) -> SavedCheckpoint | None:
        """Return the checkpoint with the best `monitor` so far, or None if there is none.

        Raise CheckpointError if it is damaged.
        """
        return self.store.best()

    # ---- when ------------------------------------------------------------------------------------

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Check the directory, and repair what a killed save left behind.

        Raise CheckpointError for checkpoints of another run. Move newer checkpoints of this run into `superseded/`.
        Write a missing `.pth` file, and remove superfluous ones.
        """
        if self.filename is not None and not isinstance(vessel, StatefulVessel):
            raise ConfigError(
                f"Checkpoint(filename={self.filename!r}) saves vessel.state_dict(), and {type(vessel).__name__} has no "
                "state_dict() and load_state_dict(); leave the filename out"
            )
        self.check_validations(loop)
        self.last_saved, self._saved_at = loop.current_iter, self._clock()
        if loop.current_iter == 0:
            self._reset()
        newer = [step for step in self.store.steps() if step > loop.current_iter and self.store.damage(step) is None]
        came_from = loop.resumed_from
        if newer and (came_from is None or came_from.resolve().parent != self.store.dirpath.resolve()):
            raise CheckpointError(
                f"{self.store.dirpath} holds the checkpoint of iteration {newer[-1]}, this run is at {loop.current_iter}; "
                "resume from one of its checkpoints (`Checkpoint.latest()` is the newest), or give an empty directory"
            )
        if newer and not loop.goes_on:
            return  # the loop does no iteration, so the newer checkpoints stay valid
        self._supersede(newer, loop)
        if self.best_iter is not None and self.best_iter not in self.store.steps():
            logger.warning(
                "the best checkpoint so far, of iteration %d, is not in %s; the next one counts as the best",
                self.best_iter,
                self.store.dirpath,
            )
            self.best_value = self.best_iter = None
        self.store.tidy(loop.current_iter, best=self.best_iter)
        self._remove_gone()
        name = self._files.get(str(loop.current_iter))
        if name is not None:  # killed after the directory, before the file or its link
            if not (self.store.dirpath / name).exists():
                write_pth(self.store.dirpath / name, loop.run_state(), cast("StatefulVessel", vessel).state_dict())
            self._point_latest(self.store.dirpath / name)

    def check_validations(self, loop: TrainLoop) -> None:
        """Raise ConfigError if a needed validation metric is never measured, or not before each save."""
        wanted = [self.monitor or "", *(_fields(self.filename) if self.filename else ())]
        validated = [name for name in wanted if name.startswith("val/")]
        if validated and not loop.validates:
            raise ConfigError(
                f"Checkpoint needs {validated[0]!r}, but the loop has no interval of validations; set "
                "val_every_n_iters (PolicyGradient: val_every_n_steps)"
            )
        every, val_every = self.every_n_iters, loop.val_every_n_iters
        if (
            self.filename
            and any(name in validated for name in _fields(self.filename))
            and every
            and val_every
            and every % val_every
        ):
            raise ConfigError(
                f"Checkpoint's filename {self.filename!r} needs a validation at each save, but every_n_iters is {every} and "
                f"val_every_n_iters {val_every}; make the first a multiple of the second"
            )

    def _supersede(self, steps: Sequence[int], loop: TrainLoop) -> None:
        """Move the checkpoints of these iterations, with their `.pth` files, into `superseded/`."""
        for step in steps:
            states = self.store.load(step).state["callbacks"]
            own = (state for key, state in states.items() if key.startswith(self.state_key))
            files = [Path(file).name for state in own if (file := state.get("files", {}).get(str(step)))]
            moved = self.store.supersede(step, files)
            logger.warning(
                "this run continues from iteration %d: the checkpoint of iteration %d is now %s",
                loop.current_iter,
                step,
                moved,
            )

    def _remove_gone(self) -> None:
        for name in self._gone - set(self._files.values()):
            (self.store.dirpath / name).unlink(missing_ok=True)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save if this iteration is the best or on schedule, or if `time_interval` is over.

        With `small_bytes`, wait for the first checkpoint to be written: the schedule depends on its size.
        """
        if self._writing is not None and self._small_bytes is not None and self._n_bytes == 0:
            return self._after_writing(lambda: self.on_iter_end(loop, vessel))
        iteration = loop.current_iter
        is_large = self._small_bytes is not None and self._n_bytes > self._small_bytes  # only `time_interval` saves it
        on_schedule = iteration == self.best_iter or (
            self.every_n_iters is not None and not is_large and iteration % self.every_n_iters == 0
        )
        by_time = self.time_interval is not None and self._clock() - self._saved_at >= self.time_interval
        if not on_schedule and not by_time:
            return None
        return self._save(loop, vessel, needs_metrics=on_schedule and not loop.should_stop)

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        if self._writing is not None:
            return self._after_writing(lambda: self.on_fit_end(loop, vessel))
        if not self.save_on_fit_end or loop.current_iter <= self.last_saved:
            return None
        return self._save(loop, vessel, needs_metrics=False, at_end=True)

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> HookResult:
        return None if self._writing is None else self._written()

    async def _after_writing(self, proceed: Callable[[], HookResult]) -> None:
        await self._written()
        saving = proceed()
        if saving is not None:
            await saving

    def compare(self, loop: TrainLoop, vessel: Vessel, monitor: str) -> None:
        value = monitored(loop.metrics, monitor, "Checkpoint")
        if loop.current_iter == 0 or math.isnan(value):
            return
        if self.best_value is None or self.is_better(value, self.best_value):
            self._best_before = self.best_value, self.best_iter
            self.best_value, self.best_iter = value, loop.current_iter

    # ---- saving ----------------------------------------------------------------------------------

    def _save(self, loop: TrainLoop, vessel: Vessel, *, needs_metrics: bool, at_end: bool = False) -> HookResult:
        """Save now, or after the checkpoint that is being written.

        needs_metrics: raise CheckpointError if a metric of the filename is missing.
        at_end: wait until everything is written.
        """
        if self._writing is not None:
            return self._after_writing(lambda: self._save(loop, vessel, needs_metrics=needs_metrics))
        iteration = loop.current_iter
        name = (
            None if self.filename is None else _filled_in(self.filename, iteration, loop.metrics, strict=needs_metrics)
        )
        saving = save_vessel(vessel, self.store.prepare(iteration))
        if inspect.isawaitable(saving):
            return self._save_async(saving, loop, vessel, name, at_end=at_end)
        self._gather(loop, vessel, name)()
        self._saved(iteration)
        self._saved_at = self._clock()
        return None

    async def _save_async(
        self, saving: Awaitable[object], loop: TrainLoop, vessel: Vessel, name: str | None, *, at_end: bool
    ) -> None:
        """Await the vessel's save, then complete the checkpoint.

        Training goes on meanwhile if the vessel returned a function that writes the rest, unless the fit ends or a
        `.pth` file is written too.
        """
        rest = cast("Callable[[], Awaitable[None]] | None", await saving)
        commit, iteration = self._gather(loop, vessel, name), loop.current_iter

        async def complete() -> None:
            if rest is not None:
                await rest()
            await asyncio.to_thread(commit)  # hashes and fsync take their time
            self._saved(iteration)

        if rest is not None and not at_end and name is None:
            self._saved_at = self._clock()
            self._writing = asyncio.create_task(self._complete_in_background(complete(), iteration))
            return
        await _await_to_end(asyncio.ensure_future(complete()))
        self._saved_at = self._clock()

    async def _complete_in_background(self, write: Coroutine[Any, Any, None], iteration: int) -> None:
        """Finish a checkpoint while training goes on. A failed write is logged, because the run can go on."""
        try:
            await write
        except (OSError, EngineError) as error:
            if self.best_iter == iteration:  # on disk, the best checkpoint is still the one before
                self.best_value, self.best_iter = self._best_before
            logger.error(
                "the checkpoint of iteration %d could not be written (%s); the run goes on, and a resumed one begins "
                "at iteration %d. Is the disk of %s full?",
                iteration,
                error,
                self.last_saved,
                self.store.dirpath,
            )

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await _await_to_end(writing)

    def _gather(self, loop: TrainLoop, vessel: Vessel, name: str | None) -> Callable[[], None]:
        """Collect the state of loop, callbacks and vessel. Return a function that writes it.

        The function may run in another thread while training goes on.
        name: of the `.pth` file; None: none is written.
        """
        iteration, best = loop.current_iter, self.best_iter
        self._gone = set()
        if name is not None:
            kept = self.store.kept(iteration, best=best)
            before, self._files = self._files, {**self._files, str(iteration): name}
            self._files = {step: each for step, each in self._files.items() if int(step) in kept}
            self._gone = set(before.values()) - set(self._files.values())
        loop.save_callback_files(self.store.prepared(iteration) / CALLBACKS)
        state = loop.run_state()
        vessel_state = None if name is None else cast("StatefulVessel", vessel).state_dict()

        def write() -> None:
            self.store.commit(iteration, state, best=best)
            if name is not None:
                path = self.store.dirpath / name
                write_pth(path, state, vessel_state)
                self._point_latest(path)
            self._remove_gone()

        return write

    def _point_latest(self, path: Path) -> None:
        if self.save_latest == "link":
            link_beside(path, _LATEST_FILE)
        elif self.save_latest == "copy":  # durable, and replaced in one step
            aside = path.with_name(ASIDE + _LATEST_FILE)
            shutil.copyfile(path, aside)
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            aside.replace(path.with_name(_LATEST_FILE))
            fsync_directory(path.parent)

    def _saved(self, iteration: int) -> None:
        self.last_saved = iteration
        self._n_bytes = 0 if self._small_bytes is None else self.store.n_bytes(iteration)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.best_iter is not None:
            state |= {"best": self.best_value, "best_iter": self.best_iter}
        if self._files:
            state["files"] = dict(self._files)
        if self._gone:
            state["gone"] = sorted(self._gone)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_value, self.best_iter = state.get("best"), state.get("best_iter")
        self._files = {step: Path(name).name for step, name in state.get("files", {}).items()}
        self._gone = {Path(name).name for name in state.get("gone", ())}


async def _await_to_end(work: asyncio.Future[None]) -> None:
    """Await `work`, also after a cancellation, so that no write is going on when this returns."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await work
        raise


def _fields(filename: str) -> list[str]:
    return [field for _, field, _, _ in string.Formatter().parse(filename) if field]


class _Filename(string.Formatter):
    """Formats a file name whose fields are names of metrics, such as `val/reward` or `loss.actor`.

    A missing metric is `nan`; if strict, it raises CheckpointError.
    """

    def __init__(self, *, strict: bool) -> None:
        super().__init__()
        self._strict = strict

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if field_name not in kwargs and self._strict:
            raise CheckpointError(
                f"the checkpoint's filename needs {{{field_name}}}, which is not there{nearest(field_name, kwargs)}. Save where that "
                "metric exists (every_n_iters a multiple of val_every_n_iters), or leave it out"
            )
        return kwargs.get(field_name, math.nan), field_name


def _filled_in(filename: str, iteration: int, metrics: Mapping[str, Any], *, strict: bool) -> str:
    """Return the filename with its fields filled in. A missing metric is `nan`, or raises CheckpointError if strict."""
    values = {**metrics, "iter": iteration, "time": time.strftime("%Y%m%d%H%M%S")}
    try:
        name = _Filename(strict=strict).vformat(filename, (), values)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's filename {filename!r} cannot be filled in: {error}") from error
    if Path(name).name != name:
        raise CheckpointError(f"the checkpoint's filename {filename!r} becomes {name!r}, which is in another directory")
    return name
