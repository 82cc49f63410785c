"""A small training run for tests to kill: `python resume_child.py RUN_DIR N_STEPS [resume]`."""

from __future__ import annotations

import sys
from pathlib import Path

import leyden as ly
from leyden.demo.agent import play
from leyden.demo.run import WEIGHTS
from leyden.loop import CsvWriter


def main(directory: Path, n_steps: int, *, resume: bool) -> None:
    algorithm = ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, deterministic=True, device="cpu", seed=7, max_length=128),
        n_steps=n_steps,
        tasks_per_step=2,
        rollouts_per_task=6,
        minibatch_size=4,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3),
        max_tokens=6,
        seed=7,
        writers=[CsvWriter(directory / "metrics.csv")],
    )
    trainer = ly.Trainer(
        algorithm=algorithm, llm_proxy=ly.LLMProxy(deterministic_seed=7), concurrency=12, run_dir=directory
    )
    trainer.fit(play, [{"secret": secret} for secret in range(10)], resume=resume)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), resume="resume" in sys.argv)
