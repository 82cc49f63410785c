"""`leyden run`, as a user runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leyden.cli import main

AGENT = """
import leyden as ly

@ly.rollout
def agent(task: dict) -> float:
    return float(task["n"] % 2)

def tasks():
    return [{"n": n} for n in range(4)]

def settings(epochs, name="made"):
    return {"agent": agent, "val": tasks(), "algorithm": ly.Baseline(n_epochs=epochs), "trainer": {"name": name}}
"""
FILE = """
agent: agent_to_run.py:agent
val: tasks.jsonl
algorithm:
  type: baseline
  n_epochs: 2
trainer: {n_runners: 2}
"""

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command in a folder with an agent, tasks and a file; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "agent_to_run", raising=False)
    (tmp_path / "agent_to_run.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "train.yaml").write_text(FILE)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, told.out, told.err

    return call


def test_a_file_starts_a_run_which_records_what_it_was_started_from(said: Said, tmp_path: Path):
    code, out, err = said("run", "train.yaml", "--set", "n_epochs=1", "--json")
    assert code == 0, err
    record = json.loads((Path(json.loads(out)["run"]) / "run.json").read_text())
    assert record["status"] == "succeeded"
    assert record["config"]["start"] == {
        "file": str(tmp_path / "train.yaml"),
        "settings": {
            "agent": "agent_to_run.py:agent",
            "val": "tasks.jsonl",
            "algorithm": {"type": "baseline", "n_epochs": 1},
            "trainer": {"n_runners": 2},
        },
        "overrides": {"algorithm.n_epochs": 1},
    }
    assert record["config"]["n_runners"] == 2


def test_relative_paths_mean_the_files_folder_and_the_run_is_kept_where_the_command_was_given(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, err = said("run", "../train.yaml", "--json")
    assert code == 0, err
    assert Path.cwd() == tmp_path / "elsewhere"
    assert Path(json.loads(out)["run"]).parent == tmp_path / "elsewhere" / ".leyden"


def test_a_dry_run_prints_the_settings_and_starts_nothing(said: Said, tmp_path: Path):
    (tmp_path / "t.toml").write_text(
        'agent = "agent_to_run.py:agent"\nval = "agent_to_run.py:tasks"\n[algorithm]\ntype = "baseline"\n'
        '[trainer.initial_resources.llm]\nresource_type = "llm"\nendpoint = "http://x"\nmodel = "m"\napi_key = "s3cret"\n'
    )
    code, out, err = said("run", "t.toml", "--dry-run", "--json")
    assert code == 0, err
    assert "s3cret" not in out + err and json.loads(out)["trainer"]["initial_resources"]["llm"]["api_key"] == "***"
    assert "4 tasks, Baseline: nothing was started" in err
    assert not (tmp_path / ".leyden").exists()


def test_a_function_returns_the_settings_with_live_objects(said: Said):
    code, out, err = said(
        "run", "agent_to_run.py:settings", "--set", "epochs=2", "--set", "trainer.name=other", "--json"
    )
    assert code == 0, err
    record = json.loads((Path(json.loads(out)["run"]) / "run.json").read_text())
    assert record["name"] == "other" and record["config"]["algorithm"]["options"]["n_epochs"] == 2
    assert "needs epochs; give --set epochs=" in said("run", "agent_to_run.py:settings", "--dry-run")[2]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("n_epoch=1", "--set algorithm.n_epoch: Baseline has no option 'n_epoch'; did you mean 'n_epochs'?"),
        ("trainer.n_runners=four", "n_runners is 'four'; it must be a whole number or null"),
        ("trainer.n_runners=true", "n_runners is True; it must be a whole number or null"),
        ("trainer.progress=1", "progress is 1; it must be true or false"),
        ("span_verbosity=valuse", "it must be one of"),
        ("trainer.strategy=smh", "'smh' is not known; did you mean 'shm'?"),
        ("trainer.strategy={type: cs, patience_seconds: soon}", "patience_seconds is 'soon'; it must be a number"),
        ("trainer.retention.max_rollout=3", "max_rollout"),
        ("trainer.callbacks=[{type: EarlyStoping}]", "did you mean 'EarlyStopping'?"),
        ("trainer.algorithm=baseline", "the algorithm is a section of its own"),
        ("algorithm.type=nowhere:Thing", "there is no module 'nowhere'"),
        ("agent=agent_to_run.py:agnet", "has no 'agnet'; agents there: agent"),
        ("agent=none.py:agent", "there is no file none.py"),
        ("val=none.jsonl", "--set val: none.jsonl cannot be read: No such file"),
        ("val=tasks.txt", "must end in .jsonl, .json, .csv"),
        ("trainr.x=1", "did you mean 'trainer'?"),
        ("vessel={}", "leave agent, val, algorithm out"),
        ("trainer=3", "it must be a mapping of options"),
        ("trainer.initial_resources={x: {resource_type: llm}}", "trainer.initial_resources"),
        ("agent", "write --set PATH=VALUE"),
        ("val=[1", "--set val"),
        ("trainer.strategy.api_key=s3cret", "has no option 'api_key'"),
        ("trainer.strategy={type: cs, token: [s3cret]}", "token is ***; it must be text or null"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_with_its_place_and_what_is_possible(said: Said, option: str, message: str):
    code, out, err = said("run", "train.yaml", "--dry-run", "--set", option)
    assert (code, out) == (1, "") and message in err and "s3cret" not in err, err


def test_a_mistake_in_the_file_is_named_with_its_line(said: Said, tmp_path: Path):
    for before, after, message in [
        ("n_epochs: 2", "n_epoch: 2", "train.yaml, line 6: algorithm.n_epoch: Baseline has no option"),
        ("n_epochs: 2", "n_epochs: x", "train.yaml, line 6: algorithm.n_epochs: n_epochs is 'x'"),
        ("n_epochs: 2", "n_epochs: -1", "train.yaml, line 4: algorithm: n_epochs is -1"),
        ("type: baseline", "typ: baseline", "train.yaml, line 4: algorithm: there is no `type`"),
        ("{n_runners: 2}", "{n_runners: 2, n_runners: 3}", "line 7: the name 'n_runners' a second time"),
        ("agent: agent_to_run.py:agent", "agnet: agent_to_run.py:agent", "did you mean 'agent'?"),
        ("agent: agent_to_run.py:agent", "", "train.yaml has no agent"),
    ]:
        (tmp_path / "train.yaml").write_text(FILE.replace(before, after))
        code, out, err = said("run", "train.yaml")
        assert (code, out) == (1, "") and message in err, err
    assert not (tmp_path / ".leyden").exists()


def test_a_float_in_the_notation_of_python_is_a_number(said: Said):
    assert said("run", "train.yaml", "--dry-run", "--set", "polling_interval=1e-4")[0] == 0
    assert said("run", "train.yaml", "--dry-run", "--set", "n_epochs=1e1")[0] == 0
    assert said("run", "train.yaml", "--dry-run", "--set", "n_epochs=1.5")[0] == 1
