"""The page on HTTP names every route and nothing else; commands in the documentation have options that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from leyden.cli.app import app
from leyden.store.openapi import openapi
from leyden.store.wire import PREFIX, ROUTES
from tests.docs.snippets import ROOT
from tests.docs.test_links import FENCE, PAGES

PAGE = (ROOT / "docs" / "rest.md").read_text()
COMMAND = re.compile(r"^(?:\w+=\S* )*leyden (.*)$", re.MULTILINE)
UNIT_COMMAND = re.compile(r"^ExecStart=/opt/leyden/bin/leyden (.*)$", re.MULTILINE)


def section(heading: str) -> list[tuple[str, str]]:
    """The first two cells of each row of the table below a heading."""
    text = PAGE.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    return [(left.strip(), right.strip()) for left, right in rows[1:]]


def test_every_route_is_there_with_its_method():
    written = {
        (verb, path, re.findall(r"`(\w+)`", right)[0])
        for left, right in section("## Routes")
        for verb, path in re.findall(r"`(GET|POST) (\S+)`", left)
    }
    assert f"Under `{PREFIX}`:" in PAGE
    assert written == {(route.verb, route.path, route.method) for route in ROUTES}


def test_every_status_that_a_route_may_answer_is_explained():
    answers = {
        int(status)
        for verbs in openapi()["paths"].values()
        for operation in verbs.values()
        for status in operation["responses"]
    }
    assert {int(left) for left, _ in section("## Errors")} == {status for status in answers if status >= 400}


def commands() -> list[tuple[Path, str]]:
    """Every line of a code block that begins with `leyden`, and what is in front of it is only environment."""
    return [
        (page, command)
        for page in PAGES
        for block in FENCE.findall((ROOT / page).read_text())
        for command in COMMAND.findall(block)
    ]


def deployed() -> list[tuple[Path, str]]:
    """The commands by which the files of `deploy/` start servers."""
    compose, units = Path("deploy/compose.yaml"), sorted((ROOT / "deploy" / "systemd").glob("*.service"))
    services = yaml.safe_load((ROOT / compose).read_text())["services"].values()
    started = [(compose, shlex.join(service["command"])) for service in services if service["image"] == "leyden"]
    for unit in units:
        started += [(unit.relative_to(ROOT), command) for command in UNIT_COMMAND.findall(unit.read_text())]
    assert [command.split()[0] for _, command in started] == ["store", "gateway", "serve", "gateway", "serve", "store"]
    return started


@pytest.mark.parametrize(("page", "command"), [*commands(), *deployed()], ids=str)
def test_a_command_in_the_documentation_can_be_given(page: Path, command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LEYDEN_STORE_TOKEN", "secret")
    words = shlex.split(command, comments=True)
    found, context = typer.main.get_command(app), None
    while words and words[0] in getattr(found, "commands", {}):
        context = found.make_context(found.name, [words[0]], parent=context, resilient_parsing=True)
        found = found.commands[words.pop(0)]
    found.make_context(found.name, words, parent=context)  # raises UsageError for what is no option
