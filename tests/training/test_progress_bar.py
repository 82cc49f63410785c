"""The progress bar: live on a terminal, plain lines elsewhere, and never in the way of what others print."""

import io
import logging
import os
import pty
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leyden.training import Progress, ProgressBar, Stage, TrainLoop
from leyden.training.live_view import RunView
from leyden.training.progress_bar import showing_setup
from leyden.training.runs.reported_loop import ReportedLoop
from leyden.training.screens import Terminal
from tests.terminal import Program


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
    assert "reward 1.5  val/reward 12,345" in lines[1]
    assert lines[2].startswith("iteration 3/3") and "left" not in lines[2]
    assert ["val/reward" in line for line in lines] == [False, True, False], "a value stands where it was measured"
    assert all(character.isprintable() for line in lines for character in line)


def test_a_validation_before_the_first_iteration_has_a_line() -> None:
    stream = io.StringIO()
    run(ProgressBar(stream=stream), max_iters=2, validate_first=True)
    first, *rest = stream.getvalue().splitlines()
    assert first.startswith("iteration 0/2  val/reward 12,345")
    assert [line.split()[1] for line in rest] == ["1/2", "2/2"] and "val/" not in "".join(rest)
    stream = io.StringIO()
    run(ProgressBar(stream=stream), max_iters=0, validate_first=True)
    assert stream.getvalue().startswith("iteration 0/0  val/reward 12,345")


def test_reported_stages_have_their_values_on_their_own_lines() -> None:
    stream = io.StringIO()
    loop = ReportedLoop(started_at=time.monotonic(), callbacks=[ProgressBar(stream=stream)])
    loop.begin()
    stages: list[tuple[Stage, int]] = [("val", 0), ("train", 1), ("train", 2), ("val", 2), ("train", 3)]
    for stage, iteration in stages:
        loop.report({"reward": iteration + 0.5}, stage=stage, iteration=iteration)
    loop.end()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "iteration 0  val/reward 0.5",
        "iteration 1  reward 1.5",
        "iteration 2  reward 2.5",
        "iteration 2  reward 2.5  val/reward 2.5",
        "iteration 3  reward 3.5",
    ]


class Slow:
    """A vessel whose steps report nothing until a line about them has been printed."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream, self.loop = stream, TrainLoop(max_iters=2)

    def step(self, iteration: int) -> dict[str, Any]:
        self.loop.progress(3, 8)
        lines = len(self.stream.getvalue().splitlines())
        deadline = time.monotonic() + 20
        while len(self.stream.getvalue().splitlines()) < lines + 2:
            assert time.monotonic() < deadline, "no line although the iteration is long"
            threading.Event().wait(0.005)
        return {"reward": 0.5}

    def validate(self, iteration: int) -> dict[str, Any]:
        return {}

    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...


def test_off_a_terminal_a_long_iteration_gets_a_line_now_and_then() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream, line_seconds=0.05)
    vessel = Slow(stream)
    vessel.loop = TrainLoop(max_iters=2, callbacks=[bar])
    vessel.loop.run(vessel)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("iteration 0/2  train 3/8 rollouts")
    assert any(line.startswith("iteration 1/2  train 3/8 rollouts  reward 0.5") for line in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "leyden-progress"]


def test_a_run_without_iterations_shows_its_stage() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream, line_seconds=0.02)
    loop, vessel = TrainLoop(max_iters=None, callbacks=[bar]), Reporting()
    loop.metrics = {"reward": 0.25}
    bar.on_fit_start(loop, vessel)
    bar.on_progress(loop, Progress(50, 200, 2.0, {}))
    wait_for("reward", stream)
    bar.close()
    assert re.search(r"^train 50/200 rollouts  reward 0.25  25 rollouts/s  0:0[456] left$", stream.getvalue(), re.M)


def wait_for(text: str, stream: io.StringIO) -> None:
    deadline = time.monotonic() + 20
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        threading.Event().wait(0.005)


def test_a_run_that_is_being_set_up_says_so_and_stops_when_that_fails() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream, line_seconds=0.02)
    vessel = Reporting()
    vessel.loop = TrainLoop(max_iters=1, callbacks=[bar])
    with showing_setup(vessel.loop):
        wait_for("starting 0:00\n", stream)
    vessel.loop.run(vessel)
    assert "iteration 1/1" in stream.getvalue().splitlines()[-1]
    with pytest.raises(RuntimeError, match="no model"), showing_setup(vessel.loop):
        raise RuntimeError("no model")
    assert not [thread for thread in threading.enumerate() if thread.name == "leyden-progress"]


PROGRAM = """
import logging, sys, time
from rich.console import Console
from leyden.training import ConsoleWriter, ProgressBar, TrainLoop
from leyden._lib.logs import setup_logging

