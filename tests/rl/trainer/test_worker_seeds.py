"""The trainer's workers have random numbers of their own, and leave this process's generators to the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leyden.rl import AllOne, Trainer, TrainingVessel
from leyden.training import Checkpoint
from tests.rl.parts import Direction, Position, Walk


class Drawing(TrainingVessel[int]):
    """Draws from NumPy's global generator in each stage."""

    def train(self, vector_env: Any) -> Mapping[str, Any]:
        return {**super().train(vector_env), "drawn": float(np.random.random())}


def drawn_in_iteration_2(folder: Path, max_iters: int, *, resume: bool = False) -> float:
    vessel = Drawing(
        simulator_fn=Walk,
        state_interpreter=Position(),
        action_interpreter=Direction(),
        policy=AllOne(Position.observation_space, Direction.action_space),
        train_initial_states=[1, 2],
        episode_per_iter=2,
    )
    checkpoint = Checkpoint(folder, every_n_iters=1)
    trainer = Trainer(max_iters=max_iters, callbacks=[checkpoint], finite_env_type="subproc", concurrency=1)
    trainer.fit(vessel, ckpt_path=checkpoint.latest() if resume else None)
    return float(trainer.metrics["drawn"])


def test_a_resumed_run_draws_what_one_that_was_not_interrupted_draws(tmp_path: Path) -> None:
    np.random.seed(1)
    straight = drawn_in_iteration_2(tmp_path / "straight", 2)
    np.random.seed(1)
    drawn_in_iteration_2(tmp_path / "resumed", 1)
    assert drawn_in_iteration_2(tmp_path / "resumed", 2, resume=True) == straight
