"""A run that is killed continues from its last finished step: nothing lost, nothing done twice, the same weights in the end."""

from __future__ import annotations

import csv
import json
import os
import random
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")

N_STEPS = 5
ROLLOUTS = 12
CHILD = Path(__file__).with_name("resume_child.py")
ROOT = Path(__file__).parents[2]
SEEDS = pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.faults),
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(2, marks=pytest.mark.long),
    ],
)


def start(directory: Path, *arguments: str, n_steps: int = N_STEPS) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(CHILD), str(directory), str(n_steps), *arguments]
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output.decode()


def weights(directory: Path) -> bytes:
    return (directory / "model" / "model.safetensors").read_bytes()


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def attempts(directory: Path) -> Counter[int]:
    """Successful attempts by rollout."""
    return Counter(rollout for (rollout,) in read(directory, "SELECT rollout FROM attempts WHERE status = 'succeeded'"))


def unfinished(directory: Path) -> int:
    """Attempts under way."""
    return len(read(directory, "SELECT 1 FROM attempts WHERE status IN ('preparing', 'running')"))


def failures(directory: Path) -> list[str]:
    """Why attempts failed."""
    found = read(directory, "SELECT metadata FROM attempts WHERE status = 'failed'")
    return [json.loads(metadata)["reason_kind"] for (metadata,) in found]


def read(directory: Path, query: str) -> list[tuple[Any, ...]]:
    try:
        with sqlite3.connect(directory / "store.sqlite") as database:
            return database.execute(query).fetchall()
    except sqlite3.OperationalError:  # it has no tables yet
        return []


def kill_engine(trainer: int) -> None:
    [engine] = [child for child in psutil.Process(trainer).children() if "leyden.engine.serve" in child.cmdline()]
    engine.kill()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    prepare(directory)
    finish(start(directory, "resume"))
    return directory


def prepare(directory: Path) -> None:
    """Begin a run that every life of the child resumes, as the version before wrote it."""
    directory.mkdir(parents=True)
    content = {"format": 1, "run_id": secrets.token_hex(6), "started": time.time(), "options": {}}
    (directory / "run.json").write_text(json.dumps(content))


