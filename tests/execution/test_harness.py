"""What a harness writes and refuses. The real programs are tried in tests/harness."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.execution.harness import harness_program
from leyden.execution.harness.check import check
from leyden.execution.harness.installed import install, installed_version
from leyden.execution.harness.programs import PROGRAMS


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEYDEN_HARNESSES", str(tmp_path / "harnesses"))


def script(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -S\n{source}")
    path.chmod(0o755)
    return path


def test_ten_harnesses_can_be_used_and_the_others_say_why_not() -> None:
    assert sum(not kind.unsupported for kind in PROGRAMS.values()) >= 10
    for kind in PROGRAMS.values():
        if kind.unsupported:
            with pytest.raises(ConfigError, match="cannot be used"):
                ly.Harness(kind.name)
        else:
            assert kind.version and kind.program


def test_the_page_shows_every_harness_with_its_version_or_why_it_cannot_be_used() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "coding-agents.md").read_text()
    for kind in PROGRAMS.values():
        shown = kind.unsupported or f"{kind.installer} | {kind.version} | {kind.dialect}"
        assert f"| `{kind.name}` | {shown} |" in page, f"run the group harness and tests/harness/table.py: {kind.name}"


def test_an_unknown_harness_and_one_that_is_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="did you mean 'opencode'"):
        ly.Harness("opencod")
    with pytest.raises(ConfigError, match=r"leyden harness check pi.*0\.73\.1"):
        ly.Harness("pi")
    with pytest.raises(ConfigError, match="npm, which is not on PATH"):
        install(harness_program("pi"))


AGENT = """
import json, os, sys, urllib.request
settings = json.load(open(os.path.join(os.environ["PI_CODING_AGENT_DIR"], "models.json")))["providers"]["leyden"]
print(json.dumps({"home": os.environ["HOME"], "cwd": os.getcwd(), "pwd": os.environ["PWD"], "arguments": sys.argv[1:],
                  "stdin": sys.stdin.read(), "settings": settings, "there": os.listdir(".")}))
"""


async def test_a_harness_has_a_home_of_its_own_and_works_in_a_copy_of_the_folder(tmp_path: Path) -> None:
    program = script(tmp_path / "pi", AGENT)
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "code.py").touch()
    seen: list[dict[str, Any]] = []

    def reward(output: ly.ProcessOutput) -> float:
        seen.append(json.loads(output.stdout))
        return float(output.folder is not None and (output.folder / "code.py").exists())

    agent = ly.Harness("pi", program=program, folder=tmp_path / "task", reward=reward, arguments=["--thinking", "off"])
    llm = ly.LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="k")
    async with ly.open_store("memory://") as store:
        await store.add_resources({"llm": llm})
        for task in ("do it", {"instruction": "do it", "n": 1}, {"no": "text"}):
            await store.enqueue_rollout(task)
        async with ly.LitAgentRunner(max_rollouts=3).run_context(agent=agent, store=store) as runner:
            await runner.iter()
        rollouts = await store.query_rollouts()
        reasons = [(await store.query_attempts(each.rollout_id))[-1].metadata.get("reason") for each in rollouts]
    assert [each.status for each in rollouts] == ["succeeded", "succeeded", "failed"]
    assert "neither text nor has a text `instruction`" in str(reasons[-1])
    for found in seen:
        assert found["arguments"][-5:] == ["-p", "do it", "--no-session", "--thinking", "off"]
        assert found["settings"]["baseUrl"] == "http://127.0.0.1:1/v1"
        assert found["there"] == ["code.py"] and found["stdin"] == "" and found["cwd"] == found["pwd"]
        assert str(found["home"]).endswith("/home") and not os.path.exists(str(found["home"]))  # noqa: ASYNC240, PTH110
    assert seen[0]["home"] != seen[1]["home"]


CALL = """
import json, os, urllib.request
headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        ("print('I call nobody')", "it made no call to the address"),
        ("import time; time.sleep(60)", "it made no call to the address"),
        (
            CALL,
            "in 1 of 1 it did not run the command",
        ),
    ],
)
async def test_a_check_says_what_is_wrong(tmp_path: Path, source: str, trouble: str) -> None:
    checked = await check(harness_program("pi"), script(tmp_path / "pi", source), timeout_seconds=3)
    assert checked.trouble.startswith(trouble)


def test_another_version_is_told_by_its_package_or_by_itself(tmp_path: Path) -> None:
    kind = harness_program("pi")
    program = script(tmp_path / "a" / "node_modules" / "pi" / "cli.js", "print('pi 9.9.9')")
    assert installed_version(kind, program) == "9.9.9"
    (program.parent / "package.json").write_text(json.dumps({"name": kind.package, "version": "0.1.0"}))
    assert installed_version(kind, program) == "0.1.0"
