"""What commands print: harmless on a terminal, raw in a pipe, and one line in place of a traceback if it cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.testing import FakeUpstream
from leyden.types import LabelMove, PromptTemplate

pytest.importorskip("openai")

ATTACK = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\x1b[8m\x9b31m\u202e\u2066[red]\x08\r"
"""Writes to the clipboard, clears the screen, colours (C1), reverses the direction, and is markup of rich."""
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
COLOUR = re.compile("\x1b\\[[0-9;]*m")

DRIVER = """
import json, sys
from leyden.cli import main
for words in json.loads(sys.argv[1]):
    print("COMMAND", ascii(" ".join(word.split("/")[-1] for word in words[:2])), flush=True)
    sys.argv = ["leyden", *words]
    try:
        main()
    except SystemExit as ended:
        print("STATUS", ended.code or 0, flush=True)
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a store in which every text that others write is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    bad = f"MARK {ATTACK}"

    @ly.rollout
    async def agent(task: Any, llm: ly.LLM, prompt_template: ly.PromptTemplate) -> float:
        await llm.openai().chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": f"{prompt_template.template} and a long fixed text: {task['q']}"}],
        )
        ly.emit_message(f"message {bad}")
        if task["n"] == 0:
            raise ValueError(f"reason {bad}\r\nFORGED line")
        return 0.1 * task["n"] + 0.5 * ("better" in prompt_template.template)

    def reply(body: dict[str, Any]) -> str:
        text = str(body["messages"][0]["content"])
        if "<new_prompt>" in text:
            return f"<new_prompt>better {bad}</new_prompt>"
        return f"critique {bad}"

    async def record() -> None:
        async with FakeUpstream(reply=reply) as upstream:
            proxy = ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}])
            trainer = ly.Trainer(
                algorithm=ly.APO(beam_rounds=1, beam_width=1, branch_factor=1),
                llm_proxy=proxy,
                initial_resources={"prompt": PromptTemplate(template=f"first {bad}")},
                run_dir=folder / "run",
                progress=False,
            )
            tasks = [{"n": number % 3, "q": f"task {number} {bad}"} for number in range(6)]
            await trainer.afit(agent, tasks, tasks)
        async with ly.SqliteLightningStore(folder / "store.db") as store:
            for text in ("one", "two"):
                await store.update_resources(
                    "rs", {"prompt": PromptTemplate(template=f"{text} {bad}")}, author="author [red]"
                )
            move = LabelMove(label="production", to=("rs", 1), expected=None)
            await store.move_labels([move], who="who [red]", why=f"why {bad}\nFORGED line")

    asyncio.run(record())
    return folder


