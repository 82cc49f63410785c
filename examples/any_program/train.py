"""Train a program that is not Python: `agent.mjs` plays guess-the-number, one process a game.

    python examples/any_program/train.py [--steps N] [--run-dir DIR]

It needs Node 18 or later, and the extra `torch` for the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import leyden as ly
from leyden.cli.demo import WEIGHTS

HERE = Path(__file__).parent
TASKS = [{"secret": secret} for secret in range(10)]


def main() -> None:
    """See `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of 120 games each")
    parser.add_argument("--run-dir", type=Path, help="where to keep the run; a new folder under .leyden/ by default")
    options = parser.parse_args()

    agent = ly.ProcessAgent(["node", str(HERE / "agent.mjs")], reward="last_line", memory_bytes=500_000_000)
    algorithm = ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, device="cpu", max_batch_rows=128, max_length=128),
        n_steps=options.steps,
        tasks_per_step=10,
        rollouts_per_task=12,
        minibatch_size=16,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3, betas=(0.9, 0.99)),
        max_tokens=4,
        timeout_seconds=60.0,
        callbacks=[ly.ProgressBar(metrics=["reward", "rollouts_per_second"])],
        writers=[ly.ConsoleWriter()],
    )
    ly.Trainer(algorithm=algorithm, concurrency=8, run_dir=options.run_dir).fit(agent, TASKS)


if __name__ == "__main__":
    main()
