"""What a harness writes and refuses. The real programs are tried in tests/harness."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.execution.harness import harness_program
from leyden.execution.harness.check import check
from leyden.execution.harness.installed import install, installed_version
from leyden.execution.harness.programs import PROGRAMS
from leyden.testing import FakeUpstream
from leyden.types import find_final_reward


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
print(json.dumps({"home": os.environ["HOME"], "tmp": os.environ["TMPDIR"],
                  "cwd": os.getcwd(), "pwd": os.environ["PWD"], "arguments": sys.argv[1:],
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
        assert found["tmp"] == f"{found['home']}/tmp"
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


async def run_once(
    program: Path, llm: ly.LLM | None, tmp_path: Path, *, timeout_seconds: float = 30, **options: Any
) -> tuple[str, str, float | None]:
    """Return the status, the reason and the reward of one attempt of pi, which is a script. llm: None for a gateway."""
    (tmp_path / "work").mkdir(exist_ok=True)
    before = psutil.Process().children(recursive=True)
    agent = ly.Harness("pi", program=program, folder=tmp_path / "work", **{"reward": lambda _: 1.0, **options})  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    async with (
        FakeUpstream() as model,
        ly.open_store("memory://") as store,
        ly.LLMProxy(model_list=[model.llm()], store=store) as proxy,
    ):
        await store.add_resources({"llm": llm or proxy.as_resource()})
        config = ly.RolloutConfig(timeout_seconds=timeout_seconds)
        rollout = await store.enqueue_rollout("do it", config=config)
        async with ly.LitAgentRunner[Any](max_rollouts=1).run_context(agent=agent, store=store) as runner:
            await runner.iter()
        (attempt,) = await store.query_attempts(rollout.rollout_id)
        reward = find_final_reward(await store.query_spans(rollout.rollout_id))
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    return attempt.status, str(attempt.metadata.get("reason")), reward


async def test_an_attempt_that_the_gateway_has_no_call_of_fails(tmp_path: Path) -> None:
    program = script(tmp_path / "pi", "print('I call nobody')")
    status, reason, _ = await run_once(program, None, tmp_path)
    assert (status, "never called the model through the gateway" in reason) == ("failed", True)
    source = CALL.replace('"fake"', '"other"').replace("urllib.request.urlopen(", "try: urllib.request.urlopen(")
    refused = script(tmp_path / "refused", f"{source}except OSError: pass")
    status, reason, _ = await run_once(refused, None, tmp_path)
    assert (status, "none of the agent's 1 model calls was answered" in reason) == ("failed", True)
    assert (await run_once(script(tmp_path / "calls", CALL), None, tmp_path))[0] == "succeeded"
    direct = ly.LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="k")  # which records no calls
    assert await run_once(program, direct, tmp_path) == ("succeeded", "None", 1.0)


def test_another_version_than_the_tested_one_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("pi", "aider"):
        kind = harness_program(name)
        program = script(tmp_path / name / "bin" / kind.program, "")
        for version in (None, "0.1.0", kind.version):
            if version is not None:
                (program.parent / "package.json").write_text(json.dumps({"name": kind.package, "version": version}))
                info = (
                    tmp_path
                    / name
                    / "lib/python3.11/site-packages"
                    / f"{kind.package.replace('-', '_')}-1.dist-info"
                    / "METADATA"
                )
                info.parent.mkdir(parents=True, exist_ok=True)
                info.write_text(f"Metadata-Version: 2.1\nName: {kind.package}\nVersion: {version}\n")
            caplog.clear()
            ly.Harness(name, program=program)
            warned = f"has version {version or 'unknown'}, and {kind.version} was tested"
            assert [warned in each for each in caplog.messages] == ([] if version == kind.version else [True])


async def test_a_program_that_updates_itself_fails_the_attempts_after_it(tmp_path: Path) -> None:
    source = """
import os
with open(__file__ + ".new", "w") as file: file.write(open(__file__).read() + "#")
os.chmod(__file__ + ".new", 0o755)
os.rename(__file__ + ".new", __file__)
"""
    program = script(tmp_path / "pi", source)
    agent = ly.Harness("pi", program=program, reward=lambda output: 1.0)
    llm = ly.LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="k")
    async with ly.open_store("memory://") as store:
        await store.add_resources({"llm": llm})
        rollouts = [await store.enqueue_rollout("do it") for _ in range(2)]
        async with ly.LitAgentRunner[Any](max_rollouts=2, concurrency=1).run_context(
            agent=agent, store=store
        ) as runner:
            await runner.iter()
        attempts = [(await store.query_attempts(each.rollout_id))[0] for each in rollouts]
    assert [each.status for each in attempts] == ["succeeded", "failed"]
    assert "it updated itself, or was installed anew" in str(attempts[1].metadata["reason"])


BAD_PROGRAMS = {
    "a terminal": ("open('/dev/tty').read()", "failed", "No such device or address"),
    "an answer": ("assert input('Trust this folder? ')", "failed", "EOF"),
    "nothing": ("import time; print('press a key', flush=True); time.sleep(600)", "timeout", "timeout_seconds=3"),
    "its child": (
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); print('done')",
        "succeeded",
        "None",
    ),
    "gigabyte": ("for _ in range(1024): print('x' * 2**20)", "succeeded", "None"),
    "folder": ("import shutil; shutil.rmtree(os.getcwd())", "failed", "No such file or directory"),
    "home": ("import shutil; shutil.rmtree(os.environ['HOME'])", "succeeded", "None"),
}


@pytest.mark.parametrize("name", BAD_PROGRAMS)
async def test_a_bad_program_ends_with_its_reason_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    source, expected, why = BAD_PROGRAMS[name]

    def reward(output: ly.ProcessOutput) -> float:
        assert output.folder is not None and len(output.stdout) <= 2**20 + 1000
        assert output.exit_code == 0, output.stderr
        return float(len([*output.folder.iterdir()]) == 0)

    program = script(tmp_path / "pi", CALL + source)
    status, reason, given = await run_once(
        program, None, tmp_path, reward=reward, timeout_seconds=3 if name == "nothing" else 50
    )
    assert (status, why in reason) == (expected, True), reason
    assert given == (1.0 if expected == "succeeded" else None)
