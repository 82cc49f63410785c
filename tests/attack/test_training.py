"""Training runs that are killed at random and resumed to their end: they end as the run that was never killed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from tests.attack.harness import Attack, sizes

ROOT = Path(__file__).parents[2]
N_STEPS = 6
ROLLOUTS_OF_A_STEP = 12
N_ITERATIONS = 40
"""Of a simulators' run."""

Start = Callable[[], "subprocess.Popen[bytes]"]
Strike = Callable[["subprocess.Popen[bytes]", random.Random], str]


def started(*command: object) -> subprocess.Popen[bytes]:
    """A program of the tests, in a process group of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    arguments = [sys.executable, *map(str, command)]
    output = subprocess.PIPE
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output.decode()


def newest(directory: Path) -> str:
    """The name of the newest checkpoint; empty if there is none."""
    return max((path.name for path in (directory / "checkpoints").glob("step-*")), default="")


def kill_everything(process: subprocess.Popen[bytes], _: random.Random) -> str:
    """Kill a run with all its processes."""
    os.killpg(process.pid, signal.SIGKILL)
    return "run"


def kill_engine_or_everything(process: subprocess.Popen[bytes], chance: random.Random) -> str:
    """Kill the engine first in half of the cases, and what is left of the run a moment later."""
    engines, killed = list[psutil.Process](), "run"
    with contextlib.suppress(psutil.Error):  # the run or its engine is at its end
        children = psutil.Process(process.pid).children()
        engines = [child for child in children if "leyden.engine.serve" in " ".join(child.cmdline())]
    if engines and chance.random() < 0.5:
        engines[0].kill()
        killed = "engine"
        time.sleep(chance.random() * 3)
    if process.poll() is None:
        kill_everything(process, chance)
    return killed


def finish_through_kills(
    attack: Attack, chance: random.Random, directory: Path, start: Start, strike: Strike, *, most: int
) -> None:
    """Kill a run up to `most` times, in two of three cases after its next checkpoint, and let the last life end."""
    for _ in range(most):
        process, before = start(), newest(directory)
        if chance.random() < 0.67:
            while process.poll() is None and newest(directory) == before:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.3)
        else:
            time.sleep(chance.random() * 5)
        if process.poll() is not None:  # it was at its end
            return finish(process)
        attack.count(**{"kills": 1, f"kills_of_{strike(process, chance)}": 1})
        process.communicate()
    return finish(start())


# ---- PolicyGradient ------------------------------------------------------------------------------------------------------


def policy_gradient(directory: Path) -> subprocess.Popen[bytes]:
    return started(ROOT / "tests" / "trainer" / "resume_child.py", directory, N_STEPS, "resume")


def prepare(directory: Path) -> None:
    """Give the run the same name in every directory: its rollouts' ids, and so the samples, are derived from it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(
        json.dumps({"format": 1, "run_id": "feedfacecafe", "started": 0.0, "options": {}})
    )


def weights(directory: Path) -> bytes:
    return (directory / "model" / "model.safetensors").read_bytes()


def timeless_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if "second" not in name} for row in csv.DictReader(file)]


def successes(directory: Path) -> Counter[Any]:
    """The number of successful attempts of each rollout."""
    with sqlite3.connect(directory / "store.sqlite") as database:
        found = database.execute("SELECT rollout FROM attempts WHERE status = 'succeeded'").fetchall()
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    return Counter(rollout for (rollout,) in found)


@sizes("kills", faults=(4,), long=(70,), merge=False)
def test_a_policy_gradient_run_and_its_engine_are_killed_at_random(tmp_path: Path, attack: Attack, kills: int) -> None:
    pytest.importorskip("openai")
    chance, straight = attack.chance, tmp_path / "straight"
    prepare(straight)
    finish(policy_gradient(straight))
    while attack.figures["kills"] < kills:
        directory = tmp_path / f"run-{attack.figures['runs']}"
        prepare(directory)
        finish_through_kills(
            attack,
            chance,
            directory,
            lambda directory=directory: policy_gradient(directory),
            kill_engine_or_everything,
            most=min(N_STEPS, kills - attack.figures["kills"]),
        )
        attack.count(runs=1)
        assert timeless_rows(directory / "metrics.csv") == timeless_rows(straight / "metrics.csv")
        assert weights(directory) == weights(straight)
        done = successes(directory)
        assert len(done) == N_STEPS * ROLLOUTS_OF_A_STEP
        assert set(done.values()) == {1}, "a rollout was done twice"
        attack.count(steps=N_STEPS, rollouts=len(done))


# ---- simulators ----------------------------------------------------------------------------------------------------------


def simulators(directory: Path, policy: str, kind: str) -> subprocess.Popen[bytes]:
    return started("-m", "tests.rl.trainer.resume_program", directory, policy, kind, -1, N_ITERATIONS)


@sizes("kills", faults=(4,), long=(70,), merge=False)
def test_a_simulators_run_is_killed_at_random(tmp_path: Path, attack: Attack, kills: int) -> None:
    chance = attack.chance
    straight = {policy: tmp_path / policy for policy in ("ppo", "dqn")}
    for policy, directory in straight.items():
        finish(simulators(directory, policy, "dummy"))
    while attack.figures["kills"] < kills:
        policy, kind = chance.choice(["ppo", "dqn"]), chance.choice(["dummy", "subproc"])
        directory = tmp_path / f"run-{attack.figures['runs']}"
        finish_through_kills(
            attack,
            chance,
            directory,
            lambda directory=directory, policy=policy, kind=kind: simulators(directory, policy, kind),
            kill_everything,
            most=min(8, kills - attack.figures["kills"]),
        )
        attack.count(runs=1)
        assert timeless_rows(directory / "metrics.csv") == timeless_rows(straight[policy] / "metrics.csv")
        for name in ("state.json", "arrays.npz"):
            one, other = straight[policy] / "end" / name, directory / "end" / name
            assert one.exists() == other.exists()
            assert not one.exists() or one.read_bytes() == other.read_bytes(), name
        attack.count(iterations=N_ITERATIONS)
