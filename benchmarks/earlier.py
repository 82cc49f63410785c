"""Leyden beside an earlier commit of itself, by CPU: store, gateway, runners, demo, simulators and the step of reinforcement learning.

Both commits run in the same environment, in processes that stay, and short slices of them take turns. Only CPU is compared, because it says
the same on a busy machine. The earlier commit is `LEYDEN_EARLIER`, a name that `git` knows; it is unpacked from the clone's history.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import MINIMUM_RUNS, ROOT, Peer, Row, Sample
from benchmarks.rl_env import N_ENVS, costs
from benchmarks.sides import Side, alternate, row
from benchmarks.store import MODES, SCRIPT

EARLIER = os.environ.get("LEYDEN_EARLIER", "ceb3539")
"""By default the commit before outcomes, versions of resources and the collector."""
PARTS = Path(__file__).parent / "peers" / "earlier_side.py"
PAIRS = 41
ROLLOUTS = {"memory": 50, "file": 50, "http": 100}
"""In a slice: few, so that the machine's moods hit both sides alike."""
HEADLINES = ()


def main(peer: Peer | None) -> list[Row]:
    """Measure equal slices of this commit and of the earlier one in turn. There is no peer."""
    with ExitStack() as stack:
        earlier = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        archive = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(earlier, filter="data")
        roots = ROOT, earlier
        return [*stores(roots), *parts(roots), *simulators(roots)]


def stores(roots: Sequence[Path]) -> list[Row]:
    """CPU microseconds of a rollout, in each mode and place."""
    rows: list[Row] = []
    for where, said_where in (("memory", "in memory"), ("file", "in a file"), ("http", "over HTTP, 1 client")):
        for mode, said in MODES.items():
            with ExitStack() as stack:
                taken = alternate([_store(stack, where, mode, root) for root in roots], pairs=PAIRS)
            rows.append(_row(f"store {said_where}, {said}", "CPU us a rollout", taken))
    return rows


def _store(stack: ExitStack, where: str, mode: str, root: Path) -> Callable[[], Sample]:
    """Slices of a new store of this clone; over HTTP, with a server in a process of its own that keeps a file."""
    worker, server = (
        stack.enter_context(Side("leyden", Path(sys.executable), SCRIPT, "leyden", root=root)) for _ in range(2)
    )
    worker.ask("open", where=server.ask("serve", where="file")["url"] if where == "http" else where)
    rollouts = ROLLOUTS[where]

    def run() -> Sample:
        before = server.cpu_seconds()
        cpu_s = worker.ask("run", mode=mode, rollouts=rollouts)["cpu_s"] + server.cpu_seconds() - before
        return Sample(value=cpu_s / rollouts * 1e6, cpu_s=cpu_s)

    run()  # what is loaded when first used
    return run


def parts(roots: Sequence[Path]) -> list[Row]:
    """Measure what gateway, runners and demo cost, by a script that runs in both commits."""
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("gateway, durable: calls", "CPU ms a call", {"do": "gateway", "kind": "calls", "calls": 300}),
        ("gateway, durable: streams", "CPU ms a stream", {"do": "gateway", "kind": "streams", "calls": 150}),
        ("runners: 100 starts one by one, shm", "CPU ms a rollout", {"do": "starts", "strategy": "shm"}),
        ("runners: 100 starts one by one, ipc", "CPU ms a rollout", {"do": "starts", "strategy": "ipc"}),
        ("runners: 100 starts one by one, cs", "CPU ms a rollout", {"do": "starts", "strategy": "cs"}),
        ("fit(Baseline), durable", "CPU ms a task", {"do": "fit", "store": None, "tasks": 1000}),
        ("fit(Baseline), store in memory", "CPU ms a task", {"do": "fit", "store": "memory", "tasks": 1000}),
        ("RL step: short games, 117k model", "CPU ms", {"do": "learn"}),
        ("demo, deterministic, 1 step", "CPU s", {"do": "demo", "steps": 1}),
        ("demo, deterministic, 6 steps", "CPU s", {"do": "demo", "steps": 6}),
    ]
    rows: list[Row] = []
    with ExitStack() as stack:
        both = [stack.enter_context(Side("leyden", Path(sys.executable), PARTS, root=root)) for root in roots]
        for name, unit, command in asked:

            def slice_of(side: Side, command: dict[str, Any] = command) -> Callable[[], Sample]:
                return lambda: Sample(value=float(str(side.ask(**command))), cpu_s=0.0)

            for side in both:
                side.ask(**command)  # what is loaded when first used
            pairs = MINIMUM_RUNS if command["do"] == "demo" else 9
            rows.append(_row(name, unit, alternate([slice_of(side) for side in both], pairs=pairs)))
            print(rows[-1], flush=True)
    return rows


def simulators(roots: Sequence[Path]) -> list[Row]:
    """CPU microseconds of a step of the clones' environments, and milliseconds of an iteration of their PPO."""
    rows: list[Row] = []
    for kind in ("dummy", "subproc", "shmem"):
        with ExitStack() as stack:
            both = [_clones_own(stack, root, "rl_env_side.py", f"leyden-{kind}", str(N_ENVS)) for root in roots]
            taken = alternate([costs(side, f"leyden-{kind}") for side in both], pairs=9)
        rows.append(_row(f"{N_ENVS} environments, {kind}", "CPU us a step", taken))
    for side_name, said in (("leyden", "bare environments"), ("leyden-stack", "seeds, interpreters and logs")):
        with ExitStack() as stack:
            both = [_clones_own(stack, root, "rl_ppo_side.py", side_name) for root in roots]
            taken = alternate([_iteration(side) for side in both], pairs=9)
        rows.append(_row(f"PPO: 8,000 steps and an update, {said}", "CPU ms", taken))
    return rows


def _clones_own(stack: ExitStack, root: Path, script: str, *arguments: str) -> Side:
    return stack.enter_context(
        Side("leyden", Path(sys.executable), root / "benchmarks" / "peers" / script, *arguments, root=root)
    )


def _iteration(side: Side) -> Callable[[], Sample]:
    def run() -> Sample:
        before = side.cpu_seconds()
        side.ask("iterate")
        cpu_s = side.cpu_seconds() - before
        return Sample(value=cpu_s * 1e3, cpu_s=cpu_s)

    run()  # what is loaded when first used
    return run


def _row(name: str, unit: str, taken: Sequence[list[Sample]]) -> Row:
    return row(name, unit, taken[0], taken[1], f"Leyden {EARLIER}", higher_is_better=False)
