"""`leyden doctor` of a broken run and of a healthy one, on narrow terminals and as JSON."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import leyden as ly
from leyden.cli.app import app
from tests.terminal import Program


@ly.rollout
async def agent(task: dict[str, int]) -> float:
    if task["n"] < 0:
        raise ConnectionError("Connection refused: http://127.0.0.1:9/v1")
    return 1.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, sign in (("healthy", 1), ("broken", -1)):
        tasks = [{"n": sign * n} for n in range(1, 9)]
        ly.Trainer(algorithm="baseline", run_dir=f".leyden/{name}").fit(agent, val_dataset=tasks)
    return tmp_path


def test_the_json_has_the_fields_of_the_page_and_the_code_says_whether_something_was_found(runs: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/json-output.md").read_text()
    row = re.search(r"^\| `doctor` \| (.*) \|$", page, re.M)
    assert row is not None
    healthy, broken = (CliRunner().invoke(app, ["doctor", name, "--json"]) for name in ("healthy", "broken"))
    assert (healthy.exit_code, broken.exit_code) == (0, 1)
    assert json.loads(healthy.stdout)["findings"] == []
    data = json.loads(broken.stdout)
    assert {*data, *data["findings"][0]} == set(re.findall(r"`(\w+)`", row[1]))
    assert data["findings"][0]["rule"] == "upstream-unreachable"


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_line_but_a_command_is_longer_than_the_terminal(runs: Path, columns: int) -> None:
    code = f"import os, sys; os.chdir({str(runs)!r}); sys.argv = ['leyden', 'doctor', 'broken']; import leyden.__main__ as m; m.main()"
    program = Program(code, columns=columns)
    assert program.end() == 1
    lines = [line for line in program.emulator.screen if line]
    assert "1 finding" in lines[0] and "upstream-unreachable" in " ".join(lines)
    assert all(len(line) <= columns or line.startswith("     leyden ") for line in lines), lines
