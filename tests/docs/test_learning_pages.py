"""Programs of README and docs that begin only as a file do what the pages say: they run whole, and the policy learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.training.runs import open_run
from tests.docs.snippets import ROOT


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_program(program: str, directory: Path) -> str:
    (directory / "program.py").write_text(program)
    (directory / "examples").symlink_to(ROOT / "examples")
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=directory, env=os.environ | threads, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def rewards_of(run: Path) -> list[float]:
    figures = open_run(run).summary_metrics().reward
    assert figures is not None
    return list(figures.values)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_agent_with_a_tool_of_the_readme_learns(tmp_path: Path) -> None:
    run_program(programs("README.md")[0], tmp_path)
    [run] = (tmp_path / ".leyden").iterdir()
    rewards = rewards_of(run)
    assert rewards[0] < 0.5
    assert sum(rewards[-3:]) / 3 > 0.7


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_last_program_of_the_quickstart_trains_and_asks_both_models(tmp_path: Path) -> None:
    printed = run_program(programs("docs/quickstart.md")[-1].replace("n_steps=20", "n_steps=1"), tmp_path)
    assert [line.split()[:2] for line in printed.splitlines()] == [["2", "before:"], ["5", "before:"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_of_the_zoo_learns(tmp_path: Path) -> None:
    run_program(programs("docs/algorithm-zoo/README.md")[0], tmp_path)
    [run] = (tmp_path / ".leyden").iterdir()
    rewards = rewards_of(run)
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.8


@pytest.mark.slow
@pytest.mark.merge
def test_the_program_for_agent_lightning_0_1_prints_what_it_says(tmp_path: Path) -> None:
    program = programs("docs/migrating/agent-lightning-0.1.md")[1]
    assert "leyden.legacy" in program
    assert run_program(program, tmp_path).splitlines()[-1] == "[2.0, 4.0]"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [0, 1], ids=["estimator", "loss"])
def test_the_policy_learns_with_an_estimator_and_a_loss_of_ones_own(which: int, tmp_path: Path) -> None:
    run_program(programs("docs/how-to/own-loss.md")[which], tmp_path)
    [run] = (tmp_path / ".leyden").iterdir()
    rewards = rewards_of(run)
    assert rewards[0] < 0.3
    assert max(rewards) > 0.5


def test_the_program_for_a_supervisor_begins_and_continues(tmp_path: Path) -> None:
    [program] = programs("docs/how-to/deploy.md")
    for start in ("first", "second"):
        place = tmp_path / start
        place.mkdir()
        (place / "runs").symlink_to(tmp_path, target_is_directory=True)
        run_program(program, place)
    assert '"status": "succeeded"' in (tmp_path / "numbers" / "run.json").read_text()
