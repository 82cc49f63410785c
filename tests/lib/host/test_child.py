"""Child processes of both kinds: messages, last words, ends, and no survivor of a parent that was killed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from leyden._lib.host.child import (
    GUARD_MISSING,
    Backoff,
    Child,
    ChildFailure,
    Command,
    StartMethod,
    describe_exit,
    known_start_method,
)
from leyden.errors import ChildDied, ConfigError
from tests.lib.host.children import echo, end_when_orphaned, exit_with, ignore_everything, say_and_die

ROOT = Path(__file__).parents[3]
METHODS: list[StartMethod] = ["spawn", "fork", "forkserver"]


def gone(pid: int, within_seconds: float = 10.0) -> bool:
    try:
        psutil.Process(pid).wait(within_seconds)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_messages_go_both_ways_and_a_child_ends_when_its_parent_hangs_up(method: StartMethod) -> None:
    child = Child(echo, name="echo", start_method=method)
    child.send({"a": [1, 2]})
    assert child.receive(20) == {"a": [1, 2]}
    assert child.exit_code() is None
    assert child.close(grace_seconds=10) == 0
    assert child.close() == 0
    child.send("to nobody")
    child.kill()


def test_a_message_that_does_not_come_in_time_and_an_end_are_told_apart() -> None:
    child = Child(echo, name="echo", start_method="fork")
    with pytest.raises(TimeoutError):
        child.receive(0.05)
    child.kill()
    with pytest.raises(EOFError):
        child.receive(10)
    assert child.describe_end(10, remedy="") == "was killed by SIGKILL"
    child.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (None, "has not ended"),
    ],
)
def test_an_exit_is_described_as_a_verb_phrase(code: int | None, said: str) -> None:
    assert describe_exit(code) == said


def test_a_missing_guard_names_the_remedy() -> None:
    child = Child(exit_with, (GUARD_MISSING,), name="child", start_method="fork")
    with pytest.raises(ConfigError, match=r"__name__ == '__main__'.*or choose threads"):
        child.describe_end(10, remedy="choose threads")
    child.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_last_words_are_delivered_before_the_end(number: signal.Signals) -> None:
    heard: list[ChildFailure] = []
    child = Child(say_and_die, (number,), name="child", start_method="fork")
    assert await asyncio.wait_for(child.attend(heard.append), 20) == -number
    assert [failure.headline for failure in heard] == ["ValueError: no fuel"]
    assert "Traceback" in heard[0].traceback


async def test_a_child_that_ignores_its_parent_is_killed_after_the_grace_period() -> None:
    up = asyncio.Event()
    child = Child(ignore_everything, name="deaf", start_method="fork")
    ended = child.attend(lambda _: up.set())
    await asyncio.wait_for(up.wait(), 20)
    child.terminate()
    assert not (await asyncio.wait({ended}, timeout=0.2))[0], "SIGTERM is left to the parent"
    began = time.monotonic()
    assert await child.stop(grace_seconds=0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - began < 10


def test_a_forked_child_holds_no_pipe_of_its_siblings() -> None:
    first = Child(echo, name="first", start_method="fork")
    second = Child(ignore_everything, name="second", start_method="fork")
    second.receive(20)
    assert first.close(grace_seconds=10) == 0, "the second child would keep the first one's pipe open"
    assert second.close() == -signal.SIGKILL


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("method", METHODS)
def test_no_child_outlives_a_parent_that_is_killed(method: StartMethod) -> None:
    """Even though another process has inherited the parent's ends of the pipes."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.lib.host.children", method], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    heir = int(program.stdout.readline())
    program.kill()
    program.wait()
    try:
        assert [pid for pid in pids if not gone(pid)] == []
        assert len(pids) == 2
    finally:
        os.kill(heir, signal.SIGKILL)
        program.stdout.close()


@pytest.mark.faults
@pytest.mark.merge
def test_a_guarded_program_and_its_children_end_with_a_parent_that_is_killed() -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.lib.host.children", "program"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    program.kill()
    program.wait()
    program.stdout.close()
    assert [pid for pid in pids if not gone(pid, 20)] == []
    assert len(pids) == 2


def test_a_child_that_is_still_starting_ends_with_its_parent() -> None:
    parent = os.fork()
    if parent == 0:
        child = Child(end_when_orphaned, name="starting", start_method="spawn")
        Path(f"/proc/{os.getpid()}/comm").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGSTOP)
    while psutil.Process(parent).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    child_pid = int(Path(f"/proc/{parent}/comm").read_text())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert gone(child_pid, 20)


