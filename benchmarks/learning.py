"""What agents learn: seeds 0 to 4, one setting for each task, every curve kept.

Each run is a process of its own (`peers/learning_side.py`, which has the settings). A run that has finished is kept in
`results/curves/learning.json` and is not made again, so the benchmark can be stopped and started. The runs of two tasks need the
environment `frameworks`; `make test-all GROUP=frameworks` makes it. Curves are drawn in `docs/learning.png` (needs matplotlib, of the
extra `demo`). What to run:

- `LEYDEN_BENCH_LEARNING="two agents,LangGraph"`: these tasks;
- `LEYDEN_BENCH_SEEDS=0,1`: these seeds;
- `LEYDEN_BENCH_AGAIN=1`: also runs that have finished. Do so after a change of a setting.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Peer, PeerFailed, Row
from benchmarks.report import RESULTS, Table
from constraints.install import environment, is_installed

SCRIPT = Path(__file__).parent / "peers" / "learning_side.py"
CURVES, PICTURE = RESULTS / "curves" / "learning.json", ROOT / "docs" / "learning.png"
SEEDS = range(5)
MINUTES = 30
"""The longest that one run may take on a busy machine."""
HEADLINES = ()
Found = dict[str, Any]
Runs = dict[str, dict[str, Found]]
"""What each task found, by seed."""


@dataclass(frozen=True)
class Task:
    """A task of the benchmark, as the page shows it. The runs of credit have tables of their own, and no aim here."""

    aim: str
    reached: Callable[[Found], bool]
    environment: str | None = None
    """Where its runs need more packages than the benchmark itself; None: they do not."""


def _gains(points: float) -> Callable[[Found], bool]:
    return lambda found: found["after"] - found["before"] >= points / 100


def _beats_a_rival_that_stays(found: Found) -> bool:
    facts = found["facts"]
    kept = facts["rival before"] == facts["rival after"] != facts["player after"]
    return kept and _gains(15)(found)


TASKS: dict[str, Task] = {
    "guess the number": Task(
        "0.95 within 3,500 games", lambda found: found["after"] >= 0.95 and found["rollouts"] <= 3500
    ),
    "reasoning-gym chain_sum": Task("30 points on held-out tasks", _gains(30)),
    "reasoning-gym spell_backward": Task("30 points on held-out tasks", _gains(30)),
    "reasoning-gym rotate_matrix": Task("30 points on held-out tasks", _gains(30)),
    "reasoning-gym number_filtering": Task("30 points on held-out tasks", _gains(30)),
    "OpenAI Agents SDK": Task("30 points with a tool", _gains(30), "frameworks"),
    "LangGraph": Task("30 points with a tool", _gains(30), "frameworks"),
    "two agents": Task("15 points against a rival whose weights stay equal to the bit", _beats_a_rival_that_stays),
    "SFT on the best of groups": Task("15 points", _gains(15)),
    **dict.fromkeys(("credit by forks", "credit shared", "credit true advantages"), Task("", lambda found: True)),
}


def main(peer: Peer | None) -> list[Row | Table]:
    runs: Runs = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    wanted = [
        (name, seed)
        for name in _chosen("LEYDEN_BENCH_LEARNING", list(TASKS))
        for seed in _chosen("LEYDEN_BENCH_SEEDS", [str(seed) for seed in SEEDS])
        if os.environ.get("LEYDEN_BENCH_AGAIN") or seed not in runs.get(name, {})
    ]
    for number, (name, seed) in enumerate(wanted, 1):
        place = f"{number} of {len(wanted)}: {name}, seed {seed}"
        needed = TASKS[name].environment
        if needed is not None and not is_installed(needed):
            print(f"{place}: left out, .venvs/{needed} is not installed", flush=True)
            continue
        started = time.monotonic()
        try:
            found = make_run(name, seed)
        except PeerFailed as failure:
            print(f"{place}: {failure}", flush=True)
            continue
        runs.setdefault(name, {})[seed] = found
        CURVES.write_text(json.dumps(runs, indent=None, separators=(",", ":"), sort_keys=True) + "\n")
        print(f"{place}: {_short(found)}, {time.monotonic() - started:.0f} s", flush=True)
    draw(runs)
    return tables(runs)


def make_run(name: str, seed: str) -> Found:
    """Make one run, in a process and a folder of its own. Raises PeerFailed."""
    needed = TASKS[name].environment
    python = Peer(f"learning, {name}", Path(sys.executable) if needed is None else environment(needed).python)
    with tempfile.TemporaryDirectory() as folder:
        return python.run(SCRIPT, name, seed, folder, timeout_seconds=60 * MINUTES)


def _chosen(variable: str, possible: list[str]) -> list[str]:
    chosen = os.environ.get(variable, ",".join(possible)).split(",")
    if unknown := [each for each in chosen if each not in possible]:
        raise SystemExit(f"{variable} names {unknown[0]!r}; possible: {', '.join(possible)}")
    return chosen


def _short(found: Found) -> str:
    before = "" if found["before"] is None else f"{found['before']:.3f} to "
    return f"{before}{found['after']:.3f}, {found['rollouts']:,} rollouts, {found['cpu_s']:.0f} s CPU"


def tables(runs: Mapping[str, Mapping[str, Found]]) -> list[Row | Table]:
    """One line for each task; the runs of credit have a table of their own."""
    lines = [
        [
            name,
            task.aim,
            ", ".join(sorted(runs[name], key=int)),
            _spread(found["before"] for found in done),
            ", ".join(f"{found['after']:.2f}" for found in done),
            f"{statistics.median(found['rollouts'] for found in done):,.0f}",
            f"{sum(map(task.reached, done))} of {len(done)}",
            f"{statistics.median(found['cpu_s'] for found in done):.0f}",
        ]
        for name, task in TASKS.items()
        if not name.startswith("credit") and (done := _in_order(runs.get(name, {})))
    ]
    columns = ["task", "aim", "seeds that were run", "before", "after, by seed", "rollouts", "reached", "CPU s"]
    found = [Table("Learning, one setting for each task", columns, lines)]
    return [*found, *credit_tables(runs)]


def credit_tables(runs: Mapping[str, Mapping[str, Found]]) -> list[Table]:
    """Rollouts until a skill by both kinds of credit, and how often an estimate's interval holds the truth."""
    tables: list[Table] = []
    both = {name: _in_order(runs.get(name, {})) for name in ("credit by forks", "credit shared")}
    if all(both.values()):
        lines: list[list[str]] = []
        for skill in ("to 0.8", "to 0.9"):
            counts = {
                name: [found["facts"][skill] or found["rollouts"] + 1 for found in done] for name, done in both.items()
            }
            ratio = statistics.median(counts["credit by forks"]) / statistics.median(counts["credit shared"])
            for name, done in both.items():
                shown = ", ".join(
                    f"{found['facts'][skill]:,}" if found["facts"][skill] else f"more than {found['rollouts']:,}"
                    for found in done
                )
                rate = f"{done[0]['facts']['learning rate']:g}"
                lines.append([f"{name}, {skill}", rate, shown, f"{ratio:.2f}" if name == "credit by forks" else ""])
        columns = ["credit", "learning rate", "rollouts, forks included, by seed", "ratio of the medians"]
        tables.append(Table("Rollouts until the player has a share of the points that can be learnt", columns, lines))
    if truth := _in_order(runs.get("credit true advantages", {})):
        held = [f"{found['facts']['held']} of {found['facts']['intervals']}" for found in truth]
        errors = [f"{found['facts']['mean error']:+.3f}" for found in truth]
        columns = ["95 % intervals that hold the true advantage, by seed", "mean error of the estimates"]
        tables.append(
            Table("Estimates by forks beside the true advantages", columns, [[", ".join(held), ", ".join(errors)]])
        )
    return tables


