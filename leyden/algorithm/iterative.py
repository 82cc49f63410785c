"""`IterativeAlgorithm`: an algorithm in steps, on the `TrainLoop` that all training in Leyden uses.

The loop does checkpoints, progress, metrics and resuming. An algorithm defines one step.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from leyden._lib.options import check_several
from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.errors import ConfigError
from leyden.training import Callback, Checkpoint, LogWriter, Metrics, TrainLoop, Vessel
from leyden.training.callbacks import HookResult
from leyden.training.progress_bar import showing_setup

logger = logging.getLogger(__name__)

_SMALL_BYTES: Final = 256 * 2**20
"""The largest checkpoint, in bytes, that is written after every step if no interval was chosen."""
_LARGE_EVERY_SECONDS: Final = 600.0
"""The seconds between two larger checkpoints if no interval was chosen."""


class IterativeAlgorithm(Algorithm):
    """Base class of algorithms in steps. Override `step`, and those of `setup`, `validate`, `save`, `load`, `finish`
    and `teardown` that have something to do.

    Collect a step's rollouts with `self.collector.collect(requests, keep_until=iteration + 1)`: they stay, whatever
    retention says, until the step is in a checkpoint.

    max_iters: steps in all, those before a resume included.
    val_every_n_iters: validate each time this many steps are done. None, or more than `max_iters`: once, after the last
        step, if there is a validation set and the algorithm has a `validate`.
    validate_first: validate before the first step too.
    checkpoint_every: save each time this many steps are done, in `checkpoints/` of the run's directory. A run without a
        directory saves nothing.
    checkpoint_seconds: save after the first step that ends this many seconds after the last save. If neither interval
        is given, a checkpoint of at most 256 MiB is saved after every step, and a larger one every ten minutes. The
        last step is always saved.
    keep_last: how many checkpoints to keep, the newest; None: all.
    keep_best: the name of a metric, such as "val/reward". The checkpoint with its best value is kept as well. None: no
        such checkpoint.
    best_mode: whether the "max" or the "min" of that metric is the best.
    callbacks, writers: added to the callbacks and loggers of the Trainer.
    """

    holds_runners = True
    resumable = True
    steps_option = "max_iters"
    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "max_iters": ("max_iters",),
        "val_every_n_iters": ("val_every_n_iters",),
    }
    ends_early: bool = False
    """Whether the algorithm has ended its run before the last step, so that the run is complete."""
    holds_runners_until_request: bool = False
    """Whether runners begin only when `collector` has requested a rollout that is not finished, and not when the loop
    starts. Set it if results depend on the step in which a rollout runs: the queue of a resumed run may hold rollouts
    of a step after the one that is repeated first."""

    def __init__(
        self,
        *,
        max_iters: int,
        val_every_n_iters: int | None = None,
        validate_first: bool = False,
        checkpoint_every: int | None = None,
        checkpoint_seconds: float | None = None,
        keep_last: int | None = 2,
        keep_best: str | None = None,
        best_mode: Literal["max", "min"] = "max",
        callbacks: Sequence[Callback] = (),
        writers: Sequence[LogWriter] = (),
    ) -> None:
        check_several("callbacks", callbacks)
        check_several("writers", writers)
        self.max_iters, self.val_every_n_iters, self.validate_first = max_iters, val_every_n_iters, validate_first
        self.checkpoint_every, self.checkpoint_seconds = checkpoint_every, checkpoint_seconds
        self.keep_last, self.keep_best = keep_last, keep_best
        self.best_mode: Literal["max", "min"] = best_mode
        self.callbacks, self.writers = tuple(callbacks), tuple(writers)
        self._new_checkpoint(Path("checkpoints"))
        self._loop = self._new_loop(())  # refuses wrong options before anything has started

    @abstractmethod
    async def step(self, iteration: int) -> Metrics:
        """Do step `iteration`, counted from 0, and return its metrics."""

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Prepare the first step of this process, as in a new run. A resumed run then calls `load`.

        It is called again when the algorithm is restarted after a failure.
        """

    async def validate(self, iteration: int) -> Metrics:
        """Return metrics measured after `iteration` steps, without training."""
        return {}

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        """Write everything that the next step depends on into the directory `path`.

        An algorithm that writes in the background may return a function that waits until the files are written. The
        next step begins meanwhile, so the state must have been copied.
        """

    async def load(self, path: Path) -> None:
        """Restore the algorithm's state from a checkpoint that `save` wrote."""

    async def finish(self) -> None:
        """Do the last work of a complete run. Called after the last step."""

    async def teardown(self) -> None:
        """Release what `setup` acquired. Called at the end in any case, also after an error."""

    def planned_validations(self, n_val: int) -> int:
        """Return how often a whole run calls `validate`, with `n_val` tasks in the validation set."""
        loop = self._new_loop(())
        loop.validates_at_end = type(self).validate is not IterativeAlgorithm.validate and n_val > 0
        every = loop.validation_interval
        return self.validate_first + (0 if every is None else self.max_iters // every)

    def leaves_rollouts(self, error: BaseException | None) -> bool:
        """Return whether unfinished rollouts stay in the queue when `run` has ended: steps are left, for which a
        resumed run reads them.

        error: what `run` raised; None if it returned.
        """
        return error is not None or self._loop.current_iter < self.max_iters

    def check_change(self, changed: Any) -> None:
        changed._new_loop(())  # a copy was not checked by a constructor
        if changed.val_every_n_iters is None and self.val_every_n_iters is not None:
            raise ConfigError("the number of steps between two validations is None; give a number")
        self._loop.check_validations(changed.val_every_n_iters)

    def options_changed(self, n_finished: int) -> Awaitable[None] | None:
        self._loop.max_iters, self._loop.val_every_n_iters = self.max_iters, self.val_every_n_iters
        return None

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Report the progress of the current stage to progress bars and other callbacks.

        done, total: finished and all items of the stage.
        counts: further numbers to show, by name.
        """
        self._loop.progress(done, total, **counts)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Set up, load the newest checkpoint if the run is resumed, do all steps, and tear down in any case.

        Return None; a subclass may return a result.
        """
        run = self.get_run()
        checkpoint = None
        if run.directory is not None:
            checkpoint = self._new_checkpoint(run.directory / "checkpoints")
        elif self.checkpoint_every or self.checkpoint_seconds or self.keep_best:
            logger.warning("no checkpoint is saved, because the run has no directory; give the Trainer run_dir=")
        rollouts = _Rollouts(self, checkpoint)
        recorder = run.recorder
        self._loop = self._new_loop(
            (rollouts,) if checkpoint is None else (checkpoint, rollouts),
            callbacks=() if recorder is None else recorder.loop_callbacks(),
            writers=() if recorder is None else recorder.loop_writers(),
        )
        validates = type(self).validate is not IterativeAlgorithm.validate
        self._loop.validates_at_end = validates and val_dataset is not None and len(val_dataset) > 0
        saved = checkpoint.latest() if checkpoint is not None and run.resume else None
        try:
            with showing_setup(self._loop):
                await self.setup(train_dataset, val_dataset)
            await self._loop.arun(self, resume=saved)
            if self._loop.current_iter >= self.max_iters or self.ends_early:
                await self.finish()
        except Exception:
            await self.interrupt_runners()
            raise
        finally:
            await self.teardown()

    def _new_checkpoint(self, folder: Path) -> Checkpoint:
        """Return the callback that writes checkpoints. If the user chose no interval, small ones are written after
        every step, and large ones every `_LARGE_EVERY_SECONDS`.
        """
        by_size = self.checkpoint_every is None and self.checkpoint_seconds is None
        return Checkpoint(
            folder,
            every_n_iters=1 if by_size else self.checkpoint_every,
            time_interval=_LARGE_EVERY_SECONDS if by_size else self.checkpoint_seconds,
            small_bytes=_SMALL_BYTES if by_size else None,
            keep=self.keep_last,
            monitor=self.keep_best,
            mode=self.best_mode,
        )

    def _new_loop(
        self, last: Sequence[Callback], *, callbacks: Sequence[Callback] = (), writers: Sequence[LogWriter] = ()
    ) -> TrainLoop:
        """Return the loop of this run.

        last: callbacks that are called after all others.

        Raise ConfigError for wrong options.
        """
        return TrainLoop(
            max_iters=self.max_iters,
            val_every_n_iters=self.val_every_n_iters,
            validate_first=self.validate_first,
            callbacks=[*self.callbacks, *callbacks, *last],
            writers=[*self.writers, *writers],
        )


class _Rollouts(Callback):
    """Lets runners begin when the loop starts, after `setup` and `load`. Unpins the rollouts of steps that are in a
    checkpoint, because no resumed run repeats them.

    Without checkpoints, it unpins the rollouts of each step when the step has ended.
    """

    runs_last: ClassVar[int] = 1

    def __init__(self, algorithm: IterativeAlgorithm, checkpoint: Checkpoint | None) -> None:
        self._algorithm, self._checkpoint = algorithm, checkpoint
        self._released = 0

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._released = loop.current_iter
        if not self._algorithm.holds_runners_until_request:
            self._algorithm.announce_ready()

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        return None if self._saved(loop) <= self._released else self.on_fit_end(loop, vessel)

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        self._released = self._saved(loop)
        return self._algorithm.collector.release(self._released)

    def _saved(self, loop: TrainLoop) -> int:
        return loop.current_iter if self._checkpoint is None else self._checkpoint.last_saved
