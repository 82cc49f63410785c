"""What PPO learns, and at what cost: Leyden and Stable-Baselines3 on CartPole and Pendulum, with the same settings.

Five runs of each side for each task, seeds 0 to 4. Networks, minibatches, learning rate, clipping, discounts and the optimizer's constants
are equal (`peers/rl_learning_side.py`); Pendulum's actions are scaled to [-1, 1] for both. After each update the policy runs 20 held-out
reset seeds without exploring. One difference stays: Stable-Baselines3 cuts its data after a fixed number of steps, Leyden collects whole
episodes, as many as come near that number by the length of the last ones.

Rows are training alone, evaluations left out, in CPU seconds. Curves: `results/curves/rl_learning.json`, drawn in `docs/rl_learning.png`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from bisect import bisect_left
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Peer, PeerFailed, Row, Sample
from benchmarks.report import RESULTS, Table
from benchmarks.sides import Side, row

PEER = "bench-rl"
PEERS = Path(__file__).parent / "peers"
SCRIPT, DRAW = PEERS / "rl_learning_side.py", PEERS / "rl_learning_draw.py"
CURVES, PICTURE = RESULTS / "curves" / "rl_learning.json", ROOT / "docs" / "rl_learning.png"
SEEDS = range(5)
SOLVED = {"CartPole-v1": 475.0, "Pendulum-v1": -200.0}
"""Mean rewards that count as learned: Gymnasium's own for CartPole; for Pendulum, which has none, upright in nearly all episodes."""
NAMES = {"leyden": "Leyden", "sb3": "stable-baselines3 2.9.2"}
HEADLINES = ()


def main(peer: Peer | None) -> list[Row | Table]:
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {task: {} for task in SOLVED}
    with ExitStack() as stack:
        sides = {"leyden": stack.enter_context(Side("leyden", Path(sys.executable), SCRIPT, "leyden"))}
        if peer is not None:
            sides["sb3"] = stack.enter_context(Side("sb3", peer.python, SCRIPT, "sb3"))
        for task in SOLVED:
            for seed in SEEDS:
                for name, side in list(sides.items()):
                    try:
                        answer = side.ask("train", task=task, seed=seed)
                    except PeerFailed as failure:
                        if name == "leyden":
                            raise
                        print(f"without {NAMES[name]}: {failure}", flush=True)
                        del sides[name]
                        continue
                    runs[task].setdefault(name, []).append(answer)
                    print(f"{task}, seed {seed}, {name}: {answer['curve'][-1][1]:.1f}", flush=True)
    whole = {task: {n: done for n, done in by.items() if len(done) == len(SEEDS)} for task, by in runs.items()}
    if peer is not None:
        CURVES.parent.mkdir(parents=True, exist_ok=True)
        CURVES.write_text(json.dumps(whole) + "\n")
        subprocess.run([peer.python, DRAW, CURVES, PICTURE], check=True, cwd=ROOT)
    return [*(costs(task, by) for task, by in whole.items()), learned(whole)]


def costs(task: str, runs: dict[str, list[dict[str, Any]]]) -> Row:
    """Environment steps that a CPU second of training brings."""
    samples = {
        name: [Sample(value=run["curve"][-1][0] / run["cpu_s"], cpu_s=run["cpu_s"]) for run in done]
        for name, done in runs.items()
    }
    return row(
        f"PPO learns {task}, its whole training",
        "steps/CPU s",
        samples["leyden"],
        samples.get("sb3", []),
        NAMES["sb3"] if "sb3" in samples else None,
    )


def learned(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> Table:
    """Return the reward that each side reached, and after how many steps."""
    lines: list[list[str]] = []
    for task, by in runs.items():
        for name, done in by.items():
            steps, wanted = done[0]["steps"], SOLVED[task]
            firsts = sorted(f for run in done if (f := first(run["curve"], wanted)) is not None)
            soon = f"{statistics.median(firsts):,.0f} ({firsts[0]:,} to {firsts[-1]:,})" if firsts else ""
            lines.append(
                [
                    f"{task}, {NAMES[name]}",
                    spread([value_at(run["curve"], steps) for run in done]),
                    spread([mean_of(run["curve"], steps, run["iteration"]) for run in done]),
                    f"{len(firsts)} of {len(done)}",
                    soon,
                ]
            )
    columns = [
        "held-out reward: mean (lowest to highest) of seeds 0 to 4",
        "at the end",
        "over the whole curve",
        "runs that came to " + ", ".join(f"{value:g} ({task.partition('-')[0]})" for task, value in SOLVED.items()),
        "environment steps until then, median",
    ]
    return Table("What PPO learns with the same settings", columns, lines)


def first(curve: list[list[float]], wanted: float) -> int | None:
    """Steps before the first evaluation that reaches `wanted`."""
    return next((int(steps) for steps, reward in curve if reward >= wanted), None)


def value_at(curve: list[list[float]], steps: float) -> float:
    """The curve at so many steps: a straight line between evaluations, level before the first and after the last."""
    at = bisect_left(curve, steps, key=lambda point: point[0])
    if at in (0, len(curve)):
        return curve[min(at, len(curve) - 1)][1]
    (left, low), (right, high) = curve[at - 1], curve[at]
    return low + (high - low) * (steps - left) / (right - left)


def mean_of(curve: list[list[float]], steps: int, iteration: int) -> float:
    """Return a curve's mean over a grid of one point an iteration, equal for both sides."""
    return statistics.fmean(value_at(curve, at) for at in range(iteration, steps + 1, iteration))


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
