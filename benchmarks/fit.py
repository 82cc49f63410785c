"""Tasks a second that `Trainer.fit(Baseline)` gets through with an agent that does nothing: what the road itself costs.

Four runners, an async agent that answers at once. Leyden runs `shm`, with its durable file (what `fit` does by default) and in memory, and
`ipc` and `cs`, whose runners are processes, with the file. Its peer keeps its store in memory only. It runs with its default settings and
strategy (`cs`; its `shm` takes one runner only: with four it aborts), then with the settings that suit it best here, found by hand. Every
round runs each side once. Only `fit` itself is timed, which starts the runners' processes: no import and no set-up of the calling process,
on either side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import MINIMUM_RUNS, Peer, PeerFailed, Row, Sample, rate, summary
from leyden.agent import rollout
from leyden.algorithm import Baseline
from leyden.trainer import Trainer
from leyden.types import PromptTemplate

PEER = "bench-agentlightning"
PEER_SCRIPT = Path(__file__).parent / "peers" / "fit_agentlightning.py"
N_RUNNERS = 4
N_TASKS = 2000
N_TASKS_PEER = {"default": 40, "tuned-cs": 200, "tuned-shm-1": 400}
"""The peer's default rate is set by its timers, so that a few tasks show it."""
UNIT = "tasks/s"
PEER_SECONDS = 300
HEADLINES = ("fit(Baseline), 4 runners, defaults (durable)",)


@rollout
async def agent(task: int, prompt_template: PromptTemplate) -> float:
    """Do as little as an agent can."""
    return float(task % 2)


def fit(store: str | None, strategy: str = "shm") -> Sample:
    """One run over `N_TASKS` tasks; None is the file that `fit` makes by default."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            algorithm=Baseline(),
            n_runners=N_RUNNERS,
            strategy=strategy,
            store=store,
            initial_resources={"prompt": PromptTemplate(template="{x}", engine="f-string")},
            run_dir=Path(folder) / "run",
        )

        def work() -> float:
            counts = trainer.fit(agent, list(range(N_TASKS))).rollouts
            if counts["succeeded"] != N_TASKS:
                raise RuntimeError(f"{counts} of {N_TASKS} tasks")
            return N_TASKS

        return rate(work)


def main(peer: Peer | None) -> list[Row]:
    samples = paired(_sides(peer), runs=MINIMUM_RUNS)

    def row(name: str, ours: str, theirs: str, settings: str) -> Row:
        peer_name = f"{peer.name}, {settings}" if peer else None
        return summary(name, UNIT, samples[ours], samples.get(theirs, []), peer_name, higher_is_better=True)

    durable, memory = "fit(Baseline), 4 runners, defaults (durable)", "fit(Baseline), 4 runners, store in memory"
    by_default = f"defaults, {N_TASKS_PEER['default']} tasks"
    rows = [row(durable, "file", "default", by_default), row(memory, "memory", "default", by_default)]
    for strategy in ("ipc", "cs"):
        name = f"fit(Baseline), 4 runners in processes ({strategy}), durable"
        rows.append(row(name, strategy, "tuned-cs", "tuned by hand, cs, 4 runners"))
    if peer is not None:
        rows.append(row(durable, "file", "tuned-cs", "tuned by hand, cs, 4 runners"))
        rows.append(row(memory, "memory", "tuned-shm-1", "tuned by hand, shm, 1 runner"))
    return rows


def _sides(peer: Peer | None) -> dict[str, Callable[[], Sample]]:
    sides: dict[str, Callable[[], Sample]] = {
        "file": lambda: fit(None),
        "memory": lambda: fit("memory"),
        "ipc": lambda: fit(None, "ipc"),
        "cs": lambda: fit(None, "cs"),
    }
    if peer is not None:
        for settings, n_tasks in N_TASKS_PEER.items():
            sides[settings] = _peer_side(peer, settings, n_tasks)
    return sides


def _peer_side(peer: Peer, settings: str, n_tasks: int) -> Callable[[], Sample]:
    arguments: list[Any] = ["--settings", settings, "--tasks", str(n_tasks)]
    return lambda: peer.sample(PEER_SCRIPT, *arguments, timeout_seconds=PEER_SECONDS)


def paired(sides: dict[str, Callable[[], Sample]], *, runs: int) -> dict[str, list[Sample]]:
    """`runs` rounds in which every side runs once; a peer's side that fails is dropped, with its reason printed."""
    sides = dict(sides)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, side in list(sides.items()):
            try:
                samples[name].append(side())
            except PeerFailed as failure:
                print(f"without {name!r}: {failure}", flush=True)
                del sides[name], samples[name]
    return samples