def test_pauses_double_while_children_die_at_once_and_begin_again_after_one_that_worked() -> None:
    backoff = Backoff(first_seconds=0.1, max_seconds=0.5, quick_seconds=1.0)
    assert [round(backoff.pause_after(0.0), 3) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert backoff.quick_deaths == 5
    assert backoff.pause_after(0.0, excused=True) == 0.5
    assert backoff.quick_deaths == 5
    assert backoff.pause_after(2.0) == 0.1
    assert backoff.quick_deaths == 0


def test_an_unknown_start_method_names_the_possible_ones() -> None:
    with pytest.raises(ConfigError, match=r"start_method is 'swamp'; possible here: 'forkserver', 'spawn', 'fork'"):
        known_start_method("swamp")  # type: ignore[arg-type]


# ---- programs --------------------------------------------------------------------------------------------------------


def command(script: str, **options: object) -> tuple[Command, list[str]]:
    lines: list[str] = []
    started = Command([sys.executable, "-c", script], name="test program", relay=lines.append, **options)  # type: ignore[arg-type]
    return started, lines


def test_a_program_reads_and_writes_lines_and_ends_with_its_input() -> None:
    program, lines = command(
        "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\nprint('bye', file=sys.stderr)"
    )
    program.write_line("hello")
    assert program.read_line() == "HELLO\n"
    assert program.close(grace_seconds=10) == 0
    assert lines == ["bye"]
    assert program.close(grace_seconds=0) == 0


def test_a_program_that_dies_is_reported_with_its_last_lines() -> None:
    deaths: list[str] = []
    died = threading.Event()

    def on_death(obituary: str) -> None:
        deaths.append(obituary)
        died.set()

    program, _ = command(
        "import sys\nfor n in range(50): print('line', n, file=sys.stderr)\nsys.exit(3)", on_death=on_death
    )
    with pytest.raises(
        ChildDied, match=r"the test program \(pid \d+\) ended with exit code 3; the last lines"
    ) as caught:
        program.read_line()
    assert "line 49" in str(caught.value)
    assert "line 20" in str(caught.value)
    assert "line 19\n" not in str(caught.value)
    assert died.wait(10)
    assert deaths == [str(caught.value)]
    with pytest.raises(ChildDied, match="exit code 3"):
        program.write_line("x" * 100_000)
    program.close(grace_seconds=0)


def test_a_program_that_does_not_end_is_killed_with_its_children() -> None:
    program, _ = command(
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)"
    )
    grandchild = int(program.read_line())
    assert program.close(grace_seconds=0.2) == -signal.SIGKILL
    assert gone(grandchild)


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_program_is_ready_when_its_url_answers() -> None:
    program, _ = command("import time; time.sleep(600)")
    with HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program.wait_for_url(f"http://127.0.0.1:{server.server_port}/health", timeout_seconds=10)
        server.shutdown()
    program.close(grace_seconds=0)


def test_a_program_that_is_not_ready_in_time_or_dies_before_is_an_error_with_its_last_lines() -> None:
    slow, _ = command("import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(600)")
    with pytest.raises(ChildDied, match=r"does not serve http://127.0.0.1:9/ after 0.6 s; the last lines.*\nloading"):
        slow.wait_for_url("http://127.0.0.1:9/", timeout_seconds=0.6)
    slow.close(grace_seconds=0)
    dead, _ = command("raise SystemExit('no model')")
    with pytest.raises(ChildDied, match=r"ended with exit code 1; the last lines of its standard error:\nno model"):
        dead.wait_for_url("http://127.0.0.1:9/", timeout_seconds=20)
    dead.close(grace_seconds=0)


def test_a_guarded_program_keeps_its_exit_code_and_its_output() -> None:
    program, lines = command("print('out', flush=True); raise SystemExit(5)", guard=True)
    assert "ended with exit code 5" in program.obituary()
    assert lines == ["out"]
    program.close(grace_seconds=0)


async def test_a_suspended_child_is_killed_after_the_grace_period() -> None:
    child = Child(echo, name="echo", start_method="fork")
    child.send(1)
    assert child.receive(20) == 1
    psutil.Process(child.pid).suspend()
    assert child.close(grace_seconds=0.1) == -signal.SIGKILL


def test_a_process_that_left_the_group_of_a_program_does_not_hold_up_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden._lib.host.child._OBITUARY_SECONDS", 0.2)
    started = "import subprocess as s; print(s.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    program, _ = command(f"{started}; input()")
    pid = int(program.read_line())
    began = time.monotonic()
    program.close(5)
    assert time.monotonic() - began < 20
    os.kill(pid, signal.SIGKILL)
