"""`IterativeAlgorithm`: an algorithm in steps, on the loop that everything in Leyden shares.

Checkpoints, progress, metrics and resuming are the loop's; an algorithm says what one step is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from leyden.algorithm.base import Algorithm, Dataset
from leyden.loop import Callback, Checkpoint, LogWriter, Metrics, TrainLoop, Vessel
from leyden.loop.callbacks import HookResult
from leyden.loop.progress_bar import showing_setup
from leyden.options import check_several

_SMALL_BYTES: Final = 256 * 2**20
_LARGE_EVERY_SECONDS: Final = 600.0


class IterativeAlgorithm(Algorithm):
    """Override `step`, and `setup`, `validate`, `save`, `load`, `finish`, `teardown` where there
    is something to do.

    Collect a step's rollouts with `self.collector.collect(requests, keep_until=iteration + 1)`:
    they stay, whatever retention says, until the step is in a checkpoint.

    max_iters: steps in all, those before a resume included.
    val_every_n_iters: validate each time this many steps are done; None: never.
    validate_first: validate before the first step too.
    checkpoint_every: save each time this many steps are done, in `checkpoints/` of the run's
        directory; a run without one saves nothing.
    checkpoint_seconds: save after the first step that ends this many seconds after the last save.
        With neither of the two, every step is saved while a checkpoint takes at most 256 MiB, and a
        larger one every ten minutes. The last step is always saved.
    keep_last: how many checkpoints to keep, the newest; None: all.
    keep_best: name of a metric, such as "val/reward": the checkpoint of its best
        value is kept as well.
    best_mode: whether the "max" or the "min" of that metric is the best.
    callbacks, writers: added to the callbacks and loggers of the Trainer.
    """

    holds_runners = True
    resumable = True

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
        """Prepare the first step of this process, as if nothing had been done before.

        Called again when the algorithm is restarted after a failure.
        """

    async def validate(self, iteration: int) -> Metrics:
        """Measure, after `iteration` steps, and change nothing."""
        return {}

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        """Write what the next step depends on into the directory `path`.

        An algorithm that has copied its state may return a function that waits until it is written:
        the next step begins meanwhile.
        """

    async def load(self, path: Path) -> None:
        """Restore the algorithm's state from a checkpoint that `save` wrote."""

    async def finish(self) -> None:
        """Called after the last step, if all steps were done."""

    async def teardown(self) -> None:
        """Called at the end of this process's part in any case."""

    def leaves_rollouts(self, error: BaseException | None) -> bool:
        """Return whether a resumed run needs the rollouts that were enqueued ahead, because steps
        are left.

        error: why the run ended; None: it is finished.
        """
        return error is not None or self._loop.current_iter < self.max_iters

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Report the progress of the current stage to progress bars and other callbacks."""
        self._loop.progress(done, total, **counts)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Set up, resume if the run asks for it, step, and always tear down.

        An algorithm with a result returns it.
        """
        run = self.get_run()
        checkpoint = None
        if run.directory is not None:
            checkpoint = self._new_checkpoint(run.directory / "checkpoints")
        release = _Unpinning(self, checkpoint)
        recorder = run.recorder
        self._loop = self._new_loop(
            (release,) if checkpoint is None else (checkpoint, release),
            callbacks=() if recorder is None else recorder.loop_callbacks(),
            writers=() if recorder is None else recorder.loop_writers(),
        )
        saved = checkpoint.latest() if checkpoint is not None and run.resume else None
        try:
            with showing_setup(self._loop):
                await self.setup(train_dataset, val_dataset)
            await self._loop.arun(self, resume=saved)
            if self._loop.current_iter >= self.max_iters:
                await self.finish()
        except Exception:
            await self.interrupt_runners()
            raise
        finally:
            await self.teardown()

    def _new_checkpoint(self, folder: Path) -> Checkpoint:
        """Return the callback that writes checkpoints. Without a chosen interval, small ones are
        written after every iteration and large ones every `_LARGE_EVERY_SECONDS`.
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
        self, more: Sequence[Callback], *, callbacks: Sequence[Callback] = (), writers: Sequence[LogWriter] = ()
    ) -> TrainLoop:
        return TrainLoop(
            max_iters=self.max_iters,
            val_every_n_iters=self.val_every_n_iters,
            validate_first=self.validate_first,
            callbacks=[_RunnerGate(self), *self.callbacks, *callbacks, *more],
            writers=[*self.writers, *writers],
        )


class _Unpinning(Callback):
    """Unpins the rollouts of the steps that no resume repeats, because a checkpoint holds them."""

    runs_last: ClassVar[int] = 1

    def __init__(self, algorithm: IterativeAlgorithm, checkpoint: Checkpoint | None) -> None:
        self._algorithm, self._checkpoint = algorithm, checkpoint
        self._released = 0

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Begin at the iteration that the run was resumed from."""
        self._released = loop.current_iter

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Release the steps up to the newest checkpoint; the checkpoint callback came before."""
        return None if self._saved(loop) <= self._released else self.on_fit_end(loop, vessel)

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Release the steps up to the newest checkpoint."""
        self._released = self._saved(loop)
        return self._algorithm.collector.release(self._released)

    def _saved(self, loop: TrainLoop) -> int:
        return loop.current_iter if self._checkpoint is None else self._checkpoint.last_saved


class _RunnerGate(Callback):
    """Opens the gate to the runners when the loop starts: set up, and restored where it resumes."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._algorithm.announce_ready()
