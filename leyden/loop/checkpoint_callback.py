"""`Checkpoint`: saves loop and vessel together, after everything else of the iteration has happened."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.errors import CheckpointError, ConfigError
from leyden.loop.callbacks import Callback, HookResult
from leyden.loop.checkpoint import CheckpointStore, SavedCheckpoint

if TYPE_CHECKING:
    from leyden.loop.train_loop import TrainLoop, Vessel

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Save every `every_n_iters` iterations, and when the fit ends or is stopped.

    dirpath, keep, config: see `CheckpointStore`.

        checkpoint = Checkpoint(run_dir / "checkpoints")
        loop = TrainLoop(max_iters=100, callbacks=[checkpoint])
        await loop.arun(vessel, resume=checkpoint.latest())

    A fresh run refuses a directory with an earlier run's checkpoints (CheckpointError): its own would be mixed with them.
    """

    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        dirpath: str | Path,
        *,
        every_n_iters: int = 1,
        keep: int = 2,
        save_on_end: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if every_n_iters < 1:
            raise ConfigError(f"every_n_iters is {every_n_iters}; it must be at least 1")
        self.every_n_iters, self.save_on_end = every_n_iters, save_on_end
        self.store = CheckpointStore(dirpath, keep=keep, config=config)
        self.last_saved = 0
        """The iteration of the newest checkpoint that this run wrote or was resumed from."""

    def latest(self) -> SavedCheckpoint | None:
        """The checkpoint to resume from, None if there is none yet. Raises CheckpointError; see `CheckpointStore.latest`."""
        return self.store.latest()

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        """Refuse a directory that is ahead of this run; clear away what a kill left."""
        self.last_saved = loop.current_iter
        for iteration in reversed(self.store.steps()):
            if iteration > loop.current_iter and self.store.damage(iteration) is None:
                raise CheckpointError(
                    f"{self.store.dirpath} holds the checkpoint of iteration {iteration}, this run is at {loop.current_iter}; "
                    "resume from `Checkpoint.latest()`, or give an empty directory"
                )
        self.store.tidy(loop.current_iter)

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save when it is time."""
        return self._save(loop, vessel) if loop.current_iter % self.every_n_iters == 0 else None

    def on_fit_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        """Save iterations that are not saved yet."""
        return self._save(loop, vessel) if self.save_on_end and loop.current_iter > self.last_saved else None

    def _save(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        iteration = loop.current_iter
        saving = vessel.save(self.store.prepare(iteration))
        if inspect.isawaitable(saving):
            return self._save_async(saving, loop, iteration)
        self.store.commit(iteration, loop.state_dict())
        self.last_saved = iteration
        return None

    async def _save_async(self, saving: Awaitable[object], loop: TrainLoop, iteration: int) -> None:
        await saving
        # hashes and fsync take their time; a cancellation waits for them, so that nothing writes on behind its back
        commit = asyncio.ensure_future(asyncio.to_thread(self.store.commit, iteration, loop.state_dict()))
        try:
            await asyncio.shield(commit)
        except asyncio.CancelledError:
            await commit
            raise
        self.last_saved = iteration
