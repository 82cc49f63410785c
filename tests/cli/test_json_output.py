"""`--json` of every command: one JSON value on standard output, for a result and for an error, as the docs list it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main

import leyden as ly
from leyden.cli import main
from leyden.cli.app import app
from leyden.testing import FakeUpstream
from leyden.types import LabelMove, PromptTemplate

pytest.importorskip("openai")

PAGE = Path(__file__).parents[2] / "docs" / "json-output.md"
SERVERS = {"dashboard", "gateway", "serve", "store"}
"""Commands that run until Ctrl-C and print no data."""


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the app, with its options."""
    if (names := getattr(command, "commands", None)) is None or (command.invoke_without_command and path):
        yield " ".join(path), [option for param in command.params for option in param.opts]
    for name in names or ():
        yield from walk(command.get_command(None, name), (*path, name))


def row_of(command: str) -> str | None:
    """Return the first row of the page that is this command's."""
    return next((row for row in documented() if re.fullmatch(rf"{command}( [A-Z-].*)?", row)), None)


COMMANDS = dict(walk(typer.main.get_command(app)))


def documented() -> dict[str, set[str]]:
    """Return the names that the page lists for each command, by what its first column says."""
    table = PAGE.read_text().partition("## Results")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    return {
        command: set(re.findall(r"`(?:--\S+|\[.*?\]|([a-z_]+))`", result)) - {""}
        for first, result in rows
        for command in re.findall(r"`(.*?)`", first)
    }


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: str) -> tuple[Any, Any, str]:
        """Return the exit code, the JSON on standard output, and standard error."""
        monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, json.loads(out, parse_constant=pytest.fail), err

    return run


