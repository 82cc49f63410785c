"""The live view of a run: what stands on terminals of all sizes, and that nothing breaks when a terminal changes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.cells import cell_len

from leyden.training import MetricsRow, Progress, ProgressBar, TrainLoop
from leyden.training.live_view import RolloutTally, RunView, cut
from leyden.training.runs.reported_loop import ReportedLoop
from leyden.types import Attempt, AttemptedRollout, Span
from tests.terminal import ROOT, Emulator, Program

Draw = Callable[[RunView, int, int], list[str]]


def drawn(view: RunView, width: int, height: int) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in view.lines(width, height)]


def rollout(
    number: int, *, reason: str | None = None, task: Any = "2 + 2", cost: float | None = None
) -> AttemptedRollout:
    status = "succeeded" if reason is None else "failed"
    attempt = Attempt(
        rollout_id=f"ro-{number}",
        attempt_id="at-1",
        sequence_id=1,
        start_time=0.0,
        status=status,
        prompt_tokens=100,
        response_tokens=20,
        cost=cost,
        metadata={} if reason is None else {"reason": reason},
    )
    return AttemptedRollout(rollout_id=f"ro-{number}", input=task, start_time=0.0, status=status, attempt=attempt)


def said(*messages: dict[str, Any]) -> list[Span]:
    text = json.dumps([{"role": "assistant", **message} for message in messages])
    return [
        Span(
            rollout_id="ro-1",
            attempt_id="at-1",
            sequence_id=1,
            trace_id="0" * 32,
            span_id="1" * 16,
            name="chat",
            attributes={"gen_ai.output.messages": text},
        )
    ]


def full_view() -> RunView:
    """Return the view of a run in its 12th of 40 iterations, with everything to show."""
    tally = RolloutTally(concurrency=8, running=lambda: 8)
    tally.unfinished = lambda: 24
    view = RunView(("reward", "val/reward", "budget_left"), "rollouts", 0, 40, tally)
    view.every = 10
    for iteration in range(1, 13):
        view.begin_stage("train")
        view.end_stage("train", iteration, {"reward": iteration / 20, "budget_left": 0.71})
        if iteration == 10:
            view.end_stage("val", iteration, {"reward": iteration / 20, "val/reward": 0.61})
    view.begin_stage("train")
    for number in range(1204):
        tally.add(rollout(number, cost=0.001), [], 0.25, cached=False)
    for number in range(3):
        tally.add(rollout(number, reason=f"TimeoutError: no answer in {number + 30} s"), [], None, cached=False)
    tally.add(
        rollout(7, reason="ValueError: no JSON"), said({"content": "I think\nit is\n\nfour 四"}), None, cached=False
    )
    view.progress(Progress(48, 128, 2.0, {}))
    return view


def test_a_wide_and_high_terminal_shows_everything_the_most_important_first() -> None:
    lines = drawn(full_view(), 119, 49)
    assert re.fullmatch(
        r"iteration 12/40 ━{5,}─+  reward 0.6  ▁[▁-█]+█  val/reward 0.61 at 10  budget_left 0.71  0:00 left", lines[0]
    )
    assert re.fullmatch(r"  train 48/128 rollouts ━+─+  reward 0.25 so far  24 rollouts/s  72,480 tokens/s", lines[1])
    assert re.fullmatch(r"queue  16 waiting  8 running  1,208 done  cost 1.204  memory [\d.]+ [MG]B", lines[2])
    assert lines[3:] == [
        "failed 4: 3 x TimeoutError: no answer in 32 s",
        "          1 x ValueError: no JSON",
        "last rollout  failed  2 + 2",
        "  > I think",
        "  > it is",
        "  > four 四",
    ]


def test_at_any_size_no_line_is_too_long_and_the_run_comes_first() -> None:
    view = full_view()
    for width in range(1, 160):
        for height in (*range(1, 16), 60):
            lines = drawn(view, width, height)
            assert len(lines) <= height, (width, height)
            assert all(cell_len(line) <= width for line in lines), (width, height, lines)
            assert lines[0].startswith("iteration 12/40"[: width - 1].rstrip()), (width, height)
    assert drawn(view, 39, 4) == [
        "iteration 12/40  reward 0.6  0:00 left",
        "  train 48/128 rollouts  24 rollouts/s",
        "queue  16 waiting  8 running",
        "failed 4: 3 x TimeoutError: no answer…",
    ], "five lines of forty columns"


def test_a_text_is_cut_by_its_columns() -> None:
    assert [cut("四个字 and more", width) for width in (0, 1, 2, 3, 4, 20)] == [
        "",
        "…",
        "…",
        "四…",
        "四…",
        "四个字 and more",
    ]
    assert cut("x" * 10**6, 3) == "xx…"


def test_the_curve_shows_the_whole_run_and_leaves_out_what_is_no_number() -> None:
    view = RunView(("val/reward",), "rollouts", 0, 10**4)
    for iteration in range(5000):
        view.end_stage("train", iteration, {"val/reward": 0.0})
        view.end_stage("val", iteration, {"val/reward": float("nan") if iteration % 3 else float(iteration)})
        view.end_stage("val", iteration, {"val/reward": "a text"})
    (curve,) = re.findall(r"[▁-█]{8,}", drawn(view, 100, 10)[0])
    assert list(curve) == sorted(curve)
    assert (curve[0], curve[-1]) == ("▁", "█")


def test_the_curve_of_a_resumed_run_begins_with_its_earlier_steps() -> None:
    bar = ProgressBar(("reward",), stream=io.StringIO())
    rows = [MetricsRow(each, "train", 1.0, {"reward": float(each)}) for each in (1, 2, 3, 4)]
    bar.earlier_rows = lambda: [*rows, MetricsRow(2, "val", 1.0, {"reward": 99.0})]
    loop = TrainLoop(max_iters=9, callbacks=[bar])
    loop.current_iter = 3  # the fourth step is not in the checkpoint
    bar.on_fit_start(loop, Any)
    loop.current_iter, loop.metrics = 4, {"reward": 7.0}
    bar.on_train_end(loop, Any)
    assert bar._run.curve == [1.0, 2.0, 3.0, 7.0]
    bar.close()


def aged(view: RunView, name: str, iteration: int, seconds: float, metrics: dict[str, Any] | None = None) -> None:
    """End a stage that has taken so many seconds."""
    view.marked_at = time.monotonic() - seconds
    view.end_stage(name, iteration, metrics or {})


def test_no_time_is_left_before_it_can_be_known() -> None:
    view = RunView((), "rollouts", 0, 40)
    assert view.left() == ""
    aged(view, "train", 1, 60.0)  # one of forty, with everything that warms up in it
    assert view.left() == ""
    aged(view, "train", 2, 10.0)
    aged(view, "train", 3, 10.0)
    assert view.left() == "6:10 left", "the first one does not count"
    short = RunView((), "rollouts", 0, 3)
    aged(short, "train", 1, 60.0)
    assert short.left() == "2:00 left"


def test_validations_to_come_count_in_the_time_left() -> None:
    view = RunView((), "rollouts", 0, 20)
    view.every = 10
    aged(view, "val", 0, 100.0)
    for iteration in range(1, 11):
        aged(view, "train", iteration, 1.0)
    view.begin_stage("val")
    assert view.left() == "3:30 left", "this one and the last one"
    aged(view, "val", 10, 100.0)
    assert view.left() == "1:50 left"
    for iteration in range(11, 21):
        aged(view, "train", iteration, 1.0)
    assert view.left() == ""


def test_a_paused_run_says_who_paused_it_and_its_pause_is_no_time_of_a_step() -> None:
    view = full_view()
    assert view.left()
    view.pause.texts = "paused after step 12 by ann@host", "leyden resume .leyden/first"
    assert view.left() == "" and drawn(view, 100, 8)[1:3][0].startswith(
        "paused after step 12 by ann@host  leyden resume"
    )
    for columns in (20, 40):
        narrow = drawn(view, columns, 8)
        said = "\n".join(narrow)
        assert re.search(r"^paused after step 1.*\n +leyden resume", said, re.MULTILINE), said
        assert all(cell_len(line) <= columns for line in narrow)
    view.pause.texts, view.pause.ended_at = (), time.monotonic() - 10
    aged(view, "train", 13, 1000.0)
    assert view._mean_seconds("train")[1] < 500
    view.ended = True
    assert not any("paused" in line for line in drawn(view, 80, 8))


def test_an_algorithm_that_owns_its_loop_has_rates_and_rewards_of_the_stage_under_way() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream)
    loop = ReportedLoop(started_at=time.monotonic(), callbacks=[bar])
    loop.begin()
    for epoch in range(2):
        for number in range(10):
            bar.tally.add(rollout(number), [], float(epoch), cached=False)
            bar.on_progress(loop, Progress(number + 1, 10, 10.0, {}))
        assert f"reward {epoch} so far  1 rollouts/s  120 tokens/s" in drawn(bar._run, 100, 5)[epoch > 0]
        loop.report({"reward": float(epoch)}, stage="train", iteration=epoch + 1)
    loop.end()
    assert [line.split("  ", 2)[2] for line in stream.getvalue().splitlines()] == ["1 rollouts/s  120 tokens/s"] * 2


def test_a_stage_says_how_long_it_takes_only_when_the_first_rollouts_at_a_time_are_through() -> None:
    view = RunView((), "rollouts", tally=RolloutTally(concurrency=64))
    view.progress(Progress(20, 10_000, 30.0, {}))
    assert view.left() == ""
    view.progress(Progress(500, 10_000, 60.0, {}))
    assert view.left() == "19:00 left"
    view.progress(Progress(3, 4, 60.0, {}))
    assert view.left() == "0:20 left", "most of them are through"


def test_reasons_that_differ_in_numbers_are_one_and_any_number_of_reasons_is_bounded() -> None:
    tally = RolloutTally()
    for number in range(1000, 6000):
        tally.add_failure(f"port {number} is in use")
    assert tally.top_reasons(3) == ["5,000 x port 5999 is in use"]
    words = ["".join(chr(97 + number // 26**place % 26) for place in range(3)) for number in range(5000)]
    for word in words:
        tally.add_failure(f"unknown word {word}")
    assert len(tally._reasons) <= 1001
    assert len(tally._group_of) <= 1000
    assert tally.failed == 10_000 == tally._reasons.total()


def test_tokens_and_cost_of_a_rollout_that_another_run_paid_for_do_not_count() -> None:
    tally = RolloutTally()
    tally.add(rollout(1, cost=0.5), [], 1.0, cached=True)
    assert (tally.tokens, tally.cost, tally.done) == (0, None, 1)
    tally.add(rollout(1, cost=0.5), [], 1.0, cached=False)
    assert (tally.tokens, tally.cost, tally.done) == (120, 0.5, 2)


@pytest.mark.parametrize(
    ("spans", "shown"),
    [
        (said({"content": "first\n\nlast"}), ["  > first", "  > last"]),
        (said({"content": [{"type": "text", "text": "parts"}]}), ["  > parts"]),
        (
            said({"content": None, "tool_calls": [{"function": {"name": "sh", "arguments": '{"a": 1}'}}]}),
            ['  > sh({"a": 1})'],
        ),
        (said({"content": "\x1b]0;title\x07\u202egnp.exe"}), ["  > ]0;title  gnp.exe"]),
        (said({"content": 5}), []),
        (said({"content": [1, "two", None, {"text": 3}], "tool_calls": "junk"}), ["  > 3"]),
        (said({"content": {"a": 1}, "tool_calls": [None, {"function": 7}]}), ["  > ({})"] * 2),
        (said(), []),
        ([], []),
    ],
)
def test_the_last_answer_of_a_rollout_is_shown_without_what_a_terminal_obeys(
    spans: list[Span], shown: list[str]
) -> None:
    view = RunView((), "rollouts")
    view.begin_stage("val")
    task = {"question": "why\n?", "n": [1, 2]}
    view.tally.add(rollout(1, task=task), spans, 0.5, cached=False)
    assert drawn(view, 80, 20)[2:] == ["last rollout  reward 0.5  question: why ?, n: [1, 2]", *shown]


def test_a_rollout_is_not_replaced_before_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    view = RunView((), "rollouts")
    view.begin_stage("val")
    view.tally.add(rollout(1, task="first"), [], 0.5, cached=False)
    assert "first" in drawn(view, 80, 20)[-1]
    view.tally.add(rollout(2, task="second"), [], 0.5, cached=False)
    assert "first" in drawn(view, 80, 20)[-1]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3)
    assert "second" in drawn(view, 80, 20)[-1]


def test_work_for_each_rollout_does_not_grow_and_takes_microseconds() -> None:
    tally, spans = RolloutTally(), said({"content": "x" * 100_000})
    good, bad = rollout(1, task="t" * 10**6), rollout(2, reason="ValueError: no JSON")
    started = time.thread_time()
    for number in range(20_000):
        tally.add(bad if number % 10 == 0 else good, spans, None if number % 10 == 0 else 1.0, cached=False)
    each = (time.thread_time() - started) / 20_000
    assert each < 20e-6, f"{each * 1e6:.1f} microseconds"
    view = RunView((), "rollouts", tally=tally)
    view.begin_stage("val")
    started = time.thread_time()
    for _ in range(50):
        drawn(view, 120, 50)
    assert (time.thread_time() - started) / 50 < 0.02


# ---- terminals -----------------------------------------------------------------------------------

PROGRAM = """
import json, os, signal, sys, time
from leyden.training import ProgressBar, TrainLoop
from tests.training.test_live_view import rollout, said

