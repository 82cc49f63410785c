"""The example of a real model: what its tasks are, and its program from start to end with a tiny model."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from leyden.training.runs import open_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real_model"


def module_of_the_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module as a program in the example's folder does, and leave none of its names behind."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    own = [path.stem for path in EXAMPLE.glob("*.py")]
    for module in own:
        monkeypatch.delitem(sys.modules, module, raising=False)
    imported = importlib.import_module(name)
    for module in own:
        sys.modules.pop(module, None)
    return imported


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module_of_the_example("tasks", monkeypatch)


def words(requests: Mapping[str, list[str]]) -> set[str]:
    return {request for several in requests.values() for request in several}


def test_held_out_requests_have_other_words_and_other_arguments(tasks: ModuleType) -> None:
    train, held_out = tasks.train_tasks(), tasks.held_out_tasks()
    assert (len(train), len(held_out)) == (48, 100)
    assert len({task["request"] for task in (*train, *held_out)}) == 148
    assert not words(tasks.TRAIN_REQUESTS) & words(tasks.HELD_OUT_REQUESTS)
    assert not {task["argument"] for task in train} & {task["argument"] for task in held_out}
    assert {task["tool"] for task in (*train, *held_out)} == set(tasks.TOOLS)


def test_no_constant_answer_solves_many_held_out_requests(tasks: ModuleType) -> None:
    held_out = tasks.held_out_tasks()
    calls = [(task["tool"], task["argument"]) for task in held_out]
    assert max(calls.count(call) for call in calls) == 5
    assert max(sum(task["tool"] == tool for task in held_out) for tool in tasks.TOOLS) == 35


def test_few_arguments_give_fewer_tasks(tasks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TRAIN_ARGUMENTS, "time", ["Rome", "Oslo"])
    assert sum(task["tool"] == "time" for task in tasks.train_tasks()) == 4 * 2


@pytest.mark.parametrize(
    ("name", "tool", "value", "message"),
    [
        ("TOOLS", "radio", str, "the tool 'radio' needs requests and arguments"),
        ("TRAIN_ARGUMENTS", "time", [], "the tool 'time' needs requests and arguments"),
        ("TRAIN_REQUESTS", "time", ["How late is it?"], "'How late is it\\?' needs {} where the argument of 'time'"),
        ("TRAIN_REQUESTS", "wether", ["Is it cold in {}?"], "wether has requests or arguments, and is not in TOOLS"),
    ],
)
def test_what_is_missing_for_a_tool_is_named(
    tasks: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, tool: str, value: object, message: str
) -> None:
    monkeypatch.setitem(getattr(tasks, name), tool, value)
    with pytest.raises(ValueError, match=message):
        tasks.train_tasks()


def test_held_out_questions_are_others_and_no_single_answer_solves_many(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    reasoning = module_of_the_example("reasoning", monkeypatch)
    train, held_out = reasoning.train_tasks(), reasoning.held_out_tasks()
    assert (len(train), len(held_out)) == (1000, 100)
    assert not {task["question"] for task in train} & {task["question"] for task in held_out}
    answers = [task["answer"] for task in held_out]
    assert max(answers.count(answer) for answer in answers) <= 2
    assert "\n" not in reasoning.question_of(held_out[0]).removesuffix("\nAnswer:")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_program_trains_measures_and_continues(tmp_path: Path) -> None:
    """A tiny model knows no request, so nothing is learned here. Numbers with a real one stand on the example's page."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    from leyden.cli.demo import WEIGHTS

    def train(*arguments: object) -> str:
        command = [sys.executable, str(EXAMPLE / "train.py"), str(WEIGHTS), *map(str, arguments)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "held-out tasks solved: 0% before, 0% after" in train(
        "--steps", 2, "--sft-steps", 1, "--run-dir", tmp_path / "run"
    )
    assert [row.metrics["rollouts"] for row in open_run(tmp_path / "run").metrics("val")] == [100, 100]
    train("--steps", 3, "--sft-steps", 1, "--resume", tmp_path / "run")
    rows = open_run(tmp_path / "run").metrics("train")
    assert [row.iteration for row in rows] == [1, 2, 3]
    assert ["imitated" in row.metrics for row in rows] == [True, False, False]
    assert json.loads((tmp_path / "run" / "run.json").read_text())
