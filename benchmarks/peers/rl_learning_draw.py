"""Draw the curves of `rl_learning`: python rl_learning_draw.py CURVES.json PICTURE.png. Needs matplotlib, which the peers bring along."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot

SIDES = {"sb3": ("Stable-Baselines3 2.9.2", "#d95f02"), "leyden": ("Leyden", "#1f5fa8")}


def main():
    source, picture = map(Path, sys.argv[1:])
    tasks = json.loads(source.read_text())
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(8.4, 3.1), dpi=100)
    for plot, (task, sides) in zip(axes, tasks.items(), strict=True):
        for name, (label, color) in SIDES.items():
            if name not in sides:
                continue
            runs = sides[name]
            steps = np.arange(runs[0]["iteration"], runs[0]["steps"] + 1, runs[0]["iteration"])
            rewards = np.array([np.interp(steps, *np.transpose(run["curve"])) for run in runs])
            plot.fill_between(steps, rewards.min(0), rewards.max(0), color=color, alpha=0.18, linewidth=0)
            plot.plot(steps, rewards.mean(0), color=color, linewidth=1.6, label=label)
        plot.set_title(task, fontsize=10)
        plot.set_xlabel("environment steps", fontsize=9)
        plot.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
        plot.tick_params(labelsize=8)
        plot.grid(alpha=0.25)
    axes[0].set_ylabel("held-out reward", fontsize=9)
    axes[0].legend(loc="lower right", frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Software": None}, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
