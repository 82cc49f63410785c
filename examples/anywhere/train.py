"""Train one agent, wherever its runners are: `--strategy` is the one line that changes.

    python examples/anywhere/train.py                    # shm: everything in this process
    python examples/anywhere/train.py --strategy ipc     # a process for each runner, no port
    python examples/anywhere/train.py --strategy cs      # over HTTP; LEYDEN_CURRENT_ROLE spreads it

A tiny model learns guess-the-number by reinforcement learning in eight steps, and is measured
before and after. It takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from agent import TASKS, play

import leyden as ly
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.demo_run import read_metrics
from leyden.errors import RunInterrupted
from leyden.trainer.component_registry import ExecutionStrategyRegistry


def main() -> None:
    """See `--help`."""
    parser = options(__doc__)
    parser.add_argument("--strategy", choices=ExecutionStrategyRegistry, default="shm", help="where runners run")
    parser.add_argument("--runners", type=int, default=2, help="how many there are")
    given = parser.parse_args()
    train(given, strategy=given.strategy, n_runners=given.runners)


def train(given: argparse.Namespace, **places: Any) -> None:
    """Train, and print the result. `places`: the trainer's options that say where runners run."""
    ly.setup_logging("WARNING")
    run_dir = given.run_dir or Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-anywhere"
    trainer = ly.Trainer(algorithm=learning(given.steps, run_dir), store=given.store, run_dir=run_dir, **places)
    validation = [TASKS[number % len(TASKS)] for number in range(given.held_out)]
    try:
        trainer.fit(play, TASKS, val_dataset=validation, resume=given.resume)
    except RunInterrupted as stopped:
        sys.exit(str(stopped) if trainer.strategy.runs_algorithm else 0)  # Ctrl-C is how runners alone end
    if trainer.strategy.runs_algorithm:  # not where only runners were
        print(report(run_dir))


def learning(steps: int, run_dir: Path) -> ly.PolicyGradient:
    """Return GRPO on ten tasks, with twelve games of each in a step."""
    return ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, device="cpu", max_batch_rows=128, max_length=128),
        n_steps=steps,
        tasks_per_step=10,
        rollouts_per_task=12,
        minibatch_size=16,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3, betas=(0.9, 0.99)),
        max_tokens=4,
        timeout_seconds=60.0,
        max_attempts=2,  # a game whose machine has died is played again on another
        val_every_n_steps=steps,
        validate_first=True,
        callbacks=[ly.ProgressBar(metrics=["reward", "rollouts_per_second"])],
        writers=[ly.CsvWriter(run_dir / "metrics.csv")],
    )


def report(run_dir: Path) -> str:
    """Return the share of games won before and after, as text."""
    measured = read_metrics(run_dir, "val")
    games = sum(row["rollouts"] for row in read_metrics(run_dir, "train"))
    return f"won: {measured[0]['reward']:.2f} before, {measured[-1]['reward']:.2f} after {games:,.0f} games"


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every strategy has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of 120 games each")
    parser.add_argument("--held-out", type=int, default=100, metavar="N", help="games to measure on, before and after")
    parser.add_argument("--store", metavar="URL", help="a store that all machines reach; by default a file of the run")
    parser.add_argument("--run-dir", type=Path, help="where to keep the run; a new folder under .leyden/ by default")
    parser.add_argument("--resume", action="store_true", help="continue the run in --run-dir")
    return parser


if __name__ == "__main__":
    main()