setup_logging("WARNING")
fixed = Console(file=sys.stderr)

early = logging.StreamHandler()  # holds the terminal before the bar begins
early.setFormatter(logging.Formatter("LOG %(message)s END"))
logging.getLogger("app").addHandler(early)

class Vessel:
    def step(self, iteration):
        for done in range(5):
            loop.progress(done + 1, 5, tokens=100 * done)
            time.sleep(0.07)
            logging.getLogger("app").warning("logged %d", iteration * 10 + done)
            logging.getLogger("leyden.app").warning("said %d.", iteration * 10 + done)
        Console(stderr=True).print("a console's line", iteration)
        print("printed", iteration)
        if iteration == 2 and "fail" in sys.argv:
            raise RuntimeError("as asked")
        return {"reward": iteration + 0.25}

    def validate(self, iteration): return {"reward": iteration / 2}
    def save(self, path): ...
    def load(self, path): ...

loop = TrainLoop(max_iters=3, val_every_n_iters=1, callbacks=[ProgressBar()])
loop.run(Vessel())
assert early.stream is sys.__stderr__ is sys.stderr
print("the end")
"""


def on_a_terminal(*arguments: str, columns: int = 120, **options: Any) -> tuple[Program, int]:
    """Run the program on a terminal. Return it, with the terminal, and its exit code."""
    program = Program(f"import sys; sys.argv += {list(arguments)}\n{PROGRAM}", columns, 40, **options)
    return program, program.end()


@pytest.mark.parametrize("columns", [60, 120])
def test_on_a_terminal_the_bar_moves_within_an_iteration_and_stays_whole(columns: int) -> None:
    program, code = on_a_terminal(columns=columns)
    output, shown = program.output, program.emulator.everything
    assert code == 0
    numbers = [step * 10 + done for step in range(3) for done in range(5)]
    assert [line for line in shown if "logged" in line] == [f"LOG logged {number} END" for number in numbers]
    said = [line for line in shown if "said" in line]
    assert [line.split()[-1] for line in said] == [f"{number}." for number in numbers]
    assert not [line for line in said if "━" in line or "iteration" in line], "log lines go above the bar"
    assert [line for line in shown if "printed" in line] == [f"printed {step}" for step in range(3)]
    assert [line for line in shown if "console" in line] == [f"a console's line {step}" for step in range(3)]
    assert re.search(r"[1-4]/5 rollouts .* rollouts/s", plain(output)), "live within an iteration"
    assert re.search(r"iteration [12]/3 .*reward \S+ .*val/reward \S+ .*0:0\d left", plain(output), re.DOTALL)
    runs = [line for line in shown if line.startswith("iteration")]
    assert len(runs) == 1
    assert re.fullmatch(r"iteration 3/3 ━+  reward 2.25  val/reward 1.5", runs[0])
    assert shown[-1] == "the end"


def plain(output: str) -> str:
    """Return the output without control sequences."""
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", output)


def test_what_goes_to_a_file_gets_there_while_the_bar_is_on_the_terminal() -> None:
    reader, writer = os.pipe()
    program, code = on_a_terminal(stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read().splitlines() == ["printed 0", "printed 1", "printed 2", "the end"]
    assert code == 0
    assert "printed" not in program.output
    assert "iteration 3/3" in program.output


def test_an_error_gives_the_terminal_back_and_its_traceback_is_readable() -> None:
    program, code = on_a_terminal("fail")
    assert code == 1
    shown = program.emulator.everything
    assert shown[-1] == "RuntimeError: as asked"
    assert any(line.startswith("iteration 2/3") for line in shown)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_displays_of_two_runs_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch, first_ends_first: bool) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master), os.fdopen(slave, "w") as stream:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        handler = logging.StreamHandler(stream)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        displays = [Terminal(RunView((), "rollouts"), stream) for _ in range(2)]
        held = sys.stderr  # as a user's logger would
        for display in displays if first_ends_first else reversed(displays):
            display.close(keep=False)
        assert sys.stderr is stream
        assert sys.stdout is stream
        assert handler.stream is stream
        held.write("no line break")
        held.flush()
        seen = b""
        while b"no line break" not in seen:
            seen += os.read(master, 1000)
        assert seen.endswith(b"no line break")
