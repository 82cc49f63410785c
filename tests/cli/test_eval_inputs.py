"""What `leyden eval` reads: agents, tasks and resources that are wrong are refused with the place and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leyden.cli.eval_inputs import load_agent, load_tasks, read_given
from leyden.errors import ConfigError
from leyden.litagent import LitAgent
from leyden.types import PromptTemplate

AGENTS = """
import leyden as ly

@ly.rollout
async def agent(task: str) -> float:
    return 1.0

class Other(ly.LitAgent):
    def rollout(self, task, resources, rollout):
        return 0.0

def plain(task):
    return 1.0
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with agents in `agents_of_a_user.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "agents_of_a_user.py").write_text(AGENTS)
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    return tmp_path


@pytest.mark.parametrize("spec", ["agents_of_a_user:agent", "agents_of_a_user.py:agent", "agents_of_a_user:Other"])
def test_an_agent_is_found_in_a_module_or_a_file(work: Path, spec: str) -> None:
    assert isinstance(load_agent(spec), LitAgent)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("agent", "give module:agent or file.py:agent"),
        ("no_such_module:agent", "there is no module 'no_such_module', neither installed nor as no_such_module.py in"),
        ("no_such_file.py:agent", "there is no file no_such_file.py"),
        ("agents_of_a_user:agnet", "agents_of_a_user has no 'agnet'; agents there: agent"),
        ("agents_of_a_user:plain", "is a function, and no agent; agents there: agent; decorate the function"),
        ("needs_more:agent", "needs_more needs the module 'a_module_that_is_not_there', which is not installed"),
    ],
)
def test_an_agent_that_cannot_be_found_is_named(work: Path, spec: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_agent(spec)


@pytest.mark.parametrize(
    ("name", "content", "tasks"),
    [
        ("t.jsonl", '{"q": 1}\n\n"two"\n', [{"q": 1}, "two"]),
        ("t.json", '[{"q": 1}, 2]', [{"q": 1}, 2]),
        ("t.csv", 'q,a\n"1, 2",x\n', [{"q": "1, 2", "a": "x"}]),
    ],
)
def test_tasks_are_read(tmp_path: Path, name: str, content: str, tasks: list[Any]) -> None:
    (tmp_path / name).write_text(content)
    assert load_tasks(tmp_path / name) == tasks


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("t.jsonl", '{"q": 1}\n{"q": \n', r"t.jsonl, line 2 is not JSON"),
        ("t.json", '{"q": 1}', "holds a dict; it must be a list of tasks"),
        ("t.json", "[", "t.json is not JSON"),
        ("t.csv", "q,a\n1\n", "line 2 does not have 2 cells, as the header"),
        ("t.csv", "q,a\n", "holds no tasks"),
        ("t.txt", "x", "its name must end in .jsonl, .json, .csv"),
        ("t.jsonl", None, "cannot be read: No such file"),
    ],
)
def test_tasks_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: str | None, fault: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=fault):
        load_tasks(tmp_path / name)


async def test_models_are_servers_or_one_folder(tmp_path: Path) -> None:
    given = await read_given(["a=http://x:1/v1", f"b={tmp_path}"], None)
    assert given.servers == {"a": "http://x:1/v1"}
    assert given.folder == ("b", str(tmp_path))
    assert given.llms == {"a": ("a", {}), "b": ("b", {"temperature": 1.0})}


@pytest.mark.parametrize(
    ("models", "fault"),
    [
        (["policy"], "must be NAME=URL or NAME=FOLDER"),
        (["a=./nowhere"], "there is no folder ./nowhere"),
        (["a=http://x/v1", "a=http://y/v1"], "names 'a' twice"),
        (["a=.", "b=.."], "is loaded here already"),
    ],
)
async def test_models_that_cannot_be_are_refused(models: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        await read_given(models, None)


async def test_a_file_of_resources_holds_templates_by_name(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"prompt": "Answer {question}"}))
    assert (await read_given([], str(path))).resources["prompt"] == PromptTemplate(template="Answer {question}")
    for content, fault in (("[]", "must be an object"), ('{"p": 1}', "r.json: p"), ("{", "is not JSON")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=fault):
            await read_given([], str(path))
