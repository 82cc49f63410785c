"""Train a small policy: `python -m tests.rl.trainer.resume_program DIR POLICY KIND KILL_IN_ITER [MAX_ITERS]`.

KILL_IN_ITER: the process kills itself in the middle of this iteration's collect (-1: never). A run that finds checkpoints goes on.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from leyden.rl import Trainer
from leyden.training import Callback, Checkpoint, CsvWriter
from leyden.training.state_files import write_state
from tests.rl.parts import vessel_of


class KilledIn(Callback):
    """Ends the process as a power cut would, some episodes into a collect."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_progress(self, loop: Any, progress: Any) -> None:
        if loop.current_stage == "train" and loop.current_iter == self.iteration and progress.done >= 3:
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: Path, policy: str, kind: Any, kill_in: int, max_iters: int = 10) -> None:
    torch.set_num_threads(1)
    checkpoint = Checkpoint(directory / "checkpoints")
    vessel = vessel_of(policy)
    trainer = Trainer(
        max_iters=max_iters,
        val_every_n_iters=3,
        loggers=CsvWriter(directory / "metrics.csv"),
        callbacks=[KilledIn(kill_in), checkpoint],
        finite_env_type=kind,
        concurrency=3,
    )
    trainer.fit(vessel, ckpt_path=checkpoint.latest())
    (directory / "end").mkdir(exist_ok=True)  # a process may have been killed behind this line
    write_state(vessel.state_dict(), directory / "end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