bar = ProgressBar()
bar.tally.running = lambda: 2

class Vessel:
    def step(self, iteration):
        for done in range(4):
            number = 4 * iteration + done
            bar.tally.unfinished = lambda: 4 - done
            if done == 3:
                bar.tally.add(rollout(number, reason="ValueError: 没有 JSON"), [], None, cached=False)
            else:
                bar.tally.add(rollout(number, task="河内塔 " * 9), said({"content": "four 四"}), 0.5, cached=False)
            loop.progress(done + 1, 4)
            turn(number)
        return {"reward": iteration / 10}

    def validate(self, iteration):
        return {"reward": iteration / 20}

    def save(self, path): ...
    def load(self, path): ...

def turn(number):  # goes on when a line is typed
    if number == 9:
        line = sys.stdin.readline().strip()
        while line == "print":
            print("printed by the program")
            line = sys.stdin.readline().strip()

loop = TrainLoop(max_iters=4, val_every_n_iters=2, callbacks=[bar])
"""
RUN = f"""{PROGRAM}
loop.run(Vessel())
print("the end")
"""
QUIET = "import termios; flags = termios.tcgetattr(0); flags[3] &= ~termios.ECHO; termios.tcsetattr(0, 0, flags)\n"
"""What is typed does not show."""


def is_halfway(shown: list[str]) -> bool:
    return any("train 2/4" in line for line in shown) and any("iteration 2/4" in line for line in shown)


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        (
            40,
            10,
            """
            iteration 2/4  reward 0.1  ▁█
              val/reward 0.1  0:00 left
              train 2/4 rollouts  reward 0.5 so far
                RATES
            queue  1 waiting  2 running  10 done
              MEMORY
            failed 2: 2 x ValueError: 没有 JSON
            last rollout  reward 0.5  河内塔 河内…
              > four 四
            """,
        ),
        (
            80,
            24,
            """
            iteration 2/4  reward 0.1  ▁█  val/reward 0.1  0:00 left
              train 2/4 rollouts  reward 0.5 so far  RATES
            queue  1 waiting  2 running  10 done  MEMORY
            failed 2: 2 x ValueError: 没有 JSON
            last rollout  reward 0.5  河内塔 河内塔 河内塔 河内塔 河内塔 河内塔 河内塔 河…
              > four 四
            """,
        ),
        (
            40,
            5,
            """
            iteration 2/4  reward 0.1  0:00 left
              train 2/4 rollouts  reward 0.5 so far
            queue  1 waiting  2 running  10 done
            failed 2: 2 x ValueError: 没有 JSON
            """,
        ),
    ],
)
def test_the_view_fits_the_terminal(columns: int, rows: int, expected: str) -> None:
    program = Program(QUIET + RUN, columns, rows)
    shown = program.wait_for(
        lambda shown: is_halfway(shown) and (rows < 10 or any("last rollout  reward" in line for line in shown))
    )
    for pattern, name in (
        (r" ━+─+", ""),
        (r"[\d.,]+ rollouts/s(  [\d.,]+ tokens/s)?", "RATES"),
        (r"memory \d+ MB", "MEMORY"),
        (r"\d:\d\d left", "0:00 left"),
    ):
        shown = [re.sub(pattern, name, line) for line in shown]
    assert shown == [line.removeprefix(" " * 12) for line in expected.splitlines()[1:-1]]
    program.type("\n")
    assert program.end() == 0
    assert re.fullmatch(r"iteration 4/4 ━+  reward 0.3(  val/reward 0.2)?", program.emulator.everything[0])
    assert program.emulator.everything[1:] == ["the end"], "nothing else is left of the view"


@pytest.mark.parametrize(
    "cuts", [False, True], ids=["a terminal that breaks lines", "one that cuts them, as xterm does"]
)
def test_a_resize_leaves_no_copies_behind(cuts: bool) -> None:
    program = Program(f"print('before')\n{QUIET}{RUN}", 100, 20, cuts=cuts)
    program.wait_for(is_halfway)
    for n, size in enumerate([(50, 20), (120, 30), (60, 24), (39, 22), (80, 24)], start=1):
        program.resize(*size)
        program.type("print\n")
        printed = ["before", *["printed by the program"] * n]
        program.wait_for(lambda shown, printed=printed: shown[: len(printed)] == printed and is_halfway(shown))
    shown = program.emulator.everything
    assert shown[:7] == ["before", *["printed by the program"] * 5, ""]
    assert sum("iteration" in line for line in shown) == 1
    program.resize(40, 6)  # too low for what stands there: the rest has scrolled away
    program.type("print\n")
    program.wait_for(lambda shown: is_halfway(shown) and shown[-1].startswith("last rollout "))
    with program._lock:
        assert len(program.emulator.screen) == 6
    program.type("\n")
    assert program.end() == 0


@pytest.mark.parametrize(
    ("environment", "is_ascii", "has_colours"),
    [
        ({"PYTHONIOENCODING": "ascii"}, True, True),
        ({"PYTHONIOENCODING": "latin-1"}, True, True),
        ({"NO_COLOR": "1"}, False, False),
        ({}, False, True),
    ],
)
def test_a_terminal_without_such_characters_or_colours_gets_none(
    environment: dict[str, str], is_ascii: bool, has_colours: bool
) -> None:
    program = Program(QUIET + RUN, 70, 24, environment=environment)
    program.wait_for(lambda shown: is_halfway(shown) and any("last rollout  reward" in line for line in shown))
    program.type("\n")
    assert program.end() == 0
    assert program.output.isascii() == is_ascii
    assert all(character in program.output for character in ("=-?~" if is_ascii else "━─█四…"))
    assert ("\x1b[36m" in program.output) == has_colours


def test_a_dumb_terminal_gets_plain_lines() -> None:
    program = Program(QUIET + RUN, 100, 24, environment={"TERM": "dumb"})
    program.wait_for(lambda shown: any("2/4" in line for line in shown))
    program.type("\n")
    assert program.end() == 0
    assert "\x1b" not in program.output
    lines = program.emulator.everything
    assert [line.split()[1] for line in lines[:-1]] == ["1/4", "2/4", "3/4", "4/4"]
    assert "1 failed" in lines[0]


def test_ctrl_c_leaves_the_terminal_clean() -> None:
    program = Program(QUIET + RUN, 80, 24)
    program.wait_for(is_halfway)
    program.type("\x03")
    program.process.send_signal(signal.SIGINT)  # the test's terminal controls no session
    assert program.end() != 0
    shown = program.emulator.everything
    assert shown[0].startswith("iteration 2/4")
    assert shown[1].startswith("Traceback"), shown
    assert shown[-1] == "KeyboardInterrupt"
    assert program.emulator.breaks, "lines are broken again"
    assert "\x1b[?25l" not in program.output, "the cursor is never hidden"


def test_a_run_goes_on_when_its_terminal_is_gone(tmp_path: Path) -> None:
    code = f"""
