"""Notice a process that holds Python's lock (the GIL) for ever: no thread of it runs, so it cannot say anything itself.

The parent asks now and then, and a thread of the child answers, which takes the lock. Time without an answer counts only as far as
that thread could have run: not while it is stopped (a debugger, SIGSTOP), and not while a thread of the child, which may hold the
lock, waits for a CPU. Linux tells both (`/proc/<pid>/task/<tid>`); on other systems nothing is noticed. This module knows neither
runners nor agents.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_NOTICED: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
_MOST_SECONDS_BETWEEN_QUESTIONS = 5.0
_QUESTIONS_IN_PATIENCE = 4
_STACKS_SECONDS = 0.5
"""How long the child's signal handler may take to write the stacks."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_IDLE_FILES = ("selectors.py", "threading.py", "connection.py", "queue.py", "socket.py", "thread.py")
"""Modules of the standard library in which a thread waits and does not hold the lock."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The child's answer, and what the parent needs to look at a child that does not answer."""

    thread_id: int
    """The kernel's id of the thread that answers."""
    stacks: int
    """The child's descriptor of the file to which its signal handler writes the stacks of its threads."""


def stacks_signal() -> int:
    """The signal that makes a child write the stacks of its threads, whatever holds the lock."""
    return signal.SIGRTMAX - 3


def prepare_answers() -> Callable[[], Alive | None]:
    """In the child: return what its answering thread calls for an answer; None where silence is not noticed."""
    if not _NOTICED:
        return lambda: None
    stacks = os.memfd_create("leyden-stacks")
    faulthandler.register(stacks_signal(), stacks, all_threads=True)
    return lambda: Alive(threading.get_native_id(), stacks)


class SignsOfLife:
    """Asks a child whether it is alive, on the running event loop."""

    def __init__(
        self,
        pid: int,
        patience_seconds: float,
        *,
        ask: Callable[[], None],
        hear: Callable[[], None],
        on_silence: Callable[[str, str], None],
    ) -> None:
        """
        patience_seconds: how long the child may keep the lock.
        ask: sends the question. hear: takes in what the child has sent meanwhile.
        on_silence: called once, with a sentence that says what happened and the stacks of the child's threads.
        """
        self._loop, self._pid, self._patience_seconds = asyncio.get_running_loop(), pid, patience_seconds
        self._ask, self._hear, self._on_silence = ask, hear, on_silence
        self._interval = min(_MOST_SECONDS_BETWEEN_QUESTIONS, patience_seconds / _QUESTIONS_IN_PATIENCE)
        self._alive: Alive | None = None
        self._answered, self._silent_seconds = True, 0.0
        self._before = _Moment(0.0, {})
        self._timer: asyncio.TimerHandle | None = None

    def answer(self, alive: Alive) -> None:
        """The child has answered, or said for the first time who will."""
        if self._timer is None and self._alive is None:
            self._timer = self._loop.call_later(self._interval, self._look)
        self._alive, self._answered = alive, True

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._hear()  # this loop may have been busy, and the answer may lie there
        assert self._alive is not None
        now = _moment(self._pid, self._alive.thread_id)
        if self._answered:
            self._answered, self._silent_seconds = False, 0.0
            self._ask()
        elif now is not None:
            could_run = min(now.time - self._before.time, 2 * self._interval) - now.longest_wait_since(self._before)
            self._silent_seconds += 0.0 if now.is_stopped or self._before.is_stopped else max(0.0, could_run)
        self._before = now or self._before
        if self._silent_seconds < self._patience_seconds:
            self._timer = self._loop.call_later(self._interval, self._look)
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pid, stacks_signal())
            self._timer = self._loop.call_later(_STACKS_SECONDS, self._report)

    def _report(self) -> None:
        assert self._alive is not None
        self._hear()
        if self._answered:  # the signal has ended a wait in the kernel
            self._timer = self._loop.call_later(self._interval, self._look)
            return
        try:
            stacks = Path(f"/proc/{self._pid}/fd/{self._alive.stacks}").read_text(errors="replace")
        except OSError:  # the agent has closed it
            stacks = ""
        where = f"; it is at {places}" if (places := _busy_places(stacks)) else ""
        self._on_silence(
            f"an agent has held Python's lock (the GIL) for {self._silent_seconds:.0f} s, and nothing else could run{where}",
            stacks,
        )


class _Thread(NamedTuple):
    """A thread at one time."""

    state: str
    """The kernel's letter."""
    ran: float
    """Seconds for which it has had a CPU so far."""
    waited: float
    """Seconds for which it has waited for a CPU so far; a wait counts once it is over."""


class _Moment(NamedTuple):
    """A process at one time."""

    time: float
    """Monotonic."""
    threads: Mapping[str, _Thread]
    """By number."""
    answering: str = ""
    """The number of the thread that answers."""

    @property
    def is_stopped(self) -> bool:
        """Whether the answering thread is stopped, traced, or waits for a disk: then its silence says nothing."""
        answering = self.threads.get(self.answering)
        return answering is not None and answering.state not in ("S", "R")

    def longest_wait_since(self, before: _Moment) -> float:
        """Return the seconds since `before` in which one thread waited for a CPU; of several threads, the longest.

        The thread that waits may hold the lock, and then the answering thread sleeps without being to blame.
        """
        return max(
            (_wait(before.threads.get(number), now, self.time - before.time) for number, now in self.threads.items()),
            default=0.0,
        )


def _wait(before: _Thread | None, now: _Thread, seconds: float) -> float:
    """Return for how many of the last `seconds` a thread waited for a CPU."""
    if before is None:
        return now.waited
    if before.state == now.state == "R":  # it wanted to run all the time; its present wait is not counted yet
        return seconds - (now.ran - before.ran)
    return now.waited - before.waited


def _moment(pid: int, thread_id: int) -> _Moment | None:
    """Return the threads of a process; None when the one that answers is gone."""
    threads: dict[str, _Thread] = {}
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                ran, waited = (int(figure) / 1e9 for figure in (folder / "schedstat").read_text().split()[:2])
                threads[folder.name] = _Thread(state, ran, waited)
    except (OSError, IndexError, ValueError):
        return None
    return _Moment(time.monotonic(), threads, str(thread_id)) if str(thread_id) in threads else None


def _busy_places(stacks: str) -> str:
    """Where those threads are that do not wait in the standard library, innermost frames only."""
    innermost = [_FRAME.search(stack) for stack in stacks.split("\n\n")]
    return "; ".join(
        f"{frame['file']}:{frame['line']} in {frame['name']}"
        for frame in innermost
        if frame is not None and Path(frame["file"]).name not in _IDLE_FILES
    )