def on_a_terminal(commands: list[list[str]], folder: Path, **environment: str) -> str:
    """Run commands in one process on a pseudo-terminal, and return what a user would see."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60", **environment},
    ) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                read = os.read(master, 65536)
            except OSError:  # the process has ended
                break
            if not read:
                break
            seen += read
        os.close(master)
    assert process.returncode == 0, seen.decode(errors="replace")[-2000:]
    return seen.decode()


def commands_of(folder: Path) -> list[list[str]]:
    """Return every command that shows texts of a run or of a store."""
    run, store = str(folder / "run"), str(folder / "store.db")
    rows = [json.loads(line) for line in (folder / "run" / "failures.jsonl").read_text().splitlines()]
    (folder / "a.txt").write_text("none")
    operators = [
        ["resources", "list"],
        ["resources", "list", "--audit"],
        ["resources", "show", "rs", "2"],
        ["resources", "diff", "rs", "1", "2"],
        ["resources", "promote", "rs", "9"],
        ["learning", "list"],
    ]
    return [
        ["runs", "--dir", str(folder)],
        ["runs", str(folder / "run" / "store.sqlite")],
        ["show", run],
        ["show", run, "--failed"],
        ["show", run, "--best"],
        ["show", run, "--worst"],
        ["show", run, "--worst", "--json"],
        ["show", run, rows[0]["rollout_id"]],
        ["show", run, rows[0]["rollout_id"], "--full"],
        ["show", run, ATTACK],
        ["show", ATTACK],
        [ATTACK],
        ["show", f"--{ATTACK}"],
        ["plot", run],
        ["plot", run, "--metric", ATTACK],
        *(["prompts", name, run] for name in ("best", "history", "diff", "extract")),
        ["prompts", "history", run, "--full"],
        ["prompts", "apply", run, str(folder / "a.txt")],
        ["workers", str(folder / "run" / "store.sqlite")],
        ["samples", str(folder / "run" / "store.sqlite")],
        *([*words, "--store", store] for words in operators),
    ]


def test_no_command_lets_a_text_control_the_terminal(hostile: Path) -> None:
    seen = on_a_terminal(commands_of(hostile), hostile).replace("\r\n", "\n")
    without_colours = COLOUR.sub("", seen)
    assert OBEYED.findall(without_colours) == []
    assert "\x1b[8m" not in seen
    parts: dict[str, str] = {}
    for name, text in re.findall(r"^COMMAND '(.*)'\n((?:(?!COMMAND ).*\n)*)", without_colours, re.MULTILINE):
        parts[name] = parts.get(name, "") + text
    for name in ("prompts best", "prompts diff", "prompts extract", "resources show", "resources diff", "show run"):
        assert "MARK" in parts[name], name
    assert "FORGED" in parts["resources list"] and "FORGED" in parts["show run"]
    assert not re.search("^FORGED", without_colours, re.MULTILINE), "a reason makes no line of its own"
    assert "[red]" in parts["prompts best"], "it is no markup"
    assert "\x1b[31m" in seen or "\x1b[32m" in seen, "Leyden's own colours stay"
    assert seen.count("\nSTATUS ") == len(commands_of(hostile)), "no command has ended otherwise"


def test_a_pipe_gets_texts_as_they_are(hostile: Path) -> None:
    best = subprocess.run(
        [sys.executable, "-m", "leyden", "prompts", "best", "run"], cwd=hostile, capture_output=True, check=True
    ).stdout.decode()
    assert ATTACK.strip() in best


def test_json_on_a_terminal_reads_as_exactly_the_data(hostile: Path) -> None:
    seen = on_a_terminal([["show", str(hostile / "run"), "--worst", "--json"]], hostile)
    rows = json.loads(seen[seen.index("[\r\n") : seen.rindex("]") + 1])
    assert all(row["input"]["q"].endswith(f"MARK {ATTACK}") for row in rows)
    assert OBEYED.findall(seen.replace("\r\n", "\n")) == []


def test_every_command_prints_through_one_place() -> None:
    """`typer.echo` and `print` are refused by ruff; a console of rich is made in one module."""
    folder = Path(ly.__file__).parent / "cli"
    made = {path.name for path in folder.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())}
    assert made == set(), "use `terminal()`"


# ---- where output cannot be written, or not as it is ---------------------------------------------


def shell(line: str, folder: Path, **environment: str) -> tuple[int, str, str]:
    """Run a line of bash, in which `leyden` is this package's command; return its status and what it printed."""
    function = f'leyden() {{ {sys.executable} -m leyden "$@"; }}; set -o pipefail\n'
    ended = subprocess.run(
        ["bash", "-c", function + line], cwd=folder, capture_output=True, env={**os.environ, **environment}
    )
    return ended.returncode, ended.stdout.decode("latin-1"), ended.stderr.decode("latin-1")


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii", "TERM": "dumb", "COLUMNS": "0", "HOME": ""},
    ],
    ids=str,
)
def test_characters_that_an_encoding_lacks_are_question_marks(hostile: Path, environment: dict[str, str]) -> None:
    commands = ("runs --dir .", "show run", "plot run", "prompts best run", "show run --worst --json", "show nö")
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([command.split() for command in commands])],
        cwd=hostile,
        capture_output=True,
        env={**os.environ, **environment},
    )
    out = ended.stdout.decode("latin-1")
    assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr
    assert re.findall("STATUS (.)", out) == list("000001")
    assert out.count("?") > 5
    rows = json.loads(out[out.index("[\n") : out.rindex("]\n") + 1])
    assert rows[0]["input"]["q"].endswith(ATTACK), "JSON loses nothing"


FULL = "leyden: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        *(
            (f"leyden {command} >/dev/full", 1, FULL)
            for command in ("runs --dir .", "show run --json", "plot run", "--help")
        ),
        ("leyden runs --dir . >&-", 1, "leyden: standard output is closed; to run without it, add >/dev/null\n"),
        ("leyden runs --dir . 2>&- >/dev/null", 0, ""),
        ("leyden show nothing 2>&-", 1, ""),
        ("leyden runs --dir . 0<&- >/dev/null", 0, ""),
        ("{ leyden prompts history run --json; echo $? >status; } | :; cat status >&2", 0, "141\n"),
        ("leyden prompts best run --json >/dev/null 2>/dev/full", 0, ""),
        ("leyden prompts export run --out /dev/full", 1, None),
        (
            "mkdir -p gone; cd gone; rmdir ../gone; leyden runs",
            1,
            "leyden: the working directory does not exist any more; change to another one\n",
        ),
        ("mkdir -p gone; cd gone; rmdir ../gone; leyden --version >/dev/null", 0, ""),
        ("unset HOME; leyden runs --dir . >/dev/null", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_a_status(
    hostile: Path, line: str, status: int, said: str | None
) -> None:
    found, _, error = shell(line, hostile)
    assert "Traceback" not in error and "Exception ignored" not in error
    assert (found, error if said is not None else error.count("\n")) == (status, 1 if said is None else said)
