"""Notice a process that holds Python's lock (the GIL) for ever and cannot report it itself.

The parent pings the child, and a thread of the child replies, which takes the lock. Silence counts only while that
thread could have run: not while it is stopped (a debugger, SIGSTOP), and not while any thread of the child waits for a
CPU, because that thread may hold the lock. Linux reports both (`/proc/<pid>/task/<tid>`); on other systems there is no
probe. This module knows neither runners nor agents.
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

_SUPPORTED: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
_MOST_SECONDS_BETWEEN_PINGS = 5.0
_PINGS_IN_PATIENCE = 4
"""The least number of pings while the child may keep the lock."""
_STACKS_SECONDS = 0.5
"""Seconds that the child's signal handler may take to write the stacks."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_IDLE_FILES = ("selectors.py", "threading.py", "connection.py", "queue.py", "socket.py", "thread.py")
"""Modules of the standard library in which a thread waits and does not hold the lock."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The child's reply to a ping, with the thread and the file by which the parent examines a silent child."""

    thread_id: int
    """The kernel's id of the thread that replies."""
    stacks: int
    """The number, in the child, of the file descriptor to which its signal handler writes the stacks of its threads."""


def stacks_signal() -> int:
    """Return the signal on which a child writes its threads' stacks, even while the lock is held."""
    return signal.SIGRTMAX - 3


def make_responder() -> Callable[[], Alive | None]:
    """Prepare this process (a child) for its parent's probe, and return the function that makes its replies. The
    function returns None on a system without probes.

    Installs the signal handler that writes the stacks of all threads.
    """
    if not _SUPPORTED:
        return lambda: None
    stacks = os.memfd_create("leyden-stacks")
    faulthandler.register(stacks_signal(), stacks, all_threads=True)
    return lambda: Alive(threading.get_native_id(), stacks)


class LivenessProbe:
    """Pings a child from the running event loop, and reports a child that keeps Python's lock.

    It begins with the child's first reply, and ends with `close` or with the report.
    """

    def __init__(
        self,
        pid: int,
        patience_seconds: float,
        *,
        ping: Callable[[], None],
        receive: Callable[[], None],
        on_silence: Callable[[str, str], None],
    ) -> None:
        """pid: the child's process id.
        patience_seconds: how long the child may keep the lock.
        ping: sends a ping.
        receive: reads the child's pending messages; it calls `take_reply` for a reply.
        on_silence: called once, with a sentence that describes the silence, and the stacks of the child's threads (""
            if there are none).
        """
        self._loop, self._pid, self._patience_seconds = asyncio.get_running_loop(), pid, patience_seconds
        self._ping, self._receive, self._on_silence = ping, receive, on_silence
        self._interval = min(_MOST_SECONDS_BETWEEN_PINGS, patience_seconds / _PINGS_IN_PATIENCE)
        self._alive: Alive | None = None
        self._replied, self._silent_seconds = True, 0.0
        self._before = _Moment(0.0, {})
        self._timer: asyncio.TimerHandle | None = None

    def take_reply(self, alive: Alive) -> None:
        """Record a reply of the child. The first one names the thread that replies."""
        if self._timer is None and self._alive is None:
            self._timer = self._loop.call_later(self._interval, self._check)
        self._alive, self._replied = alive, True

    def close(self) -> None:
        """Stop pinging."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Ping the process, and add up the time in which it could have replied and did not. Past the limit, request its
        stacks.

        Time in which the process was stopped, or waited for a core, does not count. Nor does time in which this loop
        itself was late: one interval counts twice at most.
        """
        self._receive()  # this loop may have been busy, and the reply may have arrived
        assert self._alive is not None
        now = _moment(self._pid, self._alive.thread_id)
        if self._replied:
            self._replied, self._silent_seconds = False, 0.0
            self._ping()
        elif now is not None:
            could_run = min(now.time - self._before.time, 2 * self._interval) - now.longest_wait_since(self._before)
            self._silent_seconds += 0.0 if now.is_stopped or self._before.is_stopped else max(0.0, could_run)
        self._before = now or self._before
        if self._silent_seconds < self._patience_seconds:
            self._timer = self._loop.call_later(self._interval, self._check)
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pid, stacks_signal())
            self._timer = self._loop.call_later(_STACKS_SECONDS, self._report)

    def _report(self) -> None:
        """Report the silence with the stacks that the process wrote, unless it has now replied."""
        assert self._alive is not None
        self._receive()
        if self._replied:  # the signal interrupted a system call that held the lock
            self._timer = self._loop.call_later(self._interval, self._check)
            return
        try:
            stacks = Path(f"/proc/{self._pid}/fd/{self._alive.stacks}").read_text(errors="replace")
        except OSError:  # an agent has closed the descriptor, or the process is gone
            stacks = ""
        where = f"; it is at {places}" if (places := _busy_places(stacks)) else ""
        self._on_silence(
            f"an agent has held Python's lock (the GIL) for {self._silent_seconds:.0f} s, and nothing else could run{where}",
            stacks,
        )


class _Thread(NamedTuple):
    """The state of a thread at one time."""

    state: str
    """The kernel's letter for the thread's state, such as `R` for running."""
    ran: float
    """Seconds for which the thread has had a CPU so far."""
    waited: float
    """Seconds for which the thread has waited for a CPU so far. A wait counts once it is over."""


class _Moment(NamedTuple):
    """The state of a process at one time."""

    time: float
    """Monotonic clock, seconds."""
    threads: Mapping[str, _Thread]
    """The threads by the kernel's id."""
    replying: str = ""
    """The id of the thread that replies to pings."""

    @property
    def is_stopped(self) -> bool:
        """Whether the replying thread is stopped, traced or waits for a disk, so that its silence means nothing."""
        replying = self.threads.get(self.replying)
        return replying is not None and replying.state not in ("S", "R")

    def longest_wait_since(self, before: _Moment) -> float:
        """Return the most seconds since `before` that any one thread waited for a CPU.

        That thread may hold the lock, so that the silence is a shortage of CPU and no agent's fault.
        """
        return max(
            (_wait(before.threads.get(number), now, self.time - before.time) for number, now in self.threads.items()),
            default=0.0,
        )


def _wait(before: _Thread | None, now: _Thread, seconds: float) -> float:
    """Return how many of the last `seconds` a thread spent waiting for a CPU."""
    if before is None:
        return now.waited
    if before.state == now.state == "R":  # it wanted to run all the time, and the kernel counts a wait at its end
        return seconds - (now.ran - before.ran)
    return now.waited - before.waited


def _moment(pid: int, thread_id: int) -> _Moment | None:
    """Return the state of a process now; None if the replying thread is gone."""
    threads: dict[str, _Thread] = {}
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                ran, waited = (int(nanoseconds) / 1e9 for nanoseconds in (folder / "schedstat").read_text().split()[:2])
                threads[folder.name] = _Thread(state, ran, waited)
    except (OSError, IndexError, ValueError):
        return None
    return _Moment(time.monotonic(), threads, str(thread_id)) if str(thread_id) in threads else None


def _busy_places(stacks: str) -> str:
    """Return the innermost frames of the threads that do not wait in the standard library, as text; "" if there are
    none.
    """
    innermost = [_FRAME.search(stack) for stack in stacks.split("\n\n")]
    return "; ".join(
        f"{frame['file']}:{frame['line']} in {frame['name']}"
        for frame in innermost
        if frame is not None and Path(frame["file"]).name not in _IDLE_FILES
    )
