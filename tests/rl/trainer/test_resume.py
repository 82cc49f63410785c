"""A run that was killed and resumed is the run that was not: the same weights to the bit, the same table."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(directory: Path, policy: str, kind: str, kill_in: int = -1) -> int:
    command = [sys.executable, "-m", "tests.rl.trainer.resume_program", str(directory), policy, kind, str(kill_in)]
    return subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode


def table(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if "second" not in name} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["ppo", "dqn"])
@pytest.mark.parametrize("kind", ["dummy", "subproc"])
def test_a_run_killed_twice_ends_with_the_weights_and_the_table_of_one_that_was_not(
    tmp_path: Path, policy: str, kind: str
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run(straight, policy, kind) == 0
    assert run(broken, policy, kind, kill_in=5) == -signal.SIGKILL
    assert run(broken, policy, kind, kill_in=8) == -signal.SIGKILL
    assert run(broken, policy, kind) == 0
    for name in ("tensors.safetensors", "arrays.safetensors", "state.json"):
        one, other = straight / "end" / name, broken / "end" / name
        assert one.exists() == other.exists()
        assert not one.exists() or one.read_bytes() == other.read_bytes(), name
    assert table(straight) == table(broken)
    assert len(table(straight)) == 13  # ten collects, three validations
