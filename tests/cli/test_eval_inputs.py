"""What `leyden eval` reads: agents, tasks and resources that are wrong are refused with the place and the remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from leyden.agent import LitAgent
from leyden.cli.demo import WEIGHTS
from leyden.cli.eval_inputs import read_given
from leyden.cli.inputs import load_agent, load_tasks
from leyden.errors import ConfigError
from leyden.store import open_store
from leyden.training.runs import open_run
from leyden.training.runs.rollouts import latest_resources
from leyden.types import PromptTemplate
from leyden.types.run_record import RunRecord

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
    monkeypatch.delitem(sys.modules, "agents_of_a_user", raising=False)  # another test's
    (tmp_path / "agents_of_a_user.py").write_text(AGENTS)
    (tmp_path / "calendar.py").write_text(AGENTS)
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "nothing_there.py").touch()
    (tmp_path / "mistyped.py").write_text("agent = 1\nother = 1)\n")
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
        ("agents_of_a_user:agnet", "agents_of_a_user has no 'agnet'; there are agents: agent"),
        ("agents_of_a_user:plain", "is a function, and no agent; there are agents: agent; decorate the function"),
        ("calendar.py:agent", "calendar.py has the name of the module 'calendar' that is in use .*; rename the file"),
        (
            "needs_more:agent",
            "needs_more needs the module 'a_module_that_is_not_there', which is not installed; install the",
        ),
        ("nothing_there.py:agent", "nothing_there.py has no 'agent'; define it there, or give another name"),
        ("mistyped.py:agent", "mistyped.py, line 2: unmatched .*; correct the line, or one before it"),
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
        ("t.csv", "q,a\n1\n", "line 2 has 1 cells, and the header 2; put quotes around"),
        ("t.csv", "q,a\n1,2,3,4\n", "line 2 has 4 cells, and the header 2; put quotes around"),
        ("t.csv", "q,a\n", "holds no tasks"),
        ("t.csv", "q,q\n1,2\n", "the columns 'q' and 'q', one of which would hide the other"),
        ("t.csv", "q, Q\n1,2\n", "the columns 'q' and ' Q'"),
        ("t.csv", "q;a\n1;2\n", "is separated by ';'; separate its columns by commas"),
        ("t.csv", "q\ta\n1\t2\n", r"is separated by '\\t'"),
        ("t.jsonl", '{"q": 1}\n{"q": {"a": 1, "a": 2}}\n', "line 2 is not JSON: the name 'a' stands twice"),
        ("t.json", '[{"q": 1, "q": 2}]', "the name 'q' stands twice in one object"),
        ("t.jsonl", "[" * 100_000 + "]" * 100_000, "line 1 is not JSON"),
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
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    given = await read_given(["a=http://x:1/v1", f"b={tmp_path}"], None)
    assert given.servers == {"a": "http://x:1/v1"}
    assert given.folder == ("b", str(tmp_path))
    assert given.llms == {"a": ("a", {}), "b": ("b", {"temperature": 1.0})}


@pytest.mark.parametrize(
    ("models", "fault"),
    [
        (["policy"], "must be NAME=URL, NAME=FOLDER or NAME=RUN"),
        (["a=./nowhere"], "there is no folder ./nowhere"),
        (["a=frist"], r"there is no run 'frist' in .*\. A model of the hub is ORG/NAME, and a folder \./NAME"),
        (["a=http://x/v1", "a=http://y/v1"], "names 'a' twice"),
        ([f"a={WEIGHTS}", f"b={WEIGHTS}"], "is loaded here already"),
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


def test_a_line_of_tasks_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    tasks = ["a\u2028b", "c\u0085d"]
    path.write_text("\r\n".join(json.dumps(task, ensure_ascii=False) for task in tasks), newline="")
    assert load_tasks(path) == tasks


async def test_resources_of_a_run_are_its_own_in_a_store_of_several_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.sqlite"
    async with open_store(url) as store:
        for name in ("first", "second"):
            await store.start_run(RunRecord(run_id=name, name=name, kind="fit", start_time=1.0))
            await store.update_resources(f"rs-{name}", {"prompt": PromptTemplate(template=name, engine="f-string")})
            await store.enqueue_rollout(input=1, run_id=name, resources_id=f"rs-{name}")
        for name in ("first", "second"):
            found = await latest_resources(open_run(url, run_id=name), store)
            assert found is not None and found.resources_id == f"rs-{name}"


def test_a_file_that_starts_a_run_when_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("starts_a_run.py").write_text(
        "import leyden as ly\n\n@ly.rollout\ndef agent(task):\n    return 1.0\n\n"
        "ly.Trainer(algorithm='baseline').fit(agent, [1])\n"
    )
    with pytest.raises(
        ConfigError, match=r"starts a run when leyden eval imports it; put .* `if __name__ == '__main__':`"
    ):
        load_agent("starts_a_run.py:agent")
    assert not Path(".leyden").exists()
