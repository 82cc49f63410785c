"""`Checkpoint`: saves loop and vessel together, after everything else of the iteration has
happened.
"""

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

from leyden.errors import CheckpointError, ConfigError, EngineError
from leyden.loop.callbacks import Callback, HookResult
from leyden.loop.checkpoint import CALLBACKS, CheckpointStore, SavedCheckpoint, link_beside
from leyden.loop.metrics import monitored, nearest, warn_of_misspelling
from leyden.loop.pth import write_pth
from leyden.loop.state_files import StatefulVessel, save_vessel
from leyden.options import check_number
from leyden.utils.atomic import ASIDE, fsync_directory

if TYPE_CHECKING:
    from leyden.loop.train_loop import TrainLoop, Vessel

_LATEST_FILE = "latest.pth"

logger = logging.getLogger(__name__)


class Checkpoint(Callback):
    """Save every `every_n_iters` iterations, at a new best, and when the fit ends or is stopped (by
    Ctrl-C too).

    dirpath, config: see `CheckpointStore`.
    filename: ends in `.pth`: save one file more each time, `torch.load(path, weights_only=True)`
        reads it. `{iter:03d}`, `{time}` (local, 20261122T0718 as 20261122071800) and metrics
        (`{val/reward:.2f}`) are filled in. The vessel must have `state_dict()`. A metric that a
        save by time, at the end or after a stop does not have is `nan`; in any other save it is an
        error (CheckpointError).
    save_latest: "link": `latest` or, with a `filename`, `latest.pth` links to the newest one
        (relatively: the directory may be moved); "copy": `latest.pth` is a copy; None: neither.
        "auto": a link if there is a `filename`.
    every_n_iters: after iterations that are multiples of it, as validations are. None: 1, unless
        there is a `time_interval`. A checkpoint of more than `small_bytes` is saved by
        `time_interval` alone; None: whatever its size.
    time_interval: after the first iteration that ends this many seconds after the fit began or the
        last save.
    save_on_fit_end: save what is not saved yet.
    keep: how many to keep, the newest; None: all.
    monitor, mode: a number in `loop.metrics` such as "val/reward", to be made "max" or "min": the
        checkpoint of its best value is made at once and kept beside the newest; see `best`. The
        policy before the first iteration has none.
    clock: seconds that never go back, for `time_interval`.

        checkpoint = Checkpoint(run_dir / "checkpoints") loop = TrainLoop(max_iters=100,
        callbacks=[checkpoint]) await loop.arun(vessel, resume=checkpoint.latest())

    A vessel whose asynchronous `save` returns a function, such as the method that waits for a state
    to be written, has copied its state: the checkpoint is completed while training continues, and
    before the next one begins. If writing it fails (a full disk), the log says so and the run goes
    on with the older checkpoints. The save at the end of the fit is waited for, and its failure is
    raised.

    A fresh run refuses a directory with an earlier run's checkpoints (CheckpointError): its own
    would be mixed with them. A run that is resumed from one of this directory's checkpoints moves
    all newer ones, with their files, into `superseded/`: `latest` no longer finds them, and only a
    newer `superseded` checkpoint of the same iteration replaces them.
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
        self._best_before: tuple[float | None, int | None] = (None, None)
        self.last_saved = 0
        """The iteration of the newest checkpoint that this run wrote or was resumed from."""
        self._small_bytes = small_bytes
        self._clock, self._saved_at = clock, 0.0
        self._n_bytes = 0
        """Bytes of the newest checkpoint, which are compared with `small_bytes`."""
        self._writing: asyncio.Task[None] | None = None
        """The checkpoint that is being written while training continues."""
        self._name_checked = False
        self._reset()

    def _reset(self) -> None:
        self.best_value: float | None = None
        self.best_iter: int | None = None
        self._files: dict[str, str] = {}
        self._gone: set[str] = set()
        """Files that the newest save made superfluous and that a kill may have left behind."""

    def latest(self) -> SavedCheckpoint | None:
        """Return the checkpoint to resume from, or None if there is none yet.

        Raise CheckpointError as `CheckpointStore.latest` does.
        """
        return self.store.latest()

    def best(self) -> SavedCheckpoint | None:
        """Return the checkpoint with the best `monitor` so far, or None if there is none.

        Raise CheckpointError if it is damaged.
        """
        return self.store.best()

    # ---- when ------------------------------------------------------------------------------------

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Refuse a directory that is ahead of this run.

        Remove the files that a killed save left, and write the `.pth` file that it did not reach.
        """
        if self.filename is not None and not isinstance(vessel, StatefulVessel):
            raise ConfigError(
                f"Checkpoint(filename={self.filename!r}) saves vessel.state_dict(), and {type(vessel).__name__} has no "
                "state_dict() and load_state_dict(); leave the filename out"
            )
        self._check_schedule(loop)
        self.last_saved, self._saved_at = loop.current_iter, self._clock()
        if loop.current_iter == 0:
            self._reset()
        newer = self._newer(loop)
        if newer and not loop.goes_on:
            return  # an older checkpoint is looked at, not trained on: nothing of the newer ones changes
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

    def _check_schedule(self, loop: TrainLoop) -> None:
        """Refuse a metric of validations that no save of this run can have."""
        wanted = [self.monitor or "", *(_fields(self.filename) if self.filename else ())]
        validated = [name for name in wanted if name.startswith("val/")]
        if validated and not loop.validates:
            raise ConfigError(f"Checkpoint needs {validated[0]!r}, but the loop never validates; set val_every_n_iters")
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

    def _newer(self, loop: TrainLoop) -> list[int]:
        """Return the steps of the intact checkpoints after this run's iteration.

        Raise CheckpointError unless the run continues an older one.
        """
        newer = [step for step in self.store.steps() if step > loop.current_iter and self.store.damage(step) is None]
        came_from = loop.resumed_from
        if newer and (came_from is None or came_from.resolve().parent != self.store.dirpath.resolve()):
            raise CheckpointError(
                f"{self.store.dirpath} holds the checkpoint of iteration {newer[-1]}, this run is at {loop.current_iter}; "
                "resume from one of its checkpoints (`Checkpoint.latest()` is the newest), or give an empty directory"
            )
        return newer

    def _supersede(self, steps: Sequence[int], loop: TrainLoop) -> None:
        for step in steps:
            file = self._file_of(self.store.load(step).state, step)
            moved = self.store.supersede(step, [] if file is None else [file])
            logger.warning(
                "this run continues from iteration %d: the checkpoint of iteration %d is now %s",
                loop.current_iter,
                step,
                moved,
            )

    def _file_of(self, state: Mapping[str, Any], step: int) -> str | None:
        """Return the name of the `.pth` file that was saved with a checkpoint; None if there is
        none.
        """
        for name, saved in state["callbacks"].items():
            if name.startswith(self.state_key) and (file := saved.get("files", {}).get(str(step))):
                return Path(file).name
        return None

    def _remove_gone(self) -> None:
        for name in self._gone - set(self._files.values()):
            (self.store.dirpath / name).unlink(missing_ok=True)

    def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Record whether a monitored training metric is the best so far, as the best checkpoint's.

        The first time, warn of a validation metric that looks misspelt.
        """
        if self.monitor is None:
            return
        if not self.monitor.startswith("val/"):
            self._look(loop, self.monitor)
        elif not self._name_checked:
            self._name_checked = True
            warn_of_misspelling(loop.metrics, self.monitor, "Checkpoint")

    def on_validate_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Compare a validation metric with the best value."""
        if self.monitor is not None and self.monitor.startswith("val/"):
            self._look(loop, self.monitor)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save when it is time. Until the first checkpoint is written, its size is not known."""
        if self._writing is not None and self._small_bytes is not None and self._n_bytes == 0:
            return self._decide_when_written(loop, vessel)
        iteration = loop.current_iter
        on_schedule = iteration == self.best_iter or (
            self.every_n_iters is not None and not self._is_large() and iteration % self.every_n_iters == 0
        )
        by_time = self.time_interval is not None and self._clock() - self._saved_at >= self.time_interval
        if not on_schedule and not by_time:
            return None
        return self._save(loop, vessel, in_time=on_schedule and not loop.should_stop)

    async def _decide_when_written(self, loop: TrainLoop, vessel: Vessel) -> None:
        await self._written()
        saving = self.on_iter_end(loop, vessel)
        if saving is not None:
            await saving

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save iterations that are not saved yet."""
        if self._writing is not None:
            return self._end(loop, vessel)
        if not self.save_on_fit_end or loop.current_iter <= self.last_saved:
            return None
        return self._save(loop, vessel, in_time=False, at_end=True)

    def on_exception(self, loop: TrainLoop, vessel: Vessel, error: BaseException) -> HookResult:
        """Complete the checkpoint that is being written."""
        return None if self._writing is None else self._written()

    async def _end(self, loop: TrainLoop, vessel: Vessel) -> None:
        await self._written()
        saving = self.on_fit_end(loop, vessel)
        if saving is not None:
            await saving

    def _look(self, loop: TrainLoop, monitor: str) -> None:
        value = monitored(loop.metrics, monitor, "Checkpoint")
        if loop.current_iter == 0 or math.isnan(value):
            return
        if self.best_value is None or (value > self.best_value if self.mode == "max" else value < self.best_value):
            self._best_before = self.best_value, self.best_iter
            self.best_value, self.best_iter = value, loop.current_iter

    # ---- saving ----------------------------------------------------------------------------------

    def _save(self, loop: TrainLoop, vessel: Vessel, *, in_time: bool, at_end: bool = False) -> HookResult:
        """Save now.

        in_time: whether every metric of the filename is expected at this iteration.
        at_end: wait until everything is written.
        """
        if self._writing is not None:
            return self._save_next(loop, vessel, in_time=in_time)
        iteration = loop.current_iter
        name = None if self.filename is None else _filled_in(self.filename, iteration, loop.metrics, strict=in_time)
        saving = save_vessel(vessel, self.store.prepare(iteration))
        if inspect.isawaitable(saving):
            return self._save_async(saving, loop, vessel, name, at_end=at_end)
        self._gather(loop, vessel, name)()
        self._saved(iteration)
        self._saved_at = self._clock()
        return None

    async def _save_next(self, loop: TrainLoop, vessel: Vessel, *, in_time: bool) -> None:
        await self._written()
        saving = self._save(loop, vessel, in_time=in_time)
        if saving is not None:
            await saving

    async def _save_async(
        self, saving: Awaitable[object], loop: TrainLoop, vessel: Vessel, name: str | None, *, at_end: bool
    ) -> None:
        rest = cast("Callable[[], Awaitable[None]] | None", await saving)
        write = self._complete(rest, self._gather(loop, vessel, name), loop.current_iter)
        if rest is not None and not at_end and name is None:
            self._saved_at = self._clock()
            self._writing = asyncio.create_task(self._complete_aside(write, loop.current_iter))
            return
        await _to_the_end(asyncio.ensure_future(write))
        self._saved_at = self._clock()

    async def _complete(
        self, rest: Callable[[], Awaitable[None]] | None, commit: Callable[[], None], iteration: int
    ) -> None:
        if rest is not None:
            await rest()
        await asyncio.to_thread(commit)  # hashes and fsync take their time
        self._saved(iteration)

    async def _complete_aside(self, write: Coroutine[Any, Any, None], iteration: int) -> None:
        """Finish a checkpoint while training goes on. A failed write is logged, because the run can
        go on.
        """
        try:
            await write
        except (OSError, EngineError) as error:
            if self.best_iter == iteration:  # the best that there is on disk is still the one before
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
        """Wait until the checkpoint that is being written is complete. It logs a failure."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await _to_the_end(writing)

    def _gather(self, loop: TrainLoop, vessel: Vessel, name: str | None) -> Callable[[], None]:
        """Collect the state of all parts of the run.

        Return a function that writes it in any thread.
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
        elif self.save_latest == "copy":
            _copy_beside(path, _LATEST_FILE)

    def _saved(self, iteration: int) -> None:
        self.last_saved = iteration
        self._n_bytes = 0 if self._small_bytes is None else self.store.n_bytes(iteration)

    def _is_large(self) -> bool:
        """Return whether saves wait for the `time_interval`."""
        return self._small_bytes is not None and self._n_bytes > self._small_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its iteration, and the names of the `.pth` files."""
        state: dict[str, Any] = {}
        if self.best_iter is not None:
            state |= {"best": self.best_value, "best_iter": self.best_iter}
        if self._files:
            state["files"] = dict(self._files)
        if self._gone:
            state["gone"] = sorted(self._gone)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best_value, self.best_iter = state.get("best"), state.get("best_iter")
        self._files = {step: Path(name).name for step, name in state.get("files", {}).items()}
        self._gone = {Path(name).name for name in state.get("gone", ())}


async def _to_the_end(work: asyncio.Future[None]) -> None:
    """Await `work`. A cancellation waits for it, so that nothing writes on behind the caller's
    back.
    """
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await work
        raise


def _check_filename(filename: str) -> None:
    if not filename.endswith(".pth") or filename == _LATEST_FILE:
        raise ConfigError(f"filename is {filename!r}; it must end in .pth and be another than {_LATEST_FILE}")
    try:
        _fields(filename)
    except ValueError as error:
        raise ConfigError(f"filename is {filename!r}, which cannot be filled in: {error}") from error


def _fields(filename: str) -> list[str]:
    return [field for _, field, _, _ in string.Formatter().parse(filename) if field]


class _Filename(string.Formatter):
    """Format a file name.

    A field is a whole name, such as `val/reward` or `loss.actor`. A missing name is `nan`, or an
    error if strict.
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
    values = {**metrics, "iter": iteration, "time": time.strftime("%Y%m%d%H%M%S")}
    try:
        name = _Filename(strict=strict).vformat(filename, (), values)
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
