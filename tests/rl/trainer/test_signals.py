"""Signals to a training run with worker processes, as terminals, schedulers and supervisors send them: often to the whole group."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.training import Checkpoint

ROOT = Path(__file__).resolve().parents[3]


def started(directory: Path, kind: str = "subproc") -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """The program in a group of its own, some episodes into its second iteration, and its workers."""
    command = [sys.executable, "-m", "tests.rl.trainer.interrupted_program", str(directory), kind]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
    assert len(workers) >= 2
    return run, workers


def gone(workers: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(workers, timeout=10)[1]


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["subproc", "shmem"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_the_run_after_its_stage_and_saves_it(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    run, workers = started(tmp_path, kind)
    os.killpg(run.pid, number)
    said, error = run.communicate(timeout=40)
    assert run.returncode == 0, error
    saved = Checkpoint(tmp_path / "checkpoints").latest()
    assert saved is not None
    assert saved.iteration == int(said.split()[-1]) < 50
    assert gone(workers)


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_run_whose_simulators_hang(tmp_path: Path, number: signal.Signals) -> None:
    run, workers = started(tmp_path)
    (tmp_path / "hang").touch()
    os.killpg(run.pid, number)
    assert run.stderr is not None
    while "once more" not in run.stderr.readline():
        pass
    os.killpg(run.pid, number)
    began = time.monotonic()
    run.communicate(timeout=40)
    assert time.monotonic() - began < 20  # two workers that hang are not waited for one after the other
    assert run.returncode != 0
    assert gone(workers)
    saved = Checkpoint(tmp_path / "checkpoints").latest()
    assert saved is not None and saved.iteration == 1


@pytest.mark.faults
def test_a_killed_run_leaves_no_worker_and_doubles_no_row_when_it_goes_on(tmp_path: Path) -> None:
    run, workers = started(tmp_path)
    run.kill()
    run.communicate(timeout=40)
    assert gone(workers)
    again, workers = started(tmp_path)
    os.killpg(again.pid, signal.SIGINT)
    said, error = again.communicate(timeout=40)
    assert again.returncode == 0, error
    with (tmp_path / "episodes.csv").open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    assert sorted(int(row["episode"]) for row in rows) == list(range(1, 12 * int(said.split()[-1]) + 1))
    seeds = [int(row["seed_index"]) for row in rows]
    for begin in range(0, len(seeds), 12):
        assert [int(row["iteration"]) for row in rows[begin : begin + 12]] == [begin // 12 + 1] * 12


@pytest.mark.slow
def test_a_script_without_a_guard_trains_once_and_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from leyden.rl import Trainer\nfrom tests.rl.parts import vessel_of\n"
        "print('begins')\nTrainer(max_iters=1, finite_env_type='dummy').fit(vessel_of())\nprint('trained', flush=True)\n"
        "Trainer(max_iters=1, finite_env_type='subproc').test(vessel_of())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=50)
    assert "ConfigError" in done.stderr and "if __name__ == '__main__'" in done.stderr
    assert done.stdout.count("trained") == 1
