"""The progress bar: live on a terminal, plain lines elsewhere, and never in the way of what others print."""

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from leyden.loop import ProgressBar, TrainLoop
from leyden.loop.progress_bar import _duration, _number  # pyright: ignore[reportPrivateUsage]

ROOT = Path(__file__).parents[2]


class Reporting:
    """A vessel that says how far it is, from several threads."""

    def __init__(self) -> None:
        self.loop: TrainLoop | None = None

    def step(self, iteration: int) -> dict[str, Any]:
        assert self.loop is not None
        threads = [
            threading.Thread(target=self.loop.progress, args=(done, 8), kwargs={"tokens": done * 100})
            for done in range(9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"reward": iteration + 0.5, "mood": "so\x1b[31mso\n"}

    def validate(self, iteration: int) -> dict[str, Any]:
        return {"reward": 12345.0}

    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...


def run(bar: ProgressBar, **options: Any) -> None:
    vessel = Reporting()
    vessel.loop = TrainLoop(callbacks=[bar], **options)
    vessel.loop.run(vessel)


def test_off_a_terminal_an_iteration_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # some build servers set it; it makes no terminal
    stream = io.StringIO()
    bar = ProgressBar(("reward", "val/reward", "missing", "mood"), unit="games", stream=stream)
    run(bar, max_iters=3, val_every_n_iters=2)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("iteration 1/3  reward 0.5  mood so [31mso   ")
    assert re.fullmatch(r"iteration 1/3 .* games/s  \S+ tokens/s  0:00 left", lines[0])
    assert "reward 1.5  val/reward 12.3k" in lines[1]
    assert lines[2].startswith("iteration 3/3") and "left" not in lines[2]
    assert all(character.isprintable() for line in lines for character in line)


def test_numbers_and_times_are_short() -> None:
    assert [_number(value) for value in (0.12345, 91.23, 999, 1234, 2_500_000, -0.5, 7, "x")] == [
        *["0.123", "91.2", "999", "1.23k", "2.5M", "-0.5", "7", "x"]
    ]
    assert [_duration(seconds) for seconds in (0, 59.6, 61, 3723)] == ["0:00", "1:00", "1:01", "1:02:03"]


PROGRAM = """
import logging, sys, time
from leyden.loop import ConsoleWriter, ProgressBar, TrainLoop

early = logging.StreamHandler()  # holds the terminal before the bar begins
early.setFormatter(logging.Formatter("LOG %(message)s END"))
logging.getLogger("app").addHandler(early)

class Vessel:
    def step(self, iteration):
        for done in range(5):
            loop.progress(done + 1, 5, tokens=100 * done)
            time.sleep(0.06)
            logging.getLogger("app").warning("logged %d", iteration * 10 + done)
        print("printed", iteration)
        if iteration == 2 and "fail" in sys.argv:
            raise RuntimeError("as asked")
        return {"reward": iteration + 0.25}

    def validate(self, iteration): return {}
    def save(self, path): ...
    def load(self, path): ...

loop = TrainLoop(max_iters=3, callbacks=[ProgressBar()])
loop.run(Vessel())
assert early.stream is sys.__stderr__ is sys.stderr
print("the end")
"""


def on_a_terminal(*arguments: str, stdout_is_a_file: bool = False) -> tuple[str, str, int]:
    """What a program writes to its terminal, what to a file given as its standard output, and its exit code."""
    master, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        stdin=terminal,
        stderr=terminal,
        stdout=subprocess.PIPE if stdout_is_a_file else terminal,
        text=True,
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    written = process.communicate()[0] or ""
    return seen.decode(), written, process.returncode


def screen(output: str, height: int = 60) -> list[str]:
    """What a terminal shows after `output`: the few control sequences that matter, carried out."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b["):
            count = int(token[2:-1] or 1) if token[2:-1].isdigit() or not token[2:-1] else 0
            if token.endswith("A"):
                row = max(0, row - count)
            elif token == "\x1b[2K":
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def test_on_a_terminal_the_bar_moves_within_an_iteration_and_garbles_no_log() -> None:
    output, _, code = on_a_terminal()
    assert code == 0
    shown = screen(output)
    assert [line for line in shown if "logged" in line] == [
        f"LOG logged {step * 10 + done} END" for step in range(3) for done in range(5)
    ]
    assert [line for line in shown if "printed" in line] == [f"printed {step}" for step in range(3)]
    assert re.search(r"[1-4]/5 rollouts .* rollouts/s +\S+ tokens/s", output), "live within an iteration"
    runs = [line for line in shown if line.startswith("iteration")]
    assert len(runs) == 1 and runs[0].startswith("iteration 3/3") and "reward 2.25" in runs[0]
    assert [line for line in shown if line][-1] == "the end"
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is shown again"


def test_what_goes_to_a_file_gets_there_while_the_bar_is_on_the_terminal() -> None:
    output, written, code = on_a_terminal(stdout_is_a_file=True)
    assert code == 0
    assert written.splitlines() == ["printed 0", "printed 1", "printed 2", "the end"]
    assert "printed" not in output and "iteration 3/3" in output


def test_an_error_gives_the_terminal_back_and_its_traceback_is_readable() -> None:
    output, _, code = on_a_terminal("fail")
    assert code == 1
    shown = screen(output)
    assert "RuntimeError: as asked" in shown
    assert any(line.startswith("iteration 2/3") for line in shown)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
