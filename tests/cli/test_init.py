"""`leyden init`: the files that it writes, what it leaves alone, and that they work as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.cli import main

FILES = {
    *(".gitignore", "README.md", "agent.py", "test_agent.py", "train.jsonl", "held_out.jsonl", "train.yaml"),
    *(".claude/skills/leyden/SKILL.md", "model"),
}


@pytest.fixture
def init(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[Any, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["leyden", "init", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", ["weather", "with a space", "größe/below", "."])
def test_a_new_folder_has_every_file_and_its_own_tests_pass(init: Any, name: str, tmp_path: Path) -> None:
    code, data = init(name)
    assert code == 0
    assert set(data["written"]) == FILES and data["kept"] == []
    assert Path(data["folder"]) == tmp_path / name
    for each in FILES:
        assert (tmp_path / name / each).exists()
    if name == "with a space":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        ended = subprocess.run(command, cwd=tmp_path / name, capture_output=True, text=True, check=False)
        assert ended.returncode == 0 and "3 passed" in ended.stdout, ended.stdout


def test_a_folder_that_is_not_empty_is_refused_by_its_names_and_force_writes_what_is_missing(
    init: Any, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_bytes(b"mine\r\n")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "train.yaml").symlink_to(tmp_path / "nowhere")
    code, data = init()
    assert code == 1 and not (tmp_path / "README.md").exists()
    assert "is not empty, it has agent.py, model, notes.txt, train.yaml" in data["error"]["message"]
    assert "--force" in data["error"]["remedy"]
    code, data = init("--force")
    assert code == 0
    assert set(data["kept"]) == {"agent.py", "model", "train.yaml"}
    assert (tmp_path / "agent.py").read_bytes() == b"mine\r\n"
    assert list((tmp_path / "model").iterdir()) == [], "files of two models are not mixed"
    assert not (tmp_path / "nowhere").exists(), "a link is not followed"
    assert set(init("--force")[1]["kept"]) == FILES, "a second time changes nothing"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".tmp-")] == []


def test_a_repository_with_an_environment_is_an_empty_folder(init: Any, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".venv").mkdir()
    assert init()[0] == 0
    assert init()[0] == 1


def test_a_skill_stands_beside_the_skills_that_are_there(init: Any, tmp_path: Path) -> None:
    (tmp_path / "p/.claude/skills/mine").mkdir(parents=True)
    code, data = init("p")
    assert code == 1 and "it has .claude;" in data["error"]["message"]
    assert init("p", "--force")[0] == 0
    assert {each.name for each in (tmp_path / "p/.claude/skills").iterdir()} == {"mine", "leyden"}


@pytest.mark.parametrize("below", ["", "/p"])
def test_a_file_in_the_place_of_the_folder_is_named(init: Any, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    code, data = init(f"file{below}")
    assert code == 1 and str(Path("file")) in data["error"]["message"] and data["error"]["remedy"].startswith("give")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.getuid() == 0, reason="permissions do not hold for root")
def test_a_folder_that_cannot_be_written_is_named(init: Any, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    code, data = init("closed")
    assert code == 1 and "closed" in data["error"]["message"] and "Permission denied" in data["error"]["message"]


def test_a_missing_extra_is_said_with_the_line_that_brings_it(init: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.cli.init.find_spec", lambda name: None if name == "openai" else name)
    _, data = init("p")
    assert data["missing"] == ["openai"]
    assert data["install"] == "pip install 'leyden[openai,torch]'"


@pytest.mark.parametrize("environment", [{"COLUMNS": "40"}, {"PYTHONIOENCODING": "ascii"}, {"NO_COLOR": "1"}], ids=str)
def test_the_next_commands_are_printed_and_can_be_copied(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "leyden", "init", "with a space"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert "  cd 'with a space'\n" in ended.stdout
    assert re.search(r"^  leyden run train.yaml\b", ended.stdout, re.MULTILINE)


def test_the_skill_is_in_the_layout_of_agent_skills(init: Any, tmp_path: Path) -> None:
    init("p")
    skill = tmp_path / "p/.claude/skills/leyden/SKILL.md"
    _, head, body = skill.read_text().split("---\n", 2)
    front = yaml.safe_load(head)
    assert front.keys() == {"name", "description"}
    assert front["name"] == skill.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert 0 < len(front["description"]) <= 1024 and len(body.splitlines()) < 100
    for name in re.findall(r"`(\w+\.(?:py|yaml|jsonl))`", body):
        assert (tmp_path / "p" / name).exists()


def test_the_texts_are_ascii_and_end_their_lines_as_unix_does(init: Any, tmp_path: Path) -> None:
    init("p")
    for name in FILES - {"model"}:
        content = (tmp_path / "p" / name).read_bytes()
        assert content.isascii() and b"\r" not in content and content.endswith(b"\n"), name