def finish_after_kills(directory: Path, seed: int, *arguments: str) -> None:
    """Run to the end through two kills; each life gets a step further, and is killed somewhere in the next one."""
    chance, kills = random.Random(seed), 0
    while True:
        process = start(directory, "resume", *arguments)
        wanted = min(kills + 1, N_STEPS - 1)
        while process.poll() is None and not (directory / "checkpoints" / f"step-{wanted:06d}").exists():
            time.sleep(0.02)
        if process.poll() is not None or kills == 2:
            break
        time.sleep(chance.uniform(0.0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
    finish(process)
    assert kills == 2


def assert_same_result(directory: Path, uninterrupted: Path) -> None:
    """The same weights, and the same row for each step."""
    assert weights(directory) == weights(uninterrupted)
    timeless = [name for name in rows(directory)[0] if "second" not in name]
    assert [[row[name] for name in timeless] for row in rows(directory)] == [
        [row[name] for name in timeless] for row in rows(uninterrupted)
    ]


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_repeated_step_is_done_before_the_rollouts_of_the_next_one(uninterrupted: Path, tmp_path: Path) -> None:
    """A checkpoint is written while the next step's rollouts run. If a kill comes before it is complete, they are in the
    queue while the step before them is trained on again, and must be sampled from its weights all the same."""
    directory = tmp_path / "run"
    prepare(directory)
    process = start(directory, "resume")
    newest = directory / "checkpoints" / "step-000003"
    while process.poll() is None and not (newest.exists() and unfinished(directory)):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert unfinished(directory)
    shutil.rmtree(newest)
    finish(start(directory, "resume", "slow"))
    assert_same_result(directory, uninterrupted)
    assert set(attempts(directory).values()) == {1}, "a rollout was done twice"


@SEEDS
@pytest.mark.timeout(300)
def test_a_killed_run_resumes_to_the_same_weights(uninterrupted: Path, tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "run"
    prepare(directory)
    finish_after_kills(directory, seed)
    assert_same_result(directory, uninterrupted)
    assert len(attempts(directory)) == N_STEPS * ROLLOUTS
    assert set(attempts(directory).values()) == {1}, "a rollout was done twice"


@SEEDS
@pytest.mark.timeout(300)
def test_a_run_that_imitates_at_first_is_killed_in_both_phases_and_resumes_to_the_same_weights(
    tmp_path: Path, seed: int
) -> None:
    for name in ("whole", "killed"):
        prepare(tmp_path / name)
    finish(start(tmp_path / "whole", "resume", "imitate"))
    finish_after_kills(tmp_path / "killed", seed, "imitate")  # in the second step and in the third
    imitated = [row["imitated"] for row in rows(tmp_path / "killed")]
    assert all(float(count) > 0 for count in imitated[:2]) and imitated[2:] == ["", "", ""]
    assert_same_result(tmp_path / "killed", tmp_path / "whole")
    assert len(attempts(tmp_path / "killed")) == N_STEPS * ROLLOUTS
    assert set(attempts(tmp_path / "killed").values()) == {1}, "a rollout was done twice"


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("gateway", ["thread", "hosted"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_whose_engine_and_then_trainer_are_killed_resumes_to_the_same_weights(
    uninterrupted: Path, tmp_path: Path, at_once: bool, gateway: str
) -> None:
    """Calls that lose the engine are no failures: their rollouts are made again, by other attempts.

    at_once: kill the trainer before it has noticed. Otherwise it may end by itself, unless a rollout fails.
    gateway: "hosted" works in the engine's process and dies with it.
    """
    directory = tmp_path / "run"
    prepare(directory)
    for n_done in (0, 2):
        process = start(directory, "resume", gateway)
        while unfinished(directory) < 3 or len(attempts(directory)) < n_done * ROLLOUTS + 2:
            assert process.poll() is None
            time.sleep(0.002)
        kill_engine(process.pid)
        while not at_once and process.poll() is None and not failures(directory):
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert {*failures(directory)} <= {"interrupted"}
    finish(start(directory, "resume", gateway))
    assert_same_result(directory, uninterrupted)
    assert set(attempts(directory).values()) == {1}, "a rollout was done twice"
    assert {*failures(directory)} == {"interrupted"}


@SEEDS
@pytest.mark.timeout(300)
def test_a_run_whose_store_forgets_resumes_to_the_same_weights(uninterrupted: Path, tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "run"
    prepare(directory)
    finish_after_kills(directory, seed, "forget")
    assert_same_result(directory, uninterrupted)
    with sqlite3.connect(directory / "store.sqlite") as database:
        (kept,), (newest,) = database.execute("SELECT count(*) FROM rollouts UNION ALL SELECT max(seq) FROM rollouts")
    assert kept <= 2  # the newest one and the one with the newest span
    assert newest == N_STEPS * ROLLOUTS, "a rollout was forgotten before its step was in a checkpoint, and done twice"


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.timeout(300)
def test_an_algorithm_that_fails_twice_is_restarted_to_the_same_weights(uninterrupted: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    prepare(directory)
    finish(start(directory, "resume", "fail"))
    assert_same_result(directory, uninterrupted)
    assert len(attempts(directory)) == N_STEPS * ROLLOUTS
    assert set(attempts(directory).values()) == {1}, "a rollout was done twice"


# ---- rollouts that run ahead of the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.faults), pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_a_run_whose_rollouts_are_ahead_survives_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    """No finished group is lost, and none is trained on twice."""
    directory, n_steps, chance = tmp_path / "run", 2 * kills + 4, random.Random(kills)
    prepare(directory)
    process = start(directory, "resume", "ahead", n_steps=n_steps)
    done = 0
    for _ in range(kills):
        wait_for_a_step_after(process, directory, done)
        time.sleep(chance.uniform(0.0, 0.6))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done = newest_step(directory)
        process = start(directory, "resume", "ahead", n_steps=n_steps)
    finish(process)
    of_step: dict[int, list[int]] = {}
    for line in (directory / "groups.jsonl").read_text().splitlines():
        taken = json.loads(line)
        of_step[taken["step"]] = taken["groups"]  # a step that was killed is done again: its last life counts
    trained = Counter(number for groups in of_step.values() for number in groups)
    assert sorted(of_step) == list(range(n_steps))
    assert set(trained.values()) == {1}, "a group was trained on twice"
    stale = sum(int(float(row["stale_groups"])) for row in rows(directory))
    assert max(trained) + 1 - len(trained) == stale, "a group was lost"
    assert set(attempts(directory).values()) == {1}, "a rollout was done twice"


def newest_step(directory: Path) -> int:
    """Return the number of the newest checkpoint, 0 if there is none."""
    return max((int(path.name.split("-")[1]) for path in (directory / "checkpoints").glob("step-??????")), default=0)


def wait_for_a_step_after(process: subprocess.Popen[bytes], directory: Path, step: int) -> None:
    while process.poll() is None and newest_step(directory) <= step:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0].decode()
