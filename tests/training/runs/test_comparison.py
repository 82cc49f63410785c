"""Two runs are compared by the tasks of their last validations; what cannot be compared says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.training.runs import Run, open_run
from leyden.training.runs.comparison import compare_runs


def make(
    folder: Path,
    rewards: Mapping[int, float],
    *,
    tasks: Iterable[int] = range(8),
    fails: int | None = None,
    repeats: int = 1,
    **options: Any,
) -> Path:
    """A run that validates twice: before, when it solves nothing, and after."""

    @ly.rollout
    async def agent(task: dict[str, int], rollout: ly.Rollout) -> float:
        if task["n"] == fails:
            raise ValueError("broke")
        ly.emit_message(f"answer {task['n']}")
        return rewards.get(task["n"], 0.0) if rollout.metadata["step"] else 0.0

    @ly.algo
    async def search(*, store: ly.LightningStore, run: Run) -> None:
        for step in (0, 1):
            wanted = [n for n in tasks for _ in range(repeats)]
            asked = [await store.enqueue_rollout({"n": n}, mode="val", metadata={"step": step}) for n in wanted]
            await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in asked])
            run.report({"reward": step / 2}, stage="val", iteration=step)

    ly.Trainer(algorithm=search, run_dir=folder, progress=False, **options).fit(agent)
    return folder


def compared(*folders: Path) -> dict[str, Any]:
    found = compare_runs([open_run(each) for each in folders])
    json.dumps(found, allow_nan=False)
    return found


def tasks_of(flipped: list[dict[str, Any]]) -> list[int]:
    return sorted(each["task"]["n"] for each in flipped)


def test_the_tasks_that_flipped_are_listed_with_their_evidence(tmp_path: Path) -> None:
    first = make(tmp_path / "first", {0: 1.0, 1: 1.0, 2: 1.0})
    second = make(tmp_path / "second", {1: 1.0, 2: 1.0, 3: 0.5, 4: 0.4}, fails=2, n_runners=2)
    found = compared(first, second)
    (against,) = found["against_first"]
    assert against["reason"] is None and against["tasks"] == {"same": 8, "only_first": 0, "only_second": 0}
    assert (tasks_of(against["solved"]), tasks_of(against["lost"])) == ([3], [0, 2])
    (solved,) = against["solved"]
    assert [one["reward"] for side in ("before", "after") for one in solved[side]["rollouts"]] == [0.0, 0.5]
    assert solved["after"]["answer"] == "answer 3"
    lost = next(each for each in against["lost"] if each["task"]["n"] == 2)
    assert lost["after"]["rollouts"][0]["status"] == "failed" and lost["after"]["rollouts"][0]["reward"] is None
    assert (against["paired"], against["left_out"], against["better"], against["worse"]) == (True, 1, 2, 1)
    assert against["difference"]["mean"] == pytest.approx((-1.0 + 0.5 + 0.4) / 7)
    assert found["configuration"] == {
        "agent.fails": [None, 2],
        "agent.rewards": [{"0": 1.0, "1": 1.0, "2": 1.0}, {"1": 1.0, "2": 1.0, "3": 0.5, "4": 0.4}],
        "trainer.n_runners": ["(default)", 2],
    }
    assert found["code"] == {} and found["control"] == [[], []]
    assert [each["failed"] for each in found["totals"]] == [0, 2]
    assert [each["last"] for each in found["val_reward"]] == [0.5, 0.5]


def test_a_run_that_is_compared_with_itself_differs_in_nothing(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", {0: 1.0}, repeats=3)
    found = compared(folder, folder)
    assert found["configuration"] == {} and found["versions"] == {}
    (against,) = found["against_first"]
    assert (against["difference"]["mean"], against["solved"], against["lost"]) == (0.0, [], [])
    assert against["tasks"]["same"] == 8, "repeats of a task are one task"


def test_other_tasks_are_not_paired_and_some_of_them_are(tmp_path: Path) -> None:
    first, other = make(tmp_path / "a", {1: 1.0}), make(tmp_path / "b", {9: 1.0}, tasks=range(8, 16))
    overlapping = make(tmp_path / "c", {7: 1.0}, tasks=range(6, 10))
    apart, partly = compared(first, other, overlapping)["against_first"]
    assert (apart["paired"], apart["tasks"]["same"], apart["difference"]["method"]) == (False, 0, "Newcombe")
    assert partly["tasks"] == {"same": 2, "only_first": 6, "only_second": 2} and tasks_of(partly["solved"]) == [7]


@pytest.mark.parametrize(
    ("rewards", "other", "line", "solved"),
    [
        ({0: -1.0, **dict.fromkeys(range(1, 8), -1.0)}, {0: 1.0, **dict.fromkeys(range(1, 8), -1.0)}, 0.0, [0]),
        ({0: 12.0, 1: 3.0}, {0: 40.0, 1: 5.0}, None, []),
        ({0: 0.49}, {0: 0.5}, 0.5, [0]),
    ],
)
def test_the_line_between_solved_and_failed_is_that_of_the_rewards(
    tmp_path: Path, rewards: dict[int, float], other: dict[int, float], line: float | None, solved: list[int]
) -> None:
    (against,) = compared(make(tmp_path / "a", rewards), make(tmp_path / "b", other))["against_first"]
    assert (against["solved_from"], tasks_of(against["solved"]), against["lost"]) == (line, solved, [])


def test_a_variable_without_a_value_and_a_long_list_are_no_obstacle(tmp_path: Path) -> None:
    if tmp_path.name == "never":
        later = 1

    @ly.rollout
    async def agent(task: int, numbers: Any = tuple(range(10**5))) -> float:
        return float(later if task < 0 else 1)

    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False).fit(agent, val_dataset=[1])
    options = open_run(tmp_path / "run").record.config["agent"]["options"]
    assert list(options) == ["numbers"] and len(options["numbers"]) == 100


def test_a_validation_that_was_cut_off_is_not_compared(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", {1: 1.0}), make(tmp_path / "b", {1: 1.0})
    rows = (second / "metrics.jsonl").read_text().splitlines()
    (second / "metrics.jsonl").write_text(rows[0] + "\n")  # as if it were still under way
    (against,) = compared(first, second)["against_first"]
    assert tasks_of(against["lost"]) == [1], "the validation before it counts, in which nothing was solved"
    (second / "metrics.jsonl").write_text("")
    (against,) = compared(first, second)["against_first"]
    assert against == {"reason": "b: its store has no rollout of a validation that has ended"}


def test_a_run_without_its_store_says_so_and_the_rest_is_compared(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a", {1: 1.0}), make(tmp_path / "b", {1: 1.0})
    for path in second.glob("store.sqlite*"):
        path.unlink()
    found = compared(first, second)
    assert "b: " in found["against_first"][0]["reason"] and "reason" in found["totals"][1]
    assert [each["last"] for each in found["val_reward"]] == [0.5, 0.5]
    shutil.rmtree(first)
    rl = tmp_path / "rl"
    rl.mkdir()
    manifest = json.loads((second / "run.json").read_text())
    manifest["config"].pop("store", None)
    (rl / "run.json").write_text(json.dumps({**manifest, "kind": "rl", "run_id": "sim", "name": "sim"}))
    assert "sim: it has no store of rollouts" in compared(second, rl)["against_first"][0]["reason"]
