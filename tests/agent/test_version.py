"""An agent's version changes with its code, and with nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.agent import LitAgent, agent_version

MODULE = """
import leyden as ly
from math import sqrt

FACTOR = 2
UNUSED = 3

def helper(number):
    return deeper(number) * FACTOR

def deeper(number):
    return sqrt(number)

@ly.rollout
async def agent(task):
    return helper(task)  # a comment

class Agent(ly.LitAgent):
    def rollout(self, task, resources, rollout):
        return helper(task)
"""


def loaded(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of this source, under the same name each time."""
    import linecache
    import sys

    path = folder / "versioned.py"
    path.write_text(source)
    linecache.clearcache()
    spec = importlib.util.spec_from_file_location("versioned", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "versioned", module)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def versions(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, str | None]:
    module = loaded(folder, source, monkeypatch)
    return agent_version(module.agent), agent_version(module.Agent())


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("FACTOR = 2", "FACTOR = 4", True),
        ("sqrt(number)", "sqrt(number) + 1", True),
        ("from math import sqrt", "from cmath import sqrt", True),
        ("UNUSED = 3", "UNUSED = 4", False),
        ("# a comment", "# another", False),
        ("FACTOR = 2", "FACTOR   =   2", False),
    ],
)
def test_a_version_changes_with_what_the_agent_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, changes: bool
) -> None:
    before = versions(tmp_path, MODULE, monkeypatch)
    after = versions(tmp_path, MODULE.replace(old, new), monkeypatch)
    assert before[0] is not None and before[0].startswith("versioned.agent@")
    assert before[1] is not None and before[1].startswith("versioned.Agent@")
    assert [a != b for a, b in zip(before, after, strict=True)] == [changes, changes]


RULES = """
TABLE = {}
FACTOR = 1

def rule(name):
    def add(function):
        TABLE[name] = os.environ["VERSIONED_FACTOR"]
        return function
    return add

@rule("a")
def unused():
    pass
"""


@pytest.mark.parametrize(
    "rest",
    [
        'FACTOR = int(os.environ["VERSIONED_FACTOR"])',
        'if os.environ["VERSIONED_FACTOR"] == "2":\n    FACTOR = 2',
        'TABLE = {}\nFACTOR = 1\nTABLE["a"] = int(os.environ["VERSIONED_FACTOR"])',
        'TABLE = []\nFACTOR = 1\nTABLE.append(int(os.environ["VERSIONED_FACTOR"]))',
        RULES,
        'FACTOR = 1\nTABLE = re.compile(os.environ["VERSIONED_FACTOR"])',
    ],
)
def test_a_version_changes_with_the_values_of_the_variables_that_the_agent_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    source = MODULE.replace("FACTOR = 2", f"import os, re\nTABLE = 1\nFACTOR = 0\n{rest}")
    source = source.replace("return deeper(number) * FACTOR", "return deeper(number) * FACTOR, TABLE")
    found: list[tuple[str | None, str | None]] = []
    for value in ("2", "2", "4"):
        monkeypatch.setenv("VERSIONED_FACTOR", value)
        found.append(versions(tmp_path, source, monkeypatch))
    assert found[0] == found[1]
    assert None not in found[0]
    assert [a != b for a, b in zip(found[0], found[2], strict=True)] == [True, True]


@pytest.mark.parametrize("value", ["object()", "{'a': print}", "lambda: 2"])
def test_an_agent_that_uses_a_variable_without_a_text_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    assert versions(tmp_path, MODULE.replace("FACTOR = 2", f"FACTOR = {value}"), monkeypatch) == (None, None)


def test_local_variables_types_and_loggers_leave_the_version_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = "import logging\nT = dict[str, int]\nlogger = logging.getLogger()\ntask = object()\nlocal = object()\nFACTOR = 2"
    source = MODULE.replace("FACTOR = 2", rest).replace(
        "return deeper(number)", "local: T = 1\n    logger.info(local)\n    return deeper(number)"
    )
    assert None not in versions(tmp_path, source, monkeypatch)


def test_an_agent_whose_source_does_not_say_all_has_no_version() -> None:
    bonus = 3.0

    @ly.rollout
    async def keeps(task: float) -> float:
        return task + bonus

    class Set(LitAgent[float]):
        def __init__(self, bonus: float) -> None:
            self.bonus = bonus

    exec("import leyden as ly\n@ly.rollout\nasync def typed(task):\n    return 1.0", found := {"__name__": "nowhere"})
    assert [agent_version(agent) for agent in (keeps, Set(1.0), found["typed"])] == [None, None, None]
