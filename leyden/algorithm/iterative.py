"""`IterativeAlgorithm`: an algorithm in steps, on the loop that everything in Leyden shares.

Checkpoints, progress, metrics and resuming are the loop's; an algorithm says what one step is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from leyden.algorithm.base import Algorithm, Dataset
from leyden.loop import Callback, Checkpoint, LogWriter, Metrics, TrainLoop, Vessel
from leyden.loop.callbacks import HookResult
from leyden.loop.progress_bar import showing_setup
from leyden.options import check_several


class IterativeAlgorithm(Algorithm):
    """Override `step`, and `setup`, `validate`, `save`, `load`, `finish`, `teardown` where there is something to do.

    Collect a step's rollouts with `self.collector.collect(requests, keep_until=iteration + 1)`: they
    stay, whatever retention says, until the step is in a checkpoint.

    max_iters: steps in all, those before a resume included.
    val_every_n_iters: validate after every so many steps; None: never.
    validate_first: validate before the first step too.
    checkpoint_every: save after every so many steps, in `checkpoints/` of the run's directory; a run without one saves nothing.
    keep_checkpoints: how many to keep.
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
        checkpoint_every: int = 1,
        keep_checkpoints: int = 2,
        callbacks: Sequence[Callback] = (),
        writers: Sequence[LogWriter] = (),
    ) -> None:
        check_several("callbacks", callbacks)
        check_several("writers", writers)
        self.max_iters, self.val_every_n_iters, self.validate_first = max_iters, val_every_n_iters, validate_first
        self.checkpoint_every, self.keep_checkpoints = checkpoint_every, keep_checkpoints
        self.callbacks, self.writers = tuple(callbacks), tuple(writers)
        self._loop = self._new_loop(())  # refuses wrong options before anything has started

    @abstractmethod
    async def step(self, iteration: int) -> Metrics:
        """Do step `iteration`, counted from 0, and answer what there is to know of it."""

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Before the first step of this process, and again when it is restarted after a failure: begin as if nothing had been done."""

    async def validate(self, iteration: int) -> Metrics:
        """Measure, after `iteration` steps, and change nothing."""
        return {}

    async def save(self, path: Path) -> None:
        """Write what the next step depends on into the directory `path`."""

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote."""

    async def finish(self) -> None:
        """After the last step, when all of them were done."""

    async def teardown(self) -> None:
        """Always, at the end of this process's part."""

    def leaves_rollouts(self, error: BaseException | None) -> bool:
        """Return whether steps are left, for which a resumed run reads the rollouts that were enqueued ahead."""
        return error is not None or self._loop.current_iter < self.max_iters

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Say how far the stage under way is, for whoever watches."""
        self._loop.progress(done, total, **counts)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Set up, resume where the run says so, step, always tear down."""
        run = self.get_run()
        checkpoint = None
        if run.directory is not None:
            checkpoint = Checkpoint(
                run.directory / "checkpoints", every_n_iters=self.checkpoint_every, keep=self.keep_checkpoints
            )
        release = _Release(self, checkpoint)
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

    def _new_loop(
        self, more: Sequence[Callback], *, callbacks: Sequence[Callback] = (), writers: Sequence[LogWriter] = ()
    ) -> TrainLoop:
        return TrainLoop(
            max_iters=self.max_iters,
            val_every_n_iters=self.val_every_n_iters,
            validate_first=self.validate_first,
            callbacks=[_Ready(self), *self.callbacks, *callbacks, *more],
            writers=[*self.writers, *writers],
        )


class _Release(Callback):
    """Unpins the rollouts of the steps that no resume repeats, because a checkpoint holds them."""

    runs_last: ClassVar[int] = 1

    def __init__(self, algorithm: IterativeAlgorithm, checkpoint: Checkpoint | None) -> None:
        self._algorithm, self._checkpoint = algorithm, checkpoint

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Release if the checkpoint callback, which came before, has saved this iteration."""
        if self._checkpoint is not None and self._checkpoint.last_saved < loop.current_iter:
            return None
        return self._algorithm.collector.release(loop.current_iter)

    on_fit_end = on_iter_end


class _Ready(Callback):
    """Opens the gate to the runners when the loop starts: set up, and restored where it resumes."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._algorithm.announce_ready()
