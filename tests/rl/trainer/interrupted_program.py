"""A run that takes long, for tests that send it signals: `python -m tests.rl.trainer.interrupted_program DIR KIND`.

It says the process ids of its workers in the midst of its second iteration, and at the end how many iterations it has done. While there
is a file `DIR/hang`, every step hangs.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from leyden.rl import Trainer
from leyden.training import Callback, Checkpoint, CsvWriter
from tests.rl.parts import Walk, vessel_of


class Slow(Walk):
    """Waits in each step."""

    def __init__(self, initial: tuple[str, int]) -> None:
        super().__init__(initial[1])
        self.hang = Path(initial[0]) / "hang"

    def step(self, action: int) -> None:
        threading.Event().wait(1000 if self.hang.exists() else 0.01)
        super().step(action)


class Speaks(Callback):
    """Says who the workers are."""

    said = False

    def on_progress(self, loop: Any, progress: Any) -> None:
        if loop.current_iter >= 1 and progress.done >= 2 and not self.said:
            self.said = True
            print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)


def main(directory: Path, kind: Any) -> None:
    torch.set_num_threads(1)
    checkpoint = Checkpoint(directory / "checkpoints")
    vessel = vessel_of(episode_per_iter=12, train_initial_states=[(str(directory), at) for at in range(-8, 9)])
    vessel.simulator_fn = Slow
    trainer = Trainer(
        max_iters=50,
        loggers=CsvWriter(directory / "episodes.csv", rows="episode"),
        callbacks=[Speaks(), checkpoint],
        finite_env_type=kind,
        concurrency=4,
        env_options={"workers": 2},
    )
    try:
        trainer.fit(vessel, ckpt_path=checkpoint.latest())
    finally:
        print(trainer.current_iter, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