def _in_order(by_seed: Mapping[str, Found]) -> list[Found]:
    return [by_seed[seed] for seed in sorted(by_seed, key=int)]


def _spread(values: Any) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else ""


def draw(runs: Mapping[str, Mapping[str, Found]]) -> None:
    """Draw a small plot for each task, with a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in TASKS if any(found["curve"] for found in runs.get(name, {}).values())]
    if not shown:
        return
    figure, axes = pyplot.subplots(
        (len(shown) + 2) // 3, 3, figsize=(9.6, 2.3 * ((len(shown) + 2) // 3)), dpi=100, squeeze=False
    )
    for plot in axes.flat[len(shown) :]:
        plot.axis("off")
    for plot, name in zip(axes.flat, shown, strict=False):
        for found in _in_order(runs[name]):
            plot.plot(*zip(*found["curve"], strict=True), color="#1f5fa8", linewidth=1.1, alpha=0.7)
            if not name.startswith(("credit", "SFT")):
                ends = [0, found["curve"][-1][0]]
                plot.plot(ends, [found["before"], found["after"]], "o", color="#111827", markersize=3, alpha=0.7)
        plot.set_title(name, fontsize=9)
        plot.set_ylim(0, 1.03)
        plot.grid(alpha=0.25)
        plot.tick_params(labelsize=7)
        plot.set_xlabel("optimizer steps" if name.startswith("SFT") else "rollouts", fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Software": None}, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    draw(json.loads(CURVES.read_text()))
