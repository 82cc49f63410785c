"""examples/coding_agent: bugs are planted that the tests find, and the tasks measure something. No package is downloaded."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leyden.execution.task_folders.check import check_task
from leyden.execution.task_folders.folder import read_task
from leyden.testing import FakeUpstream
from leyden.training.runs import open_run
from tests.execution.test_task_folders import works

FOLDER = Path(__file__).parents[2] / "examples" / "coding_agent"
MODULE = """def middle(low, high):
    if low > high:
        return None
    return (low + high) // 2


def unused(flag):
    return not flag and flag == 7
"""
TESTS = """from small import a, b

def test_a(): assert a.middle(2, 6) == 4 and a.middle(3, 3) == 3 and a.middle(5, 1) is None
def test_b(): assert b.middle(2, 6) == 4 and b.middle(3, 3) == 3 and b.middle(5, 1) is None
"""


needs_namespaces = pytest.mark.skipif(not works(), reason="this machine has no namespaces for this user")


def module_of_the_example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    for module in ("line_agent", "make_tasks", "train"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_the_example("make_tasks", monkeypatch)


@pytest.fixture
def source(tmp_path: Path, maker: Any) -> Any:
    root = tmp_path / "small-1.0"
    (root / "small" / "tests").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "small" / f"{name}.py").write_text(MODULE)
    (root / "small" / "__init__.py").write_text("")
    (root / "small" / "tests" / "test_small.py").write_text(TESTS)
    (root / "LICENSE").write_text("MIT")
    tests = {"a.py": ["small/tests/test_small.py"], "b.py": ["small/tests/test_small.py"]}
    return maker.Source(maker.Package("small", "1.0", "small", tests), root)


@pytest.mark.slow
@needs_namespaces
async def test_each_task_fails_as_it_is_and_passes_with_its_solution(tmp_path: Path, maker: Any, source: Any) -> None:
    out = tmp_path / "tasks"
    assert maker.make_tasks(source, 1, out, random.Random(0)) == {"line": 1, "file": 1, "several": 1}
    for size, n_changed in (("line", 1), ("file", 1), ("several", 2)):
        task = read_task(out / f"small-{size}-000")
        assert not list((task.path / "environment").rglob("*test*")), "the agent sees no tests"
        solved = list((task.path / "solution" / "small").iterdir())
        assert len(solved) == n_changed
        assert all(file.read_text() == MODULE for file in solved)
    found = await check_task(read_task(out / "small-several-000"))
    assert (found.causes, found.empty_reward) == ([], 0.0)
    assert "Line " in (out / "small-line-000" / "instruction.md").read_text()


def test_every_bug_changes_one_line_of_a_function(maker: Any) -> None:
    found = list(maker.edits("a.py", MODULE))
    changes = {(edit.right.strip(), edit.wrong.strip()) for edit in found}
    assert ("if low > high:", "if low >= high:") in changes
    assert ("return (low + high) // 2", "return (low - high) // 2") in changes
    assert ("return (low + high) // 2", "return (low + high) // 3") in changes
    assert ("return not flag and flag == 7", "return flag and flag == 7") in changes
    assert {edit.function for edit in found} == {"middle", "unused"}
    assert {(edit.wrong.strip(), edit.part) for edit in found} >= {
        ("if low >= high:", ">="),
        ("return (low - high) // 2", "-"),
        ("return flag and flag == 7", "flag"),
        ("return not flag or flag == 7", "or"),
    }


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("size", "n_calls"), [("token", 1), ("line", 1), ("lines", 3)])
async def test_the_line_agent_is_rewarded_by_the_tests(
    tmp_path: Path, maker: Any, source: Any, monkeypatch: pytest.MonkeyPatch, size: str, n_calls: int
) -> None:
    line_agent = module_of_the_example("line_agent", monkeypatch)
    assert maker.make_tasks(source, 1, tmp_path / "tasks", random.Random(0), [size]) == {size: 1}
    (task,) = line_agent.tasks_of(tmp_path / "tasks", f"small-{size}-*")
    places = [(file, int(number) - 1) for number, file, _ in line_agent.BUG.findall(task["instruction"])]
    assert len(places) == n_calls
    right, wrong = (
        [(Path(task["path"]) / kind / file).read_text().splitlines()[place].strip() for file, place in places]
        for kind in ("solution", "environment")
    )
    for answers, reward in ((right, 1.0), (right[:-1] + wrong[-1:], 0.0), ([*right[:-1], "("], 0.0)):
        replies = iter(answers)
        async with FakeUpstream(reply=lambda body, replies=replies: f" {next(replies)} ") as upstream:
            assert await line_agent.correct(task, upstream.llm()) == reward
            assert ["Wrong part: " in call.request["prompt"].split("\n\n")[-1] for call in upstream.calls] == [
                size == "token"
            ] * n_calls


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(400)
def test_the_program_imitates_the_teacher_compares_and_measures(tmp_path: Path, maker: Any, source: Any) -> None:
    """A tiny model corrects no line, so nothing is learned here. Figures of a real one stand in the example's page."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    from leyden.cli.demo import WEIGHTS

    model = tmp_path / "model"
    shutil.copytree(WEIGHTS, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))  # its tokens are bytes
    assert maker.make_tasks(source, 2, tmp_path / "tasks", random.Random(0), ["token", "line"])

    def printed(*command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env=os.environ | {"PYTHONPATH": str(FOLDER.parents[1])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name in ("token", "line"):
        (tmp_path / name).write_text(printed(FOLDER / "line_agent.py", tmp_path / "tasks", f"*-{name}-*"))
    options = ["--sft-steps", 2, "--steps", 2, "--run-dir", tmp_path / "run"]
    shown = printed(FOLDER / "train.py", model, tmp_path / "token", tmp_path / "line", *options)
    assert "of 2 held-out tasks solved: 0% before, 0% after imitation, 0% at the end" in shown
    (taught,) = open_run(tmp_path / "run" / "teacher").metrics("train")
    assert (taught.metrics["reward"], taught.metrics["rollouts"]) == (1.0, 2)
    imitated = open_run(tmp_path / "run" / "sft").metrics("train")
    assert [row.metrics["optimizer_steps"] for row in imitated] == [1, 1]
    assert len(open_run(tmp_path / "run" / "grpo").metrics("val")) == 1
