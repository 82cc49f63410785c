"""What all commands share: help, completion, errors, exit codes, logging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leyden.cli import main
from leyden.cli.app import app

HEAVY = ("pydantic", "rich", "aiohttp", "asyncio", "yaml", "torch", "leyden.types", "leyden.store")
COMMANDS = (
    "run",
    "demo",
    "init",
    "runs",
    "show",
    "plot",
    "compare",
    "doctor",
    "dashboard",
    "report",
    "dataset",
    "rescore",
    "note",
    "stop",
    "pause",
    "resume",
    "extend",
    "set",
    "eval",
    "replay",
    "gateway",
    "lr-range",
    "workers",
    "samples",
    "models",
    "models get",
    "models import",
    "models export",
    "harness list",
    "harness check",
    "tasks check",
    "store",
    "store export",
    "store upgrade",
    "prompts best",
    "prompts history",
    "prompts diff",
    "prompts export",
    "prompts apply",
    "prompts extract",
    "serve",
    "resources list",
    "resources show",
    "resources diff",
    "resources promote",
    "resources rollback",
    "resources freeze",
    "learning list",
    "learning stop",
    "learning allow",
    "rl train",
    "rl backtest",
)


def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[object, list[str]]:
    """The exit code, and the lines on standard error."""
    monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err.splitlines()


def test_help_needs_none_of_the_libraries_that_commands_need() -> None:
    program = (
        "import sys\n"
        "from leyden.cli import main\n"
        "sys.argv = ['leyden', '--help']\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print('loaded:', *loaded)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Commands:" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "loaded:"


def test_it_runs_as_a_module() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "leyden", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.startswith("leyden ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_short_option_for_help_with_examples(command: str) -> None:
    short, long = (CliRunner().invoke(app, [*command.split(), option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert f"\n    leyden {command}" in short.output


def test_every_command_is_listed_here() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output.partition("Commands:")[2]
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "} == {
        command.split()[0] for command in COMMANDS
    }


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    asked = {"_LEYDEN_COMPLETE": "complete_bash", "COMP_WORDS": "leyden ga", "COMP_CWORD": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "leyden"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | asked,
    )
    assert ended.stdout.split() == ["gateway"], ended.stderr


@pytest.mark.parametrize(
    ("arguments", "first", "last"),
    [
        (["gatway"], "leyden: no such command 'gatway'. Did you mean 'gateway'?", "Try: leyden --help"),
        (
            ["gateway", "--modle", "a=b"],
            "leyden: there is no option '--modle'; did you mean '--model'?",
            "Try: leyden gateway --help",
        ),
        (
            ["workers", "--log-level", "debug"],
            "leyden: the option '--log-level' stands before the command: leyden --log-level ... workers",
            "Try: leyden workers --help",
        ),
        (["workers"], "leyden: missing argument 'url'", "Try: leyden workers --help"),
        (["--log-level", "loud", "store"], "leyden: invalid value for '--log-level'", "Try: leyden --help"),
        (["store", "--port", "x"], "leyden: invalid value for '--port'", "Try: leyden store --help"),
    ],
)
def test_a_wrong_command_line_begins_with_the_error_and_ends_with_two(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    first: str,
    last: str,
) -> None:
    code, lines = said(capsys, monkeypatch, *arguments)
    assert code == 2
    assert lines[0].startswith(first)
    assert lines[-1] == last


def test_a_wrong_value_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = said(capsys, monkeypatch, "store", "--port", "70000")
    assert "'70000'" in lines[0]
    assert "65535" in lines[0]


def test_a_foreseen_error_ends_with_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = said(capsys, monkeypatch, "store", "--url", "mysql://x/y")
    assert code == 1
    assert lines[0].startswith("leyden: cannot open a store at 'mysql://x/y'")


def test_the_log_level_stands_before_the_command_and_reaches_what_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_LOG", "error")
    assert said(capsys, monkeypatch, "--log-level", "DEBUG", "store", "--url", "mysql://x/y")[0] == 1
    assert os.environ["LEYDEN_LOG"] == "debug"
