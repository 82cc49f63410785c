"""`leyden run`, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
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
    for name in ("agent_to_run", "walk_to_run", "slow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
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
        "folder": str(tmp_path),
        "cwd": str(tmp_path),
        "settings": {
            "agent": "agent_to_run.py:agent",
            "val": "tasks.jsonl",
            "algorithm": {"type": "baseline", "n_epochs": 1},
            "trainer": {"n_runners": 2},
        },
        "overrides": {"algorithm.n_epochs": 1},
        "arguments": {},
        "hidden": [],
    }
    assert record["config"]["agent"] == {"name": "agent_to_run.agent", "options": {}}
    assert list(record["config"]["code"]["files"]) == ["agent_to_run.py"]
    assert record["config"]["n_runners"] == 2


def test_relative_paths_mean_the_files_folder_and_the_run_is_kept_where_the_command_was_given(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, err = said("run", "../train.yaml", "--json")
    assert code == 0, err
    assert Path.cwd() == tmp_path / "elsewhere"
    run = Path(json.loads(out)["run"])
    assert run.parent == tmp_path / "elsewhere" / ".leyden"
    assert recorded(run)["config"]["cwd"] == str(tmp_path / "elsewhere"), "the recorded command can be pasted"


def test_a_dry_run_prints_the_settings_and_starts_nothing(said: Said, tmp_path: Path):
    (tmp_path / "t.toml").write_text(
        'agent = "agent_to_run.py:agent"\nval = "agent_to_run.py:tasks"\n[algorithm]\ntype = "baseline"\n'
        '[trainer.initial_resources.llm]\nresource_type = "llm"\nendpoint = "http://x"\nmodel = "m"\napi_key = "s3cret"\n'
    )
    code, out, err = said("run", "t.toml", "--dry-run", "--json")
    assert code == 0, err
    assert "s3cret" not in out + err and json.loads(out)["trainer"]["initial_resources"]["llm"]["api_key"] == "***"
    assert "Baseline, val 4 tasks: nothing was started" in err
    assert "no estimate: 4 rollouts at most, and no run of agent_to_run.agent in" in err
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
        ("polling_interval=true", "polling_interval is True; it must be a number"),
        (f"polling_interval=1{'0' * 400}", "it must be a number"),
        ("n_epochs=1e17", "n_epochs is 1e+17; it must be a whole number"),
        ("span_verbosity=valuse", "it must be one of"),
        ("trainer.strategy=smh", "'smh' is not known; did you mean 'shm'?"),
        ("trainer.strategy={type: cs, patience_seconds: soon}", "patience_seconds is 'soon'; it must be a number"),
        ("trainer.retention.max_rollout=3", "max_rollout"),
        ("trainer.callbacks=[{type: EarlyStoping}]", "did you mean 'EarlyStopping'?"),
        ("trainer.algorithm=baseline", "the algorithm is a section of its own"),
        ("algorithm.type=nowhere:Thing", "there is no module 'nowhere'"),
        ("agent=agent_to_run.py:agnet", "has no 'agnet'; there are agents: agent"),
        ("agent=none.py:agent", "there is no file none.py"),
        ("val=none.jsonl", "--set val: none.jsonl cannot be read: No such file"),
        ("val=tasks.txt", "must end in .jsonl, .json, .csv"),
        ("val=:x", "names no object of a module"),
        ("agent=3", "it must be the name of a component or its options: LitAgent (harness, process)"),
        ("agent={type: harness, name: pii}", "did you mean 'pi'?"),
        ("algorithm={}", "there is no `type`, which says which Algorithm; possible: apo,"),
        ("algorithm={type: grpo, backend: {type: isolated, model: ./nowhere}}", "there is no folder './nowhere'"),
        ("algorithm={type: grpo, backend: {type: isolated, model: x, lora: {rnk: 4}}}", "did you mean 'rank'?"),
        ("algorithm={type: gepa, budget: {rollouts: x}}", "rollouts is 'x'; it must be a whole number or null"),
        ("trainer.adapter={type: tracer_triplet, reward_match: frst}", "reward_match is 'frst'"),
        ("trainer.store={pth: x.db}", "did you mean 'path'?"),
        ("trainer.hooks=[{type: nowhere:Hook}]", "trainer.hooks.0.type"),
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


# ---- recorded runs -------------------------------------------------------------------------------


def recorded(folder: Path | str) -> dict[str, Any]:
    return json.loads((Path(folder) / "run.json").read_text())


def test_a_recorded_run_is_repeated_with_its_own_settings_though_the_file_has_changed(said: Said, tmp_path: Path):
    first = json.loads(said("run", "train.yaml", "--set", "n_epochs=3", "--set", "trainer.run_dir=first", "--json")[1])[
        "run"
    ]
    (tmp_path / "train.yaml").write_text("nothing: true")
    code, out, err = said("run", "--from", first, "--set", "trainer.n_runners=1", "--json")
    assert code == 0, err
    again = recorded(json.loads(out)["run"])["config"]
    assert (
        json.loads(out)["run"] != first and again["algorithm"]["options"]["n_epochs"] == 3 and again["n_runners"] == 1
    )
    assert again["start"]["overrides"] == {"algorithm.n_epochs": 3, "trainer.run_dir": "first", "trainer.n_runners": 1}


def test_a_function_is_called_again_with_its_arguments(said: Said):
    first = json.loads(said("run", "agent_to_run.py:settings", "--set", "epochs=2", "--json")[1])["run"]
    code, out, err = said("run", "--from", first, "--set", "name=second", "--json")
    assert code == 0, err
    again = recorded(json.loads(out)["run"])
    assert again["name"] == "second" and again["config"]["algorithm"]["options"]["n_epochs"] == 2


def test_a_secret_is_not_recorded_and_has_to_be_given_again(said: Said):
    option = (
        "trainer.initial_resources={llm: {resource_type: llm, endpoint: 'http://u:pa55@x', model: m, api_key: s3cret}}"
    )
    first = json.loads(said("run", "train.yaml", "--set", option, "--json")[1])["run"]
    content = (Path(first) / "run.json").read_text()
    assert "s3cret" not in content and "pa55" not in content
    code, _, err = said("run", "--from", first, "--dry-run")
    assert (
        code == 1 and "the secrets trainer.initial_resources.llm.endpoint, trainer.initial_resources.llm.api_key" in err
    )
    path = "trainer.initial_resources.llm"
    given = [f"{path}.api_key=s3cret", f"{path}.endpoint=http://y"]
    assert said("run", "--from", first, "--dry-run", "--set", given[0], "--set", given[1])[0] == 0


def test_a_secret_is_taken_anew_from_the_file_and_stars_are_no_secret(said: Said, tmp_path: Path):
    from leyden.cli.run_parts import read_recorded

    resources = """
  initial_resources:
    llm: {resource_type: llm, endpoint: 'http://u:pa55@x', model: m, api_key: s3cret}
    prompt: {resource_type: prompt_template, template: 'rate it from * to *** {n}'}