import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)
{PROGRAM}
turn = lambda number: time.sleep(0.05)
loop.run(Vessel())
open({str(tmp_path / "done")!r}, "w").write(str(loop.current_iter))
"""
    program = Program(code, 80, 24)
    program.wait_for(lambda shown: shown and "iteration" in shown[0])
    program.hang_up()
    program.process.wait(30)
    assert (tmp_path / "done").read_text() == "4"


@pytest.mark.parametrize("descriptors", ["2>&-", "2>/dev/full", "2>&- >&-"])
def test_a_run_does_not_need_an_open_standard_error(tmp_path: Path, descriptors: str) -> None:
    (tmp_path / "run.py").write_text(f"{PROGRAM}\nturn = print\nloop.run(Vessel())\nopen('done', 'w').write('yes')\n")
    subprocess.run(
        f"{sys.executable} run.py {descriptors}",
        shell=True,
        cwd=tmp_path,
        check=False,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (tmp_path / "done").read_text() == "yes"


def test_a_job_without_a_loop_has_the_same_view_and_leaves_nothing_behind() -> None:
    code = f"""{QUIET}
import sys
from leyden.training import ProgressBar
with ProgressBar(unit="tasks").job("checking") as bar:
    bar.report(3, 12)
    bar.tally.add_failure("task-1: no tests")
    sys.stdin.readline()
