"""examples/coding_agent: bugs are planted that the tests find, and the tasks measure something. No package is downloaded."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from leyden.execution.task_folders.check import check_task
from leyden.execution.task_folders.folder import read_task
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


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    sys.modules.pop("make_tasks", None)
    import make_tasks  # pyright: ignore[reportMissingImports] -- a file of the example

    return make_tasks


@pytest.mark.slow
@pytest.mark.skipif(not works(), reason="this machine has no namespaces for this user")
async def test_each_task_fails_as_it_is_and_passes_with_its_solution(tmp_path: Path, maker: Any) -> None:
    root = tmp_path / "small-1.0"
    (root / "small" / "tests").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "small" / f"{name}.py").write_text(MODULE)
    (root / "small" / "__init__.py").write_text("")
    (root / "small" / "tests" / "test_small.py").write_text(TESTS)
    (root / "LICENSE").write_text("MIT")
    tests = {"a.py": ["small/tests/test_small.py"], "b.py": ["small/tests/test_small.py"]}
    source = maker.Source(maker.Package("small", "1.0", "small", tests), root)

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
