"""Train the agent of `agent.py` by reinforcement learning, and measure it on held-out questions.

    python examples/reasoning_gym/train.py [KIND] [--steps N] [--seed S] [--resume RUN]

The agent calls the gateway over HTTP. The gateway records every token, and passes the call on to
the policy in a process of its own. The run directory keeps the store with every question, answer
and score, the metrics, checkpoints and the trained model.
"""

from __future__ import annotations

import argparse
import csv
import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agent import solve
from tasks import KINDS, Kind, held_out_tasks, train_tasks

from leyden import CsvWriter, IsolatedBackend, OptimParams, PolicyGradient, ProgressBar, Trainer, setup_logging
from leyden.errors import RunInterrupted

HELD_OUT = 500


def train(run_dir: Path, kind: Kind, *, steps: int, seed: int, held_out: int, resume: bool) -> None:
    """Run in `run_dir`, or continue the run that is there."""
    algorithm = PolicyGradient(
        IsolatedBackend(kind.weights, seed=seed, device="cpu", max_batch_rows=128, max_length=128),
        n_steps=steps,
        tasks_per_step=64,
        rollouts_per_task=8,
        minibatch_size=kind.minibatch_size,
        epochs=2,
        optim=OptimParams(learning_rate=5e-4, betas=(0.9, 0.95)),
        schedule=kind.schedule,
        max_tokens=kind.max_tokens,
        timeout_seconds=120.0,
        val_every_n_steps=steps,
        validate_first=True,
        seed=seed,
        callbacks=[ProgressBar(metrics=["reward", "rollouts_per_second", "tokens_per_second"])],
        writers=[CsvWriter(run_dir / "metrics.csv")],
    )
    trainer = Trainer(algorithm=algorithm, concurrency=128, run_dir=run_dir)
    trainer.fit(solve, train_tasks(kind), val_dataset=held_out_tasks(kind, held_out), resume=resume)


def report(run_dir: Path) -> str:
    """Return the result as text, from the run's metrics."""
    measured, steps = read_metrics(run_dir, "val"), read_metrics(run_dir, "train")
    seconds = sum(row["rollout_seconds"] + row["update_seconds"] for row in steps)
    return (
        f"score on {measured[0]['rollouts']:.0f} held-out tasks: {measured[0]['reward']:.3f} before, "
        f"{measured[-1]['reward']:.3f} after {sum(row['rollouts'] for row in steps):,.0f} rollouts ({seconds:.0f} s of training)\n"
        f"run: {run_dir}   model: {run_dir / 'model'}"
    )


def read_metrics(run_dir: Path, stage: str) -> list[dict[str, float]]:
    """Return the rows of one stage, `train` or `val`."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("stage") == stage]
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def main(argv: Sequence[str] | None = None) -> None:
    """See `--help`."""
    parser = argparse.ArgumentParser(
        description="Teach a tiny model what it misunderstands, on tasks of reasoning-gym."
    )
    parser.add_argument(
        "kind", nargs="?", choices=list(KINDS), default="chain_sum", help="which data set (default: chain_sum)"
    )
    parser.add_argument("--steps", type=int, help="training steps; what is enough for the data set if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--held-out", type=int, default=HELD_OUT, metavar="N", help="tasks to measure on, before and after"
    )
    parser.add_argument("--run-dir", type=Path, help="where to keep the run; a new folder under .leyden/ by default")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue the run in this folder, with its own options"
    )
    given = parser.parse_args(argv)

    setup_logging("WARNING")
    run_dir = (
        given.resume
        or given.run_dir
        or Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-gym-{secrets.token_hex(2)}"
    )
    remembered = run_dir / "options.json"
    if given.resume:
        if not remembered.exists():
            parser.error(f"--resume {run_dir}: no run of this example is there ({remembered.name} is missing)")
        options = json.loads(remembered.read_text())
    elif remembered.exists():
        parser.error(f"--run-dir {run_dir} holds a run already; continue it with --resume, or choose another folder")
    else:
        options = {
            "kind": given.kind,
            "steps": given.steps or KINDS[given.kind].steps,
            "seed": given.seed,
            "held_out": given.held_out,
        }
        run_dir.mkdir(parents=True, exist_ok=True)
        remembered.write_text(json.dumps(options))
    print(f"run: {run_dir}", file=sys.stderr)
    try:
        train(run_dir, **{**options, "kind": KINDS[options["kind"]]}, resume=given.resume is not None)
    except RunInterrupted:
        sys.exit(f"stopped; go on with: python {sys.argv[0]} --resume {run_dir}")
    print(report(run_dir))


if __name__ == "__main__":
    main()