print("the end")
"""
    program = Program(code, 60, 10)
    shown = program.wait_for(lambda shown: any("failed" in line for line in shown))
    assert re.fullmatch(r"checking 3/12 tasks ━+─+  (0:0\d left  )?[\d.,]+ tasks/s", shown[0]), shown
    assert shown[2:] == ["failed 1: 1 x task-1: no tests"]
    program.type("\n")
    assert program.end() == 0
    assert program.emulator.everything == ["the end"]


def test_what_moves_the_cursor_is_not_passed_on_and_colours_are() -> None:
    code = f"""{QUIET}
import sys
from leyden.training import ProgressBar
with ProgressBar().job("working"):
    sys.stdout.write("\\x1b[2A\\x1b[31mred\\x1b[2K without end\\n10 %\\r20 %\\r100 %\\n")
    sys.stderr.writelines(["half ", "a line"]); sys.stderr.flush()
    sys.stdin.readline()
    sys.stdout.buffer.write(b"bytes\\n"); sys.stdout.buffer.flush()
"""
    program = Program(code, 60, 10)
    shown = program.wait_for(lambda shown: any("half" in line for line in shown))
    assert shown[:3] == ["red without end", "100 %", "half a line"]
    assert shown[3].startswith("working 0:0")
    assert "\x1b[31mred" in program.output
    assert re.search(r"\x1b\[31mred without end\r\n100 %\r\n\x1b\[0m", program.output), "the view has its own colours"
    program.type("\n")
    assert program.end() == 0
    assert "bytes" in program.output


def test_a_view_that_cannot_be_drawn_says_why_and_the_program_goes_on() -> None:
    code = f"""{QUIET}
