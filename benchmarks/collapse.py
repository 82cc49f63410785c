"""How often a run of a toy task goes back to earlier weights, with nothing planted: 40 runs at the rates of their examples and tests.

No run has a fault, so what counts is how many go back (`restored_to` in their metrics), and whether they had fallen. A run that has
finished is kept in `results/curves/collapse.json` and is not made again, so the benchmark can be stopped and started.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import leyden as ly
from benchmarks.harness import ROOT, Peer, Row
from benchmarks.report import RESULTS, Table
from benchmarks.zoo import SETTINGS, backend, says_four
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.demo_agent import play
from leyden.objectives.advantages import VinePPOAdvantages
from leyden.training import LogWriter

HEADLINES = ()
CURVES = RESULTS / "curves" / "collapse.json"
CITIES = ["Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Rome", "Delhi", "Quito"]
Options = dict[str, Any]


class Rows(LogWriter):
    """Keeps the rewards, and where the run went back."""

    def __init__(self) -> None:
        self.rewards, self.restored = list[float](), dict[int, int]()

    def write(self, row: Any) -> None:
        if row.stage == "train":
            self.rewards.append(round(float(row.metrics["reward"]), 4))
            if "restored_to" in row.metrics:
                self.restored[row.iteration] = int(row.metrics["restored_to"])


@ly.llm_rollout
async def says_even(task: int, llm: ly.LLM) -> float:
    """A reward with partial credit and noise: an even digit is right in nine of ten cases, any other digit is worth 0.2."""
    answer = await llm.openai().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
    )
    text = (answer.choices[0].message.content or "").strip()
    if not text.isdigit():
        return 0.0
    return float(random.random() < 0.9) if int(text) % 2 == 0 else 0.2


def weather() -> Any:
    """Return the agent of the page `docs/training.md`."""
    found: dict[str, Any] = {"__name__": "weather"}
    exec((ROOT / "docs" / "training.md").read_text().partition("```python\n")[2].partition("```")[0], found)
    return found["agent"]


def runs() -> Iterator[tuple[str, int, Any, list[Any], Any, Options]]:
    """Yield name and seed of each run, its agent, its tasks, its algorithm and the algorithm's options."""
    small: Options = {
        "n_steps": 14,
        "tasks_per_step": 2,
        "rollouts_per_task": 32,
        "minibatch_size": 16,
        "max_tokens": 4,
    }
    small |= {"optim": ly.OptimParams(learning_rate=1e-3), "warmup_steps": 1}
    for seed in range(4):
        for name, (setting, options) in SETTINGS.items():
            if name not in ("SFT", "DPO"):
                own = {"advantages": VinePPOAdvantages(n_forks=1)} if name == "VinePPO" else {}
                tasks = [100] if name == "VinePPO" else [0]
                yield f"say 4, {name}", seed, says_four, tasks, setting, {**small, **options, **own}
        yield "say an even digit, GRPO", seed, says_even, [0, 1], ly.GRPO, small
    page = {
        "n_steps": 12,
        "tasks_per_step": 8,
        "rollouts_per_task": 8,
        "minibatch_size": 16,
        "epochs": 2,
        "max_tokens": 64,
    }
    for seed in range(5):
        options = {**page, "optim": ly.OptimParams(learning_rate=5e-4)}
        yield (
            "call a tool (docs/training.md)",
            seed,
            weather(),
            [{"city": each} for each in CITIES],
            ly.PolicyGradient,
            options,
        )
    game = {
        "n_steps": 20,
        "tasks_per_step": 10,
        "rollouts_per_task": 12,
        "minibatch_size": 16,
        "epochs": 2,
        "max_tokens": 4,
    }
    for seed in range(3):
        options = {**game, "optim": ly.OptimParams(learning_rate=1e-3)}
        yield (
            "guess the number (the demo)",
            seed,
            play,
            [{"secret": each} for each in range(10)],
            ly.PolicyGradient,
            options,
        )


def main(peer: Peer | None) -> list[Row | Table]:
    found: dict[str, Any] = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    for name, seed, agent, tasks, setting, options in runs():
        if f"{name}/{seed}" in found:
            continue
        rows = Rows()
        model = ROOT / "leyden" / "cli" / "project" / "model" if "tool" in name else WEIGHTS
        policy = ly.EmbeddedBackend(model, device="cpu", max_length=512 if "tool" in name else 128, seed=seed)
        policy = backend(seed, value_head=True) if "PPO" in name and "Vine" not in name else policy
        algorithm = setting(policy, writers=[rows], seed=seed, **options)
        asyncio.run(ly.Trainer(algorithm=algorithm, store="memory", concurrency=64, progress=False).afit(agent, tasks))
        found[f"{name}/{seed}"] = {"rewards": rows.rewards, "restored": rows.restored}
        CURVES.write_text(json.dumps(found) + "\n")
        print(name, seed, rows.rewards[0], rows.rewards[-1], rows.restored, flush=True)
    return [table(found)]


def table(found: dict[str, Any]) -> Table:
    """Return how many runs of each task went back."""
    tasks = dict.fromkeys(key.rpartition("/")[0] for key in found)
    lines: list[list[str]] = []
    for task in tasks:
        mine = [run for key, run in found.items() if key.rpartition("/")[0] == task]
        ends = [f"{sum(run['rewards'][at] for run in mine) / len(mine):.2f}" for at in (0, -1)]
        lines.append([task, str(len(mine)), " to ".join(ends), _went_back(mine)])
    lines.append(["all", str(len(found)), "", str(sum(bool(run["restored"]) for run in found.values()))])
    title = "Runs with nothing planted that went back to earlier weights, and their rewards around it"
    return Table(title, ["task", "runs", "mean reward", "went back"], lines)


def _went_back(runs: list[dict[str, Any]]) -> str:
    """Return how many runs went back, with the rewards of three steps before, that step, and the step after it."""
    shown: list[str] = []
    for run in runs:
        for step in map(int, run["restored"]):
            around = run["rewards"][max(0, step - 4) : step + 1]
            shown.append(" ".join(f"{reward:.2f}" for reward in around))
    return f"{len(shown)} ({'; '.join(shown)})" if shown else "0"
