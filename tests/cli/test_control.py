"""`leyden stop`, `pause`, `resume`, `extend` and `set`: what they say, without a run that works, on every kind of terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from leyden.cli import main
from leyden.errors import ConfigError
from leyden.training.runs.control import ControlFile, read_control
from leyden.training.runs.folder import MANIFEST
from leyden.training.runs.opening import new_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The folder of a run that this process works on, and that answers nothing."""
    new_manifest(kind="fit", name="first", config={}).of_this_process().write(tmp_path)
    return tmp_path


def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object, code: int = 0
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["leyden", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == code, output
    return output.out, output.err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("gain=-.inf", "which is no finite number"),
        ("gain={a: [.nan]}", "which is no finite number"),
        ("gain=2020-01-01", None),
        ("gain", "is no OPTION=VALUE"),
        ("gain=", "is no OPTION=VALUE"),
        ("=3", "is no OPTION=VALUE"),
        ("gain=[1", "the value of gain"),
    ],
)
def test_a_value_that_no_line_of_json_holds_is_refused_before_anything_is_asked(
    directory: Path, capsys: Any, monkeypatch: Any, given: str, reason: str | None
) -> None:
    if reason is None:
        said(capsys, monkeypatch, "set", directory, given, "--wait", 0)
        assert [line.value for line in read_control(directory)] == ["2020-01-01"]
        return
    assert reason in said(capsys, monkeypatch, "set", directory, "gain=2", given, "--wait", 0, code=1)[1]
    assert read_control(directory) == []


def test_values_are_those_of_yaml(directory: Path, capsys: Any, monkeypatch: Any) -> None:
    given = ["a=3e-4", "b=null", "c=true", "d=[1, x]", "e='7'", "f=a=b", " g = 1 "]
    out, _ = said(capsys, monkeypatch, "set", directory, *given, "--wait", 0, "--json")
    assert [line["value"] for line in json.loads(out)] == [3e-4, None, True, [1, "x"], "7", "a=b", 1]
    assert [line.path for line in read_control(directory)] == ["a", "b", "c", "d", "e", "f", "g"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("pause", "http://127.0.0.1:4747"), "is a store, and a run is steered through its folder"),
        (("stop", "postgresql://host/db"), "is a store"),
        (("pause", "nowhere"), "there is no run 'nowhere'"),
        (("extend", "nowhere"), "give --steps N for N more, or --to N"),
        (("extend", "nowhere", "--steps", 1, "--to", 2), "one of them"),
    ],
)
def test_what_cannot_be_asked_says_what_to_do(
    tmp_path: Path, capsys: Any, monkeypatch: Any, arguments: Any, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in said(capsys, monkeypatch, *arguments, code=1)[1]
    out, _ = said(capsys, monkeypatch, *arguments, "--json", code=1)
    assert json.loads(out)["error"]["kind"] == ConfigError.__name__


def test_an_answer_that_does_not_come_in_time_is_said_and_shown_later(
    directory: Path, capsys: Any, monkeypatch: Any
) -> None:
    out, _ = said(capsys, monkeypatch, "pause", directory, "--wait", 0.2)
    assert "asked; the run answers at the end of its step" in out
    assert "pause, asked and not answered yet" in said(capsys, monkeypatch, "show", directory)[0]
    shown = json.loads(said(capsys, monkeypatch, "show", directory, "--json")[0])
    assert [(line["command"], line["state"]) for line in shown["control"]] == [("pause", "asked")]
    assert shown["paused"] is False


def test_a_refusal_is_an_error_for_people_and_an_answer_for_programs(
    directory: Path, capsys: Any, monkeypatch: Any
) -> None:
    def refuse() -> None:
        file, found = ControlFile(directory), []
        while not found:
            found = file.read_new()
        file.append([found[0].answer("refused", reason="not today")])

    for flags in ((), ("--json",)):
        (directory / "control.jsonl").unlink(missing_ok=True)
        run = threading.Thread(target=refuse)
        run.start()
        out, err = said(capsys, monkeypatch, "resume", directory, *flags, code=1)
        run.join()
        assert (json.loads(out)["reason"] == "not today") if flags else ("resume refused: not today" in err)


def test_a_run_that_ends_without_an_answer_is_said_so(directory: Path, capsys: Any, monkeypatch: Any) -> None:
    def end() -> None:
        while not read_control(directory):
            pass
        (directory / MANIFEST).unlink()

    run = threading.Thread(target=end)
    run.start()
    out, _ = said(capsys, monkeypatch, "stop", directory, "--wait", 30)
    run.join()
    assert out == "it has stopped\n"


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal_without_utf_8_and_a_closed_pipe_break_nothing(directory: Path, columns: str) -> None:
    environment = os.environ | {"COLUMNS": columns, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    command = [sys.executable, "-m", "leyden", "set", str(directory), "name=Zoë", "--wait", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_control(directory)[0].value == "Zoë"
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert closed.returncode == 141
    with Path("/dev/full").open("w") as full:
        lost = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert lost.returncode == 1
    assert b"No space left" in lost.stderr


@pytest.mark.parametrize("option", ["password=leak", "algorithm.api_key=leak"])
def test_a_secret_is_refused_before_it_is_written_to_the_history_of_a_run(option: str) -> None:
    from leyden.cli.control import _setting

    with pytest.raises(ConfigError, match="is a secret") as refused:
        _setting(option)
    assert "leak" not in str(refused.value)


def test_a_secret_in_a_mapping_is_hidden_in_the_history_of_a_run() -> None:
    from leyden.cli.control import _setting

    assert "leak" not in str(_setting("env={API_KEY: leak}"))