from leyden.training import ProgressBar
with ProgressBar().job("working") as bar:
    bar._run.unit = None
    bar._run.iteration = "no number"
    print("printed by the program")
print("the end")
"""
    program = Program(code, 100, 40)
    assert program.end() == 0
    assert program.emulator.everything[-1] == "the end"
    assert "printed by the program" in program.emulator.everything
    assert any("the live view cannot be drawn" in line for line in program.emulator.everything)


def test_a_second_view_on_the_terminal_prints_its_lines_above_the_first() -> None:
    code = f"""{QUIET}
import sys
from leyden.training import ProgressBar
with ProgressBar().job("first"):
    with ProgressBar(line_seconds=0.05).job("second"):
        sys.stdin.readline()
    sys.stdin.readline()
"""
    program = Program(code, 60, 10)
    shown = program.wait_for(lambda shown: sum("second" in line for line in shown) >= 2)
    assert shown[-2].startswith("first") or shown[-1].startswith("first")
    program.type("\n\n")
    assert program.end() == 0
    assert not any("first" in line for line in program.emulator.everything)


def test_lines_of_child_processes_stay_above_the_view() -> None:
    code = f"""{QUIET}
import os, subprocess, sys
from leyden.training import ProgressBar
with ProgressBar().job("working") as bar:
    for number in range(5):
        if (child := os.fork()) == 0:
            print("forked", number, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        bar._screen.draw()
        subprocess.run(["echo", "spawned", str(number)])
        bar.report(number, 5)
        bar._screen.draw()
    sys.stdin.readline()
print("the end")
"""
    program = Program(code, 60, 8)
    program.wait_for(lambda shown: "spawned 4" in shown and shown[-2].startswith("working 4/5 rollouts"))
    program.type("\n")
    assert program.end() == 0
    printed = [f"{what} {number}" for number in range(5) for what in ("forked", "spawned")]
    assert program.emulator.everything == [*printed, "the end"]


def test_a_background_job_does_not_draw_on_the_terminal_of_the_shell() -> None:
    code = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
reader, writer = os.pipe()
if (child := os.fork()) != 0:
    sys.stdin.readline()
    os.write(writer, b"end")
    os.waitpid(child, 0)
else:
    os.setpgid(0, 0)
    from leyden.training import ProgressBar
    with ProgressBar(line_seconds=0.05).job("working"):
        os.read(reader, 3)
"""
    program = Program(code, 60, 10)
    program.wait_for(lambda shown: any("working 0:0" in line for line in shown))
    program.type("\n")
    assert program.end() == 0
    assert "\x1b" not in program.output


def test_a_stream_that_is_no_terminal_gets_no_control_characters() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream, line_seconds=0.01)
    with bar.job("checking"):
        bar.tally.add_failure("no tests")
        deadline = time.monotonic() + 20
        while "1 failed" not in stream.getvalue():
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)
    assert stream.getvalue().isascii()
    assert "\x1b" not in stream.getvalue()