def names_in(data: Any) -> set[str]:
    """Return the keys of all objects in JSON data."""
    if isinstance(data, dict):
        return set(data).union(*map(names_in, data.values()))
    return set[str]().union(*map(names_in, data)) if isinstance(data, list) else set()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of APO, a store with two versions of resources, tasks and an agent."""
    folder = tmp_path_factory.mktemp("recorded")

    @ly.rollout
    async def agent(task: Any, llm: ly.LLM, prompt_template: ly.PromptTemplate) -> float:
        text = f"{prompt_template.template} and a long fixed text: {task['q']}"
        await llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
        if task["n"] == 0:
            raise ValueError("this task always fails")
        return 0.1 * task["n"] + 0.5 * ("better" in prompt_template.template)

    def reply(body: dict[str, Any]) -> str:
        return "<new_prompt>better</new_prompt>" if "<new_prompt>" in str(body["messages"][0]["content"]) else "why"

    async def record() -> None:
        async with FakeUpstream(reply=reply) as upstream:
            proxy = ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}])
            tasks = [{"n": number % 3, "q": f"task {number}"} for number in range(6)]
            await ly.Trainer(
                algorithm=ly.APO(beam_rounds=1, beam_width=1, branch_factor=1),
                llm_proxy=proxy,
                initial_resources={"prompt": PromptTemplate(template="first")},
                run_dir=folder / ".leyden" / "run",
                progress=False,
                monitor=True,
            ).afit(agent, tasks, tasks)
        async with ly.SqliteLightningStore(folder / "store.db") as store:
            for text in ("one", "two", "three"):
                await store.update_resources("rs", {"prompt": PromptTemplate(template=text)}, author="ada")
            await store.move_labels([LabelMove(label="production", to=("rs", 1), expected=None)], who="ada", why="new")

    asyncio.run(record())
    (folder / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (folder / "loud.py").write_text(
        "import os, subprocess\n"
        "import leyden as ly\n"
        "print('imported')\n\n\n"
        "@ly.rollout\n"
        "async def agent(task: dict) -> float:\n"
        "    print('from the agent')\n"
        "    subprocess.run(['echo', 'from its child'])\n"
        "    os.write(1, b'from its descriptor')\n"
        "    return task['n'] / 0 if task['n'] > 9 else float(task['n'])\n\n\n"
        "def judge(record):\n"
        "    print('from the judge')\n"
        "    return record.task['n'] / record.task['n']\n"
    )
    (folder / "new.json").write_text('{"prompt": {"resource_type": "prompt_template", "template": "four"}}')
    (folder / "agent.py").write_text('PROMPT = "first"\n')
    return folder


def test_every_command_that_prints_data_has_the_option_and_is_documented() -> None:
    assert COMMANDS.keys() >= {"runs", "store", "store export", "rl train"}
    without = {name for name, options in COMMANDS.items() if "--json" not in options}
    assert without == SERVERS
    assert {name for name in COMMANDS if row_of(name) is None} == SERVERS


def successes() -> dict[str, tuple[str, ...]]:
    """Return arguments with which a command ends well, by its row in the page."""
    at = "--store", "store.db"
    return {
        "init": ("project",),
        "run --dry-run": ("project/train.yaml", "--dry-run"),
        "run --sweep": ("project/train.yaml", "--sweep", "n_steps=1,2", "--dry-run"),
        "run --schema": ("--schema",),
        "eval": ("loud.py:agent", "--tasks", "tasks.jsonl", "--run-dir", "evaluated"),
        "runs": (),
        "show RUN": ("latest",),
        "show RUN --failed": ("latest", "--failed"),
        "show RUN --best": ("latest", "--best"),
        "--worst": ("show", "latest", "--worst"),
        "show RUN ROLLOUT": ("latest", "ROLLOUT"),
        "plot": ("latest",),
        "compare": (".leyden/run", "evaluated"),
        "report": (".leyden/run",),
        "dataset": (".leyden/run", "--where", "mode == 'val'", "--output", "rows.jsonl"),
        "rescore": (".leyden/run", "--judge", "loud.py:judge", "--where", "task.n != 0"),
        "note": (".leyden/run", "it works", "--tag", "good"),
        "replay": ("ROLLOUT", "--agent", "loud.py:agent", "--run-dir", "replayed"),
        "workers": (".leyden/run/store.sqlite",),
        "samples": (".leyden/run/store.sqlite",),
        "store export": ("--url", "store.db", "exported"),
        "store import": ("--url", "imported.db", "exported"),
        "store upgrade": ("store.db",),
        "prompts best": ("latest",),
        "prompts history": ("latest",),
        "prompts diff": ("latest",),
        "prompts export": ("latest", "--out", "prompts"),
        "prompts apply": ("latest", "agent.py"),
        "prompts extract": ("latest",),
        "resources list": at,
        "resources list --audit": ("--audit", *at),
        "resources show": ("rs", "1", *at),
        "resources add": ("rs", "new.json", *at),
        "resources diff": ("rs", "1", "2", *at),
        "resources promote": ("rs", "2", *at),
        "resources rollback": at,
        "resources freeze": ("rs", "3", *at),
        "harness list": (),
        "learning list": at,
        "learning stop": at,
        "learning allow": at,
    }


NOT_RUN = {
    *("stop", "pause", "resume", "extend", "set"),
    "doctor",  # in tests/doctor
    "run",
    "demo",
    "lr-range",
    "models get",
    "models import",
    "models export",
    "tasks check",
    "harness check",
    "rl train",
    "rl backtest",
}
"""Rows whose command trains, installs or downloads. The tests of these commands read their JSON."""


def test_the_results_are_those_that_the_page_lists(said: Any, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    failed = json.loads((recorded / ".leyden/run/failures.jsonl").read_text().splitlines()[0])["rollout_id"]
    for row, arguments in successes().items():
        name = max((name for name in COMMANDS if re.match(rf"{name}( |$)", row)), key=len, default="").split()
        given = [failed if each == "ROLLOUT" else each for each in arguments]
        if row in ("store export", "store import") and find_spec("pyarrow") is None:
            continue
        code, data, err = said(*name, *given, "--json")
        assert code == 0, (row, data, err)
        assert "error" not in data or row == "replay"
        missing = documented()[row] - names_in(data)
        if data:
            assert missing <= {"iteration", "null"}, (row, missing, names_in(data))
    assert set(documented()) - set(successes()) == NOT_RUN


FAILURES = {
    "demo": ("--resume", "nothing"),
    "init": ("tasks.jsonl",),
    "run": ("nothing.yaml",),
    "runs": ("--dir", "nothing"),
    "show": ("nothing",),
    "plot": ("nothing",),
    "compare": ("nothing", "latest"),
    "doctor": ("nothing",),
    "report": ("nothing",),
    "dataset": ("nothing", "--output", "rows.jsonl"),
    "rescore": ("nothing", "--judge", "json:dumps"),
    "note": ("nothing",),
    "stop": ("nothing",),
    "pause": ("nothing",),
    "resume": ("nothing",),
    "extend": ("nothing", "--steps", "1"),
    "set": ("nothing", "optim.learning_rate=1"),
    "replay": ("ro-0", "--agent", "nothing:agent"),
    "eval": ("nothing:agent", "--tasks", "tasks.jsonl"),
    "lr-range": ("nothing:agent", "--tasks", "nothing.jsonl", "--model", "nothing"),
    "workers": ("nothing.db",),
    "samples": ("nothing.db",),
    "rl train": ("nothing.yaml",),
    "rl backtest": ("nothing.yaml",),
    "store export": ("--url", "nothing.db", "out"),
    "store import": ("nothing",),
    "store upgrade": ("nothing.db",),
    "prompts best": ("nothing",),
    "prompts history": ("nothing",),
    "prompts diff": ("nothing",),
    "prompts export": ("nothing",),
    "prompts apply": ("nothing", "agent.py"),
    "prompts extract": ("nothing",),
    "resources list": ("--store", "nothing.db"),
    "resources show": ("rs", "1", "--store", "nothing.db"),
    "resources add": ("rs", "nothing.json"),
    "resources diff": ("rs", "1", "2", "--store", "nothing.db"),
    "resources promote": ("rs", "1", "--store", "nothing.db"),
    "resources rollback": ("--store", "nothing.db"),
    "resources freeze": ("rs", "1", "--store", "nothing.db"),
    "models get": ("nothing", "folder"),
    "models import": ("nothing.gguf", "folder"),
    "models export": ("nothing", "folder"),
    "tasks check": ("nothing",),
    "harness check": ("nothing",),
    "learning list": ("--store", "nothing.db"),
    "learning stop": ("--store", "nothing.db"),
    "learning allow": ("--store", "mysql://x"),
}
CANNOT_FAIL = {"harness list"}


def test_every_command_has_a_failure_here() -> None:
    assert set(FAILURES) == set(COMMANDS) - SERVERS - CANNOT_FAIL


@pytest.mark.parametrize("command", FAILURES)
def test_an_error_is_one_object_and_code_1(
    said: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    code, data, err = said(*command.split(), *FAILURES[command], "--json")
    assert code == 1, data
    assert data.keys() == {"error"} and data["error"].keys() <= {"kind", "message", "remedy"}
    assert issubclass(getattr(ly.errors, data["error"]["kind"]), ly.LeydenError), data
    assert data["error"]["message"] and data["error"]["message"].splitlines()[0] in err
    assert data["error"].get("remedy", "") in data["error"]["message"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_line_is_one_object_and_code_2(said: Any, command: str) -> None:
    code, data, _ = said(*command.split(), "--json", "--nothing")
    assert (code, data["error"]["kind"]) == (2, "UsageError"), data
    assert data["error"]["remedy"]


def leyden(*arguments: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "leyden", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_what_an_agent_and_its_children_print_is_not_among_the_json(recorded: Path) -> None:
    with leyden("eval", "loud.py:agent", "--tasks", "tasks.jsonl", "--json", folder=recorded) as run:
        out, err = run.communicate(timeout=60)
    assert json.loads(out)["reward"]["mean"] == 1.5, (out, err)
    for text in (b"imported", b"from the agent", b"from its child", b"from its descriptor"):
        assert text in err


def test_a_command_that_found_a_failure_ends_with_code_1_and_its_result(recorded: Path) -> None:
    (recorded / "bad.jsonl").write_text('{"n": 10}\n')
    with leyden("eval", "loud.py:agent", "--tasks", "bad.jsonl", "--json", folder=recorded) as run:
        out, _ = run.communicate(timeout=60)
    assert (run.returncode, json.loads(out)["failed"], json.loads(out)["reward"]) == (1, 1, None)


def test_ctrl_c_is_an_error_with_code_130(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio, pathlib\n"
        "import leyden as ly\n\n\n"
        "@ly.rollout\n"
        "async def agent(task: dict) -> float:\n"
        "    pathlib.Path('begun').touch()\n"
        "    while not pathlib.Path('end').exists():\n"
        "        await asyncio.sleep(0.01)\n"
        "    return 1.0\n"
    )
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    with leyden("eval", "slow.py:agent", "--tasks", "tasks.jsonl", "--json", folder=tmp_path) as run:
        while not (tmp_path / "begun").exists():
            assert run.poll() is None
        os.kill(run.pid, signal.SIGINT)
        (tmp_path / "end").touch()
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    error = json.loads(out)["error"]
    assert error["kind"] == "RunInterrupted"
    assert error["message"].encode() in err and b"Traceback" not in err


def test_a_defect_is_an_error_too_with_its_traceback_on_standard_error(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.training.runs.recorded_runs.find_runs", lambda _: {}["missing"])
    code, data, err = said("runs", "--dir", ".", "--json")
    assert code == 1
    assert data["error"]["kind"] == "Unexpected" and re.match(
        r"KeyError: .missing. \(.*test_json_output.py, line \d+\)", data["error"]["message"]
    )
    assert "Traceback" in err


def test_a_closed_pipe_and_a_full_disk_end_a_json_command_as_they_end_others(recorded: Path) -> None:
    line = f'set -o pipefail; {sys.executable} -m leyden show run --json | head -c 1 >/dev/null; echo "$?"'
    ended = subprocess.run(["bash", "-c", line], cwd=recorded, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() in ("0", "141") and "Traceback" not in ended.stderr
    if Path("/dev/full").exists():
        for arguments in ("show run --json", "show nothing --json"):
            line = f'{sys.executable} -m leyden {arguments} >/dev/full; echo "$?"'
            ended = subprocess.run(["bash", "-c", line], cwd=recorded, capture_output=True, text=True, check=True)
            assert ended.stdout.strip() == "1"
            assert "standard output cannot be written: No space left" in ended.stderr
            assert "Traceback" not in ended.stderr
