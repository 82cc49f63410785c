"""A curve for each algorithm of the zoo, on the zoo's toy problem: say 4.

The policy is the demo's, 117,000 weights, on the embedded engine. Algorithms that run rollouts take 64 of them in each step, and the
curve is their mean reward; ReMax runs 64 greedy ones beside them. The agent that VinePPO trains asks twice, and is rewarded for both
answers. SFT and DPO learn from 128 rollouts of the untrained policy, and the curve is the reward of 64 fresh ones after each step.
Curves: `results/curves/zoo.json`, drawn in `docs/algorithm-zoo/curves.png` (needs matplotlib, of the extra `demo`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import leyden as ly
from benchmarks.harness import ROOT, Peer, Row
from benchmarks.report import RESULTS, Table
from leyden.cli.demo import WEIGHTS
from leyden.objectives.advantages import VinePPOAdvantages
from leyden.training import LogWriter

HEADLINES = ()
SEEDS = range(1)
STEPS = 14
ROLLOUTS = 64
CURVES, PICTURE = RESULTS / "curves" / "zoo.json", ROOT / "docs" / "algorithm-zoo" / "curves.png"
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO": (ly.GRPO, {}),
    "Dr. GRPO": (ly.DrGRPO, {}),
    "RLOO": (ly.RLOO, {"minibatch_size": None}),  # nothing corrects a second step
    "REINFORCE++": (ly.REINFORCEpp, {}),
    "ReMax": (ly.ReMax, {"tasks_per_step": ROLLOUTS, "rollouts_per_task": 1, "minibatch_size": None}),
    "PPO": (ly.PPO, {"epochs": 2}),
    "VinePPO": (ly.VinePPO, {"advantages": VinePPOAdvantages(n_forks=1)}),
    "SFT": (ly.SFT, {"min_reward": 1.0}),
    "DPO": (ly.DPO, {}),
}


class Rewards(LogWriter):
    """Keeps the mean reward of each step of one stage."""

    def __init__(self, stage: str) -> None:
        self.wanted, self.rewards = stage, list[float]()

    def write(self, row: Any) -> None:
        if row.stage == self.wanted and "reward" in row.metrics:
            self.rewards.append(float(row.metrics["reward"]))


@ly.llm_rollout
async def says_four(task: int, llm: ly.LLM) -> float:
    """Ask once; tasks of 100 and more: twice."""
    rewards: list[bool] = []
    for _ in range(1 + (task >= 100)):
        answer = await llm.openai().chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
        )
        rewards.append((answer.choices[0].message.content or "").strip() == "4")
    return statistics.fmean(rewards)


def backend(seed: int, **options: Any) -> ly.EmbeddedBackend:
    return ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=seed, **options)


async def curve_of(name: str, seed: int, recorded: Path) -> list[float]:
    """Return the mean rewards of a run, by step."""
    setting, options = SETTINGS[name]
    is_recorded = name in ("SFT", "DPO")
    options = {
        "n_steps": STEPS,
        "max_tokens": 4,
        "optim": ly.OptimParams(learning_rate=1e-3),
        "warmup_steps": 1,
        "seed": seed,
        **options,
    }
    if is_recorded:
        rewards = Rewards("val")
        options |= {"source": recorded, "items_per_step": 16, "val_every_n_steps": 1, "validate_first": True}
        data: dict[str, Any] = {"train_dataset": None, "val_dataset": list(range(ROLLOUTS))}
    else:
        rewards = Rewards("train")
        options = {"tasks_per_step": 2, "rollouts_per_task": ROLLOUTS // 2, "minibatch_size": 16, **options}
        data = {"train_dataset": [100] if name == "VinePPO" else [0]}
    algorithm = setting(backend(seed, value_head=name == "PPO"), writers=[rewards], **options)
    await ly.Trainer(algorithm=algorithm, store="memory", concurrency=64).afit(says_four, **data)
    return rewards.rewards


async def record(folder: Path) -> None:
    """Run 128 rollouts of the untrained policy, in groups of eight."""
    optim = ly.OptimParams(learning_rate=1e-12)
    algorithm = ly.GRPO(backend(0), n_steps=2, tasks_per_step=8, rollouts_per_task=8, max_tokens=4, optim=optim)
    await ly.Trainer(algorithm=algorithm, run_dir=folder, concurrency=64).afit(says_four, list(range(16)))


def main(peer: Peer | None) -> list[Row | Table]:
    curves: dict[str, list[list[float]]] = {}
    with TemporaryDirectory() as folder:
        recorded = Path(folder) / "run"
        asyncio.run(record(recorded))
        for name in SETTINGS:
            curves[name] = [asyncio.run(curve_of(name, seed, recorded)) for seed in SEEDS]
            print(name, [f"{curve[0]:.2f} -> {curve[-1]:.2f}" for curve in curves[name]], flush=True)
    CURVES.write_text(json.dumps(curves) + "\n")
    draw(curves)
    return [table(curves)]


def table(curves: dict[str, list[list[float]]]) -> Table:
    """Return the rewards at both ends of each run."""
    rows = [
        [
            name,
            ", ".join(f"{run[0]:.2f}" for run in runs),
            ", ".join(f"{statistics.fmean(run[-3:]):.2f}" for run in runs),
        ]
        for name, runs in curves.items()
    ]
    title = (
        f"The toy problem of the algorithm zoo: mean reward of the first step and of the last three of {STEPS}, seed 0"
    )
    return Table(title, ["algorithm", "first", "last"], rows)


def draw(curves: dict[str, list[list[float]]]) -> None:
    """Draw a small plot for each algorithm, with a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(8.4, 6), dpi=100, sharex=True, sharey=True)
    for plot, (name, runs) in zip(axes.flat, curves.items(), strict=True):
        for run in runs:
            plot.plot(range(len(run)), run, color="#1f5fa8", linewidth=1.4, alpha=0.8)
        plot.set_title(name, fontsize=10)
        plot.set_ylim(0, 1.02)
        plot.grid(alpha=0.25)
        plot.tick_params(labelsize=8)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Software": None}, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    draw(json.loads(CURVES.read_text()))