"""
    file = FILE.replace("trainer: {n_runners: 2}", f"trainer:{resources}")
    (tmp_path / "train.yaml").write_text(file)
    code, _, err = said("run", "train.yaml", "--set", "trainer.run_dir=first")
    assert code == 0, err
    hidden = recorded("first")["config"]["start"]["hidden"]
    assert hidden == [["settings", "trainer", "initial_resources", "llm", each] for each in ("endpoint", "api_key")]
    settings = read_recorded("first", {}, resume=False).settings["trainer"]["initial_resources"]
    assert settings["llm"]["api_key"] == "s3cret" and settings["llm"]["endpoint"] == "http://u:pa55@x"
    assert settings["prompt"]["template"] == "rate it from * to *** {n}"
    assert said("run", "--from", "first", "--dry-run")[0] == 0
    (tmp_path / "train.yaml").write_text(file.replace("pa55@x", "pa55@elsewhere"))
    code, _, err = said("run", "--from", "first")
    assert code == 1 and "does not record the secret trainer.initial_resources.llm.endpoint; give --set" in err, err
    (tmp_path / "train.yaml").unlink()
    assert "llm.endpoint, trainer.initial_resources.llm.api_key; give" in said("run", "--from", "first")[2]


def test_a_secret_argument_of_a_function_has_to_be_given_again(said: Said, tmp_path: Path):
    (tmp_path / "agent_to_run.py").write_text(AGENT.replace("epochs,", "token, epochs=1,"))
    first = json.loads(said("run", "agent_to_run.py:settings", "--set", "token=12345", "--json")[1])["run"]
    assert "12345" not in (Path(first) / "run.json").read_text()
    code, _, err = said("run", "--from", first)
    assert code == 1 and "does not record the secret token; give --set token=..." in err
    assert said("run", "--from", first, "--set", "token=12345", "--dry-run")[0] == 0


def test_a_run_of_the_first_version_is_repeated_with_its_secrets(said: Said, tmp_path: Path):
    option = "trainer.initial_resources={llm: {resource_type: llm, endpoint: 'http://x', model: m, api_key: s3cret}}"
    assert said("run", "train.yaml", "--set", option, "--set", "trainer.run_dir=first")[0] == 0
    record = recorded("first")
    for name in ("folder", "cwd", "arguments", "hidden"):
        del record["config"]["start"][name]
    del record["config"]["code"]
    (tmp_path / "first" / "run.json").write_text(json.dumps(record))
    assert "the secret trainer.initial_resources.llm.api_key; give" in said("run", "--from", "first")[2]
    code, _, err = said("run", "--from", "first", "--dry-run", "--set", "trainer.initial_resources=null")
    assert code == 0 and "run first did not record its code" in err, err


def test_a_run_of_a_program_is_refused_with_the_program(said: Said):
    @ly.rollout
    def agent(task: int) -> float:
        return 1.0

    ly.Trainer(algorithm="baseline", run_dir="other", progress=False).fit(agent, val_dataset=[1])
    for resume in ([], ["--resume"]):
        code, _, err = said("run", "--from", "other", *resume)
        assert code == 1 and "was not started by leyden run, but by a program: " in err


def test_what_cannot_be_resumed_is_refused(said: Said, tmp_path: Path):
    first = json.loads(said("run", "train.yaml", "--set", "trainer.store=memory", "--json")[1])["run"]
    assert "kept its rollouts in memory" in said("run", "--from", first, "--resume")[2]
    manifest = recorded(first)
    (Path(first) / "run.json").write_text(json.dumps({**manifest, "format": 99}))
    assert "this version of Leyden reads 1 and 2" in said("run", "--from", first)[2]
    (Path(first) / "run.json").write_text('{"run_id"')
    assert "is damaged" in said("run", "--from", first)[2]
    for start in ({}, {"file": "t.yaml", "settings": [], "overrides": {}}):
        damaged = {**manifest, "config": {**manifest["config"], "start": start, "code": 3}}
        (Path(first) / "run.json").write_text(json.dumps(damaged))
        assert "was started from is damaged in its run.json" in said("run", "--from", first)[2]
    assert said("compare", first, first)[0] == 0
    assert "there is no run 'none'" in said("run", "--from", "none")[2]
    assert said("run")[0] == said("run", "train.yaml", "--resume")[0] == said("run", "t.yaml", "--from", "x")[0] == 2
    file = {
        **manifest,
        "config": {**manifest["config"], "start": {"file": "/gone/t.yaml", "settings": {}, "overrides": {}}},
    }
    (Path(first) / "run.json").write_text(json.dumps(file))
    assert "/gone/t.yaml, in /gone, which is gone" in said("run", "--from", first)[2]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_killed_run_is_continued_from_what_it_has_finished(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
):
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, leyden as ly\n"
        "@ly.rollout\ndef agent(task: dict) -> float:\n"
        "    ran = pathlib.Path('ran.txt')\n"
        "    with ran.open('a') as file:\n        file.write(f\"{task['n']}\\n\")\n"
        "    if task['n'] == 5 and ran.read_text().split().count('5') == 1:\n        os.kill(os.getpid(), 9)\n"
        "    return 1.0\n"
    )
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(8)))
    overrides = ["--set", "agent=slow.py:agent", "--set", "trainer.concurrency=1", "--set", "trainer.n_runners=1"]
    command = [sys.executable, "-m", "leyden", "run", "train.yaml", *overrides, "--set", "n_epochs=1"]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -9, killed.stderr
    (run,) = (tmp_path / ".leyden").iterdir()
    if elsewhere:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, err = said("run", "--from", str(run), "--resume", "--json")
    assert code == 0, err
    assert recorded(run)["status"] == "succeeded" and Path(json.loads(out)["run"]).resolve() == run
    ran = (tmp_path / "ran.txt").read_text().split()
    assert sorted(set(ran)) == [str(n) for n in range(8)] and ran.count("5") == 2 and len(ran) < 12


# ---- the code ------------------------------------------------------------------------------------


def forget(*names: str) -> None:
    """Let the next command import these modules anew, as a process of its own would."""
    for name in names:
        sys.modules.pop(name, None)


def run_of(out: str) -> dict[str, Any]:
    return recorded(json.loads(out)["run"])


def test_a_function_of_a_module_is_called_again_in_its_own_folder(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, other = tmp_path / "here", tmp_path / "other"
    for folder, reward in ((here, 1.0), (other, 0.0)):
        folder.mkdir()
        (folder / "mine_to_run.py").write_text(AGENT.replace('float(task["n"] % 2)', str(reward)))
    monkeypatch.chdir(here)
    code, out, err = said("run", "mine_to_run:settings", "--set", "epochs=1", "--json")
    assert code == 0, err
    first = here / json.loads(out)["run"]
    forget("mine_to_run")
    monkeypatch.chdir(other)
    monkeypatch.syspath_prepend(other)
    code, out, err = said("run", "--from", str(first), "--json")
    assert code == 0, err
    assert "changed" not in err
    assert run_of(out)["config"]["code"] == recorded(first)["config"]["code"]
    (here / "mine_to_run.py").unlink()
    here.rename(tmp_path / "gone")
    code, _, err = said("run", "--from", str(tmp_path / "gone" / ".leyden" / first.name))
    assert code == 1 and f"was started from mine_to_run:settings, in {here}, which is gone" in err


def test_what_has_changed_since_a_run_is_told_when_it_is_repeated(said: Said, tmp_path: Path):
    (tmp_path / "helper_to_run.py").write_text("LIMIT = 1\n")
    file = tmp_path / "agent_to_run.py"
    text = (
        AGENT.replace("import leyden", "from helper_to_run import LIMIT\nimport leyden")
        .replace("epochs,", "epochs=1, runners=1,")
        .replace('"trainer": {', '"trainer": {"n_runners": runners, ')
    )
    file.write_text(text)
    code, out, err = said("run", "agent_to_run.py:settings", "--set", "name=first", "--json")
    assert code == 0, err
    first = run_of(out)
    assert first["config"]["start"]["arguments"] == {"epochs": 1, "runners": 1, "name": "first"}
    assert list(first["config"]["code"]["files"]) == ["agent_to_run.py", "helper_to_run.py"]
    unchanged = said("run", "--from", "first", "--dry-run")[2]
    assert "has changed" not in unchanged and "other settings" not in unchanged

    file.write_text(text.replace("epochs=1", "epochs=7"))
    forget("agent_to_run")
    code, out, err = said("run", "--from", "first", "--dry-run", "--json")
    assert code == 0 and "the code has changed since run first: agent_to_run.py (edited)\n" in err, err
    assert "other settings" not in err, "the default with which the function was called is an argument now"

    (tmp_path / "helper_to_run.py").write_text("LIMIT = 2\n")
    file.write_text(text.replace('"n_runners": runners', '"n_runners": 3'))
    forget("agent_to_run", "helper_to_run")
    err = said("run", "--from", "first", "--dry-run", "--json")[2]
    assert "agent_to_run.py (edited), helper_to_run.py (edited)" in err
    assert "returns other settings than for run first: trainer.n_runners 1 -> 3" in err
    forget("agent_to_run", "helper_to_run")
    file.write_text(text.replace("runners=1, ", "").replace('"n_runners": runners', '"n_runners": 1'))
    assert "has no parameter 'runners' any more" in said("run", "--from", "first", "--dry-run")[2]


def test_a_program_that_an_agent_runs_is_a_part_of_its_code(said: Said, tmp_path: Path):
    (tmp_path / "program.sh").write_text("exit 0\n")
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "README").write_text("do it")
    agent = "agent={type: process, command: [sh, program.sh], folder: task}"
    code, out, err = said("run", "train.yaml", "--set", agent, "--set", "trainer.run_dir=first", "--json")
    assert code == 0, err
    config = run_of(out)["config"]
    assert list(config["code"]["files"]) == ["README", "program.sh"]
    assert config["not_default"]["agent.command"] == ["sh", "program.sh"]
    (tmp_path / "program.sh").write_text("exit 1\n")
    assert "since run first: program.sh (edited)" in said("run", "--from", "first", "--dry-run")[2]


def test_two_agents_and_what_was_steered_are_compared(said: Said, tmp_path: Path):
    from leyden.training.runs.control import ControlFile, ControlLine

    (tmp_path / "other_to_run.py").write_text(AGENT.replace("% 2", "% 3"))
    for name in ("agent_to_run", "other_to_run"):
        agent = f"agent={name}.py:agent"
        assert said("run", "train.yaml", "--set", agent, "--set", f"trainer.run_dir={name[:5]}")[0] == 0
    line = ControlLine("1", 1.0, "ann", "set", "done", "algorithm.polling_interval", 2, 1, 3)
    ControlFile(tmp_path / "other").append([line])
    _, out, err = said("compare", "agent", "other")
    assert "agent_to_run.agent" in out and "other_to_run.agent" in out, err
    assert "other, while it worked\n  polling_interval 1 -> 2 from step 4\n" in out
    data = json.loads(said("compare", "agent", "other", "--json")[1])
    assert {"agent", "code"} == set(data["configuration"]) and data["control"][0] == []
    ours, theirs = (recorded(each)["config"]["code"]["files"] for each in ("agent", "other"))
    assert data["code"] == {
        "agent_to_run.py": [ours["agent_to_run.py"], None],
        "other_to_run.py": [None, theirs["other_to_run.py"]],
    }
    assert json.loads(said("compare", "agent", "agent", "--json")[1])["code"] == {}
    record = recorded("other")
    del record["config"]["code"]
    (tmp_path / "other" / "run.json").write_text(json.dumps(record))
    assert "at least one of the runs did not record its code" in said("compare", "agent", "other")[1]


def test_a_run_that_goes_on_with_other_code_says_so_and_records_both(said: Said, tmp_path: Path):
    (tmp_path / "agent_to_run.py").write_text(
        AGENT + "import os\nif not os.path.exists('go'): raise SystemError('not yet')\n"
    )
    command = ["run", "train.yaml", "--set", "trainer.run_dir=first"]
    (tmp_path / "go").touch()
    assert said(*command)[0] == 0
    before = recorded("first")
    (tmp_path / "first" / "run.json").write_text(json.dumps({**before, "status": "stopped"}))
    with (tmp_path / "agent_to_run.py").open("a") as file:
        file.write("# edited\n")
    forget("agent_to_run")
    code, _, err = said("run", "--from", "first", "--resume")
    assert code == 0 and "goes on with other code than before: agent_to_run.py (edited)" in err, err
    assert recorded("first")["config"]["earlier_code"] == [before["config"]["code"]["digest"]]


SIMULATOR = """
import numpy as np
from gymnasium import spaces
from leyden.rl import ActionInterpreter, Reward, Simulator, StateInterpreter

