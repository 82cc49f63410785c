"""Draw the curve of one or more runs.

python examples/reasoning_gym/curve.py RUN [RUN ...] --out curve.png
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from train import read_metrics


def main() -> None:
    """See `--help`."""
    parser = argparse.ArgumentParser(description="Draw what the metrics of runs say.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    given = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), dpi=110)
    for number, run in enumerate(given.runs):
        steps, measured = read_metrics(run, "train"), read_metrics(run, "val")
        rollouts = list(itertools.accumulate(row["rollouts"] for row in steps))
        color = f"C{number}"
        axes.plot(rollouts, [row["reward"] for row in steps], color=color, linewidth=1, alpha=0.45)
        axes.plot(
            [0, rollouts[-1]],
            [measured[0]["reward"], measured[-1]["reward"]],
            "o",
            color=color,
            label=f"{run.name}, held out",
        )
    axes.set(xlabel="rollouts", ylabel="mean score", ylim=(0, 1.02), title="chain_sum: GRPO on two cores")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(given.out)


if __name__ == "__main__":
    main()
