"""What the benchmark of learning runs says about its runs, and that a finished run is not made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from benchmarks.report import Table


def found(before: float | None, after: float, **facts: Any) -> dict[str, Any]:
    return {"curve": [[10, after]], "before": before, "after": after, "rollouts": 10, "cpu_s": 1.0, "facts": facts}


@pytest.fixture
def curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in a folder of their own, with one finished run."""
    monkeypatch.setattr(learning, "CURVES", tmp_path / "learning.json")
    monkeypatch.setattr(learning, "PICTURE", tmp_path / "learning.png")
    learning.CURVES.write_text(json.dumps({"guess the number": {"0": found(0.4, 0.97)}}))
    return learning.CURVES


def script(folder: Path) -> Path:
    """A run that says at once what it was asked for."""
    path = folder / "side.py"
    answer = found(0.4, 0.9)
    path.write_text(f"import sys\nprint({json.dumps(json.dumps(answer))} if sys.argv[2] != '3' else 1 / 0)\n")
    return path


def test_finished_runs_are_kept_and_the_missing_ones_are_made(
    curves: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(learning, "SCRIPT", script(tmp_path))
    monkeypatch.setenv("LEYDEN_BENCH_LEARNING", "guess the number")
    (table,) = learning.main(None)
    kept = json.loads(curves.read_text())["guess the number"]
    assert {seed: run["after"] for seed, run in kept.items()} == {"0": 0.97, "1": 0.9, "2": 0.9, "4": 0.9}
    assert "3 of 4: guess the number, seed 3: " in capsys.readouterr().out, "a run that fails is told, and is no result"
    assert isinstance(table, Table)
    assert table.rows[0][2] == "0, 1, 2, 4"
    assert table.rows[0][4:7] == ["0.97, 0.90, 0.90, 0.90", "10", "1 of 4"], "misses are shown"
    assert learning.PICTURE.exists()


def test_tasks_and_seeds_can_be_chosen_and_runs_be_made_again(
    curves: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(learning, "SCRIPT", script(tmp_path))
    monkeypatch.setenv("LEYDEN_BENCH_LEARNING", "guess the number,reasoning-gym chain_sum")
    monkeypatch.setenv("LEYDEN_BENCH_SEEDS", "0")
    monkeypatch.setenv("LEYDEN_BENCH_AGAIN", "1")
    learning.main(None)
    kept = json.loads(curves.read_text())
    assert {name: {seed: run["after"] for seed, run in runs.items()} for name, runs in kept.items()} == {
        "guess the number": {"0": 0.9},
        "reasoning-gym chain_sum": {"0": 0.9},
    }
    monkeypatch.setenv("LEYDEN_BENCH_SEEDS", "17")
    with pytest.raises(SystemExit, match="LEYDEN_BENCH_SEEDS names '17'; possible: 0, 1"):
        learning.main(None)


def test_credit_by_forks_is_compared_with_a_shared_reward_by_rollouts() -> None:
    def runs(counts: list[int | None], rate: float) -> dict[str, Any]:
        facts = ({"to 0.8": count, "to 0.9": None, "learning rate": rate} for count in counts)
        return {str(seed): found(0.5, 0.9, **each) for seed, each in enumerate(facts)}

    table, *_ = learning.credit_tables(
        {"credit by forks": runs([4, 5, 6], 0.1), "credit shared": runs([8, 10, None], 0.2)}
    )
    assert table.rows[0] == ["credit by forks, to 0.8", "0.1", "4, 5, 6", "0.50"]
    assert table.rows[1] == ["credit shared, to 0.8", "0.2", "8, 10, more than 10", ""]


def test_a_rival_whose_weights_moved_does_not_count() -> None:
    reached = learning.TASKS["two agents"].reached
    weights = {"rival before": "a", "rival after": "a", "player after": "b"}
    assert reached(found(0.5, 0.7, **weights))
    assert not reached(found(0.5, 0.7, **{**weights, "rival after": "c"}))
    assert not reached(found(0.5, 0.7, **{**weights, "player after": "a"})), "the player has learnt nothing"
    assert not reached(found(0.5, 0.6, **weights))


def test_the_environment_of_each_task_is_one_of_the_projects() -> None:
    assert {task.environment for task in learning.TASKS.values()} == {None, "frameworks"}
    assert learning.environment("frameworks").wanted.exists()