def test_the_emulator_does_what_a_terminal_does() -> None:
    screen = Emulator(10, 3)
    screen.feed("one\r\nabcdefghijklm\r\nlast")
    assert (screen.screen, screen.everything) == (["abcdefghij", "klm", "last"], ["one", "abcdefghij", "klm", "last"])
    screen.feed("\x1b[1A\rX\x1b[K\x1b[J")
    assert screen.screen == ["abcdefghij", "X"]
    screen = Emulator(6, 3)
    screen.feed("四五六七\r\n\x1b[?7labcdefgh\x1b[?7h")
    assert screen.screen == ["四五六", "七", "abcdeh"]
    screen.resize(4, 5)
    assert screen.screen == ["四五", "六七", "abcd", "eh"]


def test_a_notebook_has_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, content: dict[str, str], *, raw: bool) -> None:
            shown[-1] = content

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(content)
        return Handle()

    class Shell:
        kernel = None

    shell, ipython, ipython_display = Shell(), ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython, ipython_display.display = lambda: shell, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython_display)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with ProgressBar(line_seconds=0.001).job("on IPython's terminal"):
        pass
    assert shown == []
    shell.kernel = object()  # type: ignore[assignment]
    bar = ProgressBar(("reward",))
    loop = TrainLoop(max_iters=3, callbacks=[bar])

    class Vessel:
        def step(self, iteration: int) -> dict[str, Any]:
            bar.tally.add(rollout(iteration, task="<b> & 四"), said({"content": "</pre>"}), 0.5, cached=False)
            loop.progress(1, 2)
            wanted = f"iteration {iteration}/3"
            deadline = time.monotonic() + 20
            while not (shown[-1]["text/plain"].startswith(wanted) and "rollout" in shown[-1]["text/plain"]):
                assert time.monotonic() < deadline, shown
                threading.Event().wait(0.01)
            assert "&lt;b&gt; &amp; 四" in shown[-1]["text/html"] and "&gt; &lt;/pre&gt;" in shown[-1]["text/html"]
            return {"reward": iteration / 2}

        def validate(self, iteration: int) -> dict[str, Any]:
            return {}

        def save(self, path: Path) -> None: ...
        def load(self, path: Path) -> None: ...

    loop.run(Vessel())
    assert len(shown) == 1
    assert re.fullmatch(r"iteration 3/3 ━+  reward 1", shown[0]["text/plain"])
    with bar.job("checking"):
        assert shown[1]["text/plain"].startswith("checking 0:00")
    assert shown[1]["text/plain"] == ""
