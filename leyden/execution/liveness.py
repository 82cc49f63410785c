"""Detect a child process that never releases Python's lock (the GIL), and so cannot report it itself.

The parent pings the child, and a thread of the child replies, which takes the lock. While no reply comes, the parent
counts the time in which the lock's holder could have gone on: all of it while every thread of the child sleeps, and
else the CPU time that the child gets. A child that is stopped (a debugger, SIGSTOP) or short of CPU therefore is not
silent. Linux reports both (`/proc/<pid>`); on other systems there is no probe. This module knows neither runners nor
agents.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SUPPORTED: Final = sys.platform == "linux" and hasattr(os, "memfd_create")
_MAX_SECONDS_BETWEEN_PINGS = 5.0
_PINGS_IN_PATIENCE = 4
"""The least number of pings while the child may keep the lock."""
_STACKS_SECONDS = 0.5
"""Seconds that the child's signal handler may take to write the stacks."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_IDLE_FILES = ("selectors.py", "threading.py", "connection.py", "queue.py", "socket.py", "thread.py")
"""Modules of the standard library in which a thread waits and does not hold the lock."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The child's reply to a ping."""

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
    alive = Alive(os.memfd_create("leyden-stacks"))
    faulthandler.register(stacks_signal(), alive.stacks, all_threads=True)
    return lambda: alive


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
        """patience_seconds: how long the child may keep the lock.
        ping: sends a ping.
        receive: reads the child's pending messages; it calls `take_reply` for a reply.
        on_silence: called once, with a sentence that describes the silence, and the stacks of the child's threads (""
            if there are none).
        """
        self._loop, self._pid, self._patience_seconds = asyncio.get_running_loop(), pid, patience_seconds
        self._ping, self._receive, self._on_silence = ping, receive, on_silence
        self._interval = min(_MAX_SECONDS_BETWEEN_PINGS, patience_seconds / _PINGS_IN_PATIENCE)
        self._alive: Alive | None = None
        self._replied, self._silent_seconds = True, 0.0
        self._before = 0.0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take_reply(self, alive: Alive) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval, self._check)
        self._alive, self._replied = alive, True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Ping the process, and add up the time in which it could have replied and did not. Past the limit, request its
        stacks. Time in which this loop itself was late does not count: one interval counts twice at most.
        """
        self._receive()  # this loop may have been busy, and the reply may have arrived
        (seconds, cpu), sleeps = self._before, _sleeps(self._pid)
        self._before = time.monotonic(), _cpu_seconds(self._pid)
        if self._replied:
            self._replied, self._silent_seconds = False, 0.0
            self._ping()
        else:
            passed = min(self._before[0] - seconds, 2 * self._interval)
            self._silent_seconds += passed if sleeps else min(self._before[1] - cpu, passed)
        if self._silent_seconds < self._patience_seconds:
            self._timer = self._loop.call_later(self._interval, self._check)
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pid, stacks_signal())
            self._timer = self._loop.call_later(_STACKS_SECONDS, self._report)

    def _report(self) -> None:
        """Report the silence with the stacks that the process wrote, unless it has now replied."""
        self._receive()
        if self._replied:  # the signal interrupted a system call that held the lock
            self._timer = self._loop.call_later(self._interval, self._check)
            return
        stacks = ""
        if self._alive is not None:
            with suppress(OSError):  # an agent has closed the descriptor, or the process is gone
                stacks = Path(f"/proc/{self._pid}/fd/{self._alive.stacks}").read_text(errors="replace")
        innermost = (_FRAME.search(stack) for stack in stacks.split("\n\n"))
        busy = [frame for frame in innermost if frame is not None and Path(frame["file"]).name not in _IDLE_FILES]
        where = "; ".join(f"{frame['file']}:{frame['line']} in {frame['name']}" for frame in busy)
        self._on_silence(
            f"an agent has held Python's lock (the GIL) for {self._silent_seconds:.0f} s, and nothing else could run"
            + (f"; it is at {where}" if where else ""),
            stacks,
        )


def _sleeps(pid: int) -> bool:
    """Return whether every thread of a process sleeps, so that none of them wants a CPU or is stopped."""
    states = list[str]()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return set(states) == {"S"}


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0