class Walk(Simulator):
    def __init__(self, start, stride=1):
        self.position, self.steps, self.stride = start, 0, stride
    def step(self, action):
        self.position, self.steps = self.position + action * self.stride, self.steps + 1
    def get_state(self):
        return self.position
    def done(self):
        return self.steps == 3

class Position(StateInterpreter):
    observation_space = spaces.Box(-20, 20, (1,), np.float32)
    def interpret(self, simulator_state):
        return np.array([simulator_state], np.float32)

class Direction(ActionInterpreter):
    action_space = spaces.Discrete(2)
    def interpret(self, simulator_state, action):
        return 1 if action else -1

class NearZero(Reward):
    def reward(self, simulator_state):
        return -abs(simulator_state) / 10

STARTS = [-2, -1, 1, 2]
"""
VESSEL = """
vessel:
  simulator_fn: {type: "walk_to_run.py:Walk", stride: 2}
  state_interpreter: walk_to_run.py:Position
  action_interpreter: walk_to_run.py:Direction
  reward: {type: "walk_to_run.py:NearZero"}
  policy: {type: ppo, lr: 3e-3}
  train_initial_states: walk_to_run.py:STARTS
  val_initial_states: [-2, 2]
  episode_per_iter: 4
trainer: {max_iters: 2, finite_env_type: dummy, progress: false}
"""


def test_a_policy_in_a_simulator_is_trained_and_continued(said: Said, tmp_path: Path):
    (tmp_path / "walk_to_run.py").write_text(SIMULATOR)
    (tmp_path / "walk.yaml").write_text(VESSEL)
    code, out, err = said("run", "walk.yaml", "--set=policy.seed=3.0", "--set=update_kwargs.repeat=2.0", "--json")
    assert code == 0, err
    run = json.loads(out)["run"]
    assert recorded(run)["config"]["start"]["overrides"] == {"vessel.policy.seed": 3, "vessel.update_kwargs.repeat": 2}
    assert (Path(run) / "checkpoints").is_dir()
    code, out, err = said("run", "--from", run, "--resume", "--set", "trainer.max_iters=4", "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["stage"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("policy.lr=fast", "--set vessel.policy.lr: lr is 'fast'; it must be a number"),
        ("policy.type=pppo", "did you mean 'ppo'?"),
        ("polcy=1", "TrainingVessel has no option 'polcy'; did you mean 'policy'?"),
        ("trainer.max_iter=3", "Trainer has no option 'max_iter'; did you mean 'max_iters'?"),
        ("trainer.finite_env_type=dumy", "dumy"),
        ("trainer.max_iters=null", "no callback could end the run"),
        ("state_interpreter=walk_to_run.py:Direction", "makes a Direction, not a StateInterpreter"),
        ("simulator_fn=walk_to_run.py:Nix", "walk_to_run.py has no 'Nix'"),
        ("simulator_fn.strides=2", "has no option 'strides'; did you mean 'stride'?"),
        ("train_initial_states=none.json", "none.json cannot be read"),
        ("update_kwargs.repeat=true", "vessel.update_kwargs.repeat: repeat is True; it must be a whole number"),
        ("episode_per_iter=0", "walk.yaml, line 2: vessel: episode_per_iter is 0"),
        ("trainer.n_runners=2", "Trainer has no option 'n_runners'"),
        ("agent=x", "leave agent out"),
    ],
)
def test_a_mistake_in_a_vessel_is_refused(said: Said, tmp_path: Path, option: str, message: str):
    (tmp_path / "walk_to_run.py").write_text(SIMULATOR)
    (tmp_path / "walk.yaml").write_text(VESSEL)
    code, out, err = said("run", "walk.yaml", "--dry-run", "--set", option)
    assert (code, out) == (1, "") and message in err, err


# ---- sweeps and the schema -----------------------------------------------------------------------


def test_a_sweep_runs_the_product_and_goes_on_after_a_failure(said: Said, tmp_path: Path):
    (tmp_path / "swept.py").write_text(
        "import pathlib, leyden as ly\n"
        "@ly.rollout\ndef agent(task: dict) -> float:\n    return 1.0\n"
        "class Fails(ly.Baseline):\n"
        "    async def run(self, *data):\n"
        "        with pathlib.Path('ran.txt').open('a') as file:\n            file.write(f'{self.n_epochs}\\n')\n"
        "        if self.n_epochs == 3 and not pathlib.Path('mended').exists():\n"
        "            raise RuntimeError('that one fails')\n"
        "        return await super().run(*data)\n"
    )
    resources = "{llm: {resource_type: llm, endpoint: 'http://x', model: m, api_key: s3cret}}"
    sweep = ["run", "train.yaml", "--set", "agent=swept.py:agent", "--set", "algorithm.type=swept.py:Fails", "--json"]
    sweep += ["--sweep", "n_epochs=3,1", "--set", "n_epochs=9", "--set", f"trainer.initial_resources={resources}"]
    code, out, err = said(*sweep)
    rows = json.loads(out)
    assert code == 1 and [row["state"] for row in rows] == ["failed", "succeeded"], err
    assert [row["label"] for row in rows] == ["n_epochs=3", "n_epochs=1"]
    assert "that one fails" in rows[0]["cause"] and rows[1]["val_reward"]["last"] == 1.0
    assert recorded(rows[1]["run"])["config"]["start"]["overrides"]["algorithm.n_epochs"] == 1
    (tmp_path / "mended").touch()
    code, out, err = said(*sweep)
    assert code == 0 and [row["state"] for row in json.loads(out)] == ["succeeded"] * 2, err
    assert [row["run"] for row in json.loads(out)] == [row["run"] for row in rows]
    assert (tmp_path / "ran.txt").read_text().split() == ["3", "1", "3"]  # what has succeeded is not repeated


def test_a_sweep_after_an_edit_begins_anew_and_mixes_nothing(said: Said, tmp_path: Path):
    def swept() -> tuple[list[str], str]:
        forget("agent_to_run")
        code, out, err = said("run", "train.yaml", "--sweep", "n_epochs=1", "--json")
        assert code == 0, err
        return [row["run"] for row in json.loads(out)], err

    first, _ = swept()
    assert swept()[0] == first
    (tmp_path / "agent_to_run.py").write_text(AGENT.replace("% 2", "% 3"))
    second, err = swept()
    assert second != first and "n_epochs=1: begun anew, because its settings, tasks, code or model" in err
    (tmp_path / "tasks.jsonl").write_text('{"n": 5}\n')
    assert swept()[0] not in (first, second)


def test_a_sweep_ends_when_its_code_is_edited_meanwhile(said: Said, tmp_path: Path):
    (tmp_path / "agent_to_run.py").write_text(
        AGENT + "class Edits(ly.Baseline):\n"
        "    async def run(self, *data):\n"
        "        with open('agent_to_run.py', 'a') as file:\n            file.write('# again')\n"
        "        await super().run(*data)\n"
    )
    words = ["run", "train.yaml", "--set", "algorithm.type=agent_to_run.py:Edits", "--sweep", "n_epochs=1,2,3"]
    code, _, err = said(*words)
    assert code == 1 and "the code was edited while the sweep worked: agent_to_run.py (edited)" in err, err
    assert "n_epochs=3" not in err


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["n_epochs"], "write --sweep PATH=VALUE,VALUE"),
        (["n_epochs="], "write --sweep PATH=VALUE,VALUE"),
        (["=1,2"], "write --sweep PATH=VALUE,VALUE"),
        (["n_epochs=1,1"], "give each once"),
        (["n_epochs=1", "n_epochs=2"], "give each once"),
        (["n_epochs=1,-1"], "n_epochs=-1: "),
        (["n_epoch=1,2"], "did you mean 'n_epochs'?"),
        (["n_epochs=1,[2"], "--sweep n_epochs"),
        (["trainer.strategy.token=a,b"], "would show a secret"),
        (["trainer.strategy={type: cs, token: 12345},shm"], "would show a secret"),
        ([f"n_epochs={','.join(map(str, range(1, 50)))}", f"polling_interval={','.join(map(str, range(1, 50)))}"], "1,000"),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_refused_before_the_first_run(said: Said, tmp_path: Path, sweep: list[str], message: str):
    code, _, err = said("run", "train.yaml", *(f"--sweep={each}" for each in sweep))
    assert code == 1 and message in err, err
    assert not (tmp_path / ".leyden").exists()


def test_ctrl_c_ends_a_sweep_and_keeps_what_is_done(said: Said, tmp_path: Path):
    (tmp_path / "waits.py").write_text(
        "import asyncio, pathlib, leyden as ly\n"
        "@ly.rollout\nasync def agent(task: dict) -> float:\n"
        "    if pathlib.Path('first').exists():\n"
        "        pathlib.Path('second').write_text('begun')\n        await asyncio.sleep(600)\n"
        "    return 1.0\n"
        "class First(ly.Baseline):\n"
        "    async def run(self, *data):\n"
        "        await super().run(*data)\n        pathlib.Path('first').touch()\n"
    )
    words = [
        "run",
        "train.yaml",
        "--set=agent=waits.py:agent",
        "--set=algorithm.type=waits.py:First",
        "--set=val=[{n: 1}]",
    ]
    command = [sys.executable, "-m", "leyden", *words, "--sweep=n_epochs=1,2,3", "--json"]
    os.mkfifo(tmp_path / "second")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        assert (tmp_path / "second").read_text() == "begun"  # waits until the agent writes
        sweep.send_signal(signal.SIGINT)
        out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and "the same command continues it" in err
    assert '"state": "succeeded"' in out and '"state": "stopped"' in out and '"state": "not started"' in out, out


def test_the_schema_names_the_components_with_their_options(said: Said):
    code, out, err = said("run", "--schema")
    assert code == 0, err
    schema = json.loads(out)
    training = schema["anyOf"][0]["properties"]
    assert set(training) == {"agent", "train", "val", "algorithm", "trainer"}
    trainer = training["trainer"]["anyOf"][0]
    assert trainer["additionalProperties"] is False and "algorithm" not in trainer["properties"]
    assert trainer["properties"]["n_runners"] == {
        "anyOf": [{"type": "integer"}, {"type": "null"}],
        "description": "the number of runners. Default: 1, or the strategy's own number.",
    }
    algorithms = {
        each["properties"]["type"]["const"]: each
        for each in schema["$defs"]["Algorithm"]["anyOf"]
        if "const" in each.get("properties", {}).get("type", {})
    }
    assert set(algorithms) >= {"grpo", "baseline", "apo"}
    assert algorithms["grpo"]["properties"]["optim"]["anyOf"][0] == {"$ref": "#/$defs/OptimParams"}
    assert algorithms["grpo"]["required"] == ["type", "backend"]
    assert schema["$defs"]["OptimParams"]["properties"]["learning_rate"] == {"type": "number"}
    referred = set(re.findall(r'"#/\$defs/([^"]+)"', out))
    assert referred <= set(schema["$defs"])


def test_the_last_value_of_an_option_counts_however_it_is_spelled():
    from leyden.cli.run_parts import joined, read_overrides
    from leyden.cli.run_sweep import read_sweep
    from leyden.errors import ConfigError

    texts = ["n_epochs=1", "algorithm.n_epochs=2", "n_epochs=3"]
    assert read_overrides(texts) == {"n_epochs": 3}
    assert read_overrides([*texts, "vessel.n_epochs=4"]) == {"vessel.n_epochs": 4}
    assert joined({"algorithm.n_epochs": 2, "trainer.n_epochs": 1}, {"n_epochs": 4}) == {
        "trainer.n_epochs": 1,
        "n_epochs": 4,
    }
    for wrong in (["n_epochs=3", "algorithm.n_epochs=5"], ["trainer.run_dir=a,b"]):
        with pytest.raises(ConfigError):
            read_sweep(wrong)
