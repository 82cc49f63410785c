"""Decide why an event loop stands still: its thread runs one step (a callback, or a task up to its next `await`),
imports a module, gets no CPU, or waits for Python's lock.

Pure apart from the clocks: `ThreadTimes` reads them, `reason` decides. It knows neither attempts nor stores.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from leyden._lib.frames import is_users_file
from leyden._lib.throttle import Throttle, first_on_this_machine

Reason = Literal["blocked", "importing", "no_cpu", "no_lock"]
"""`no_lock`: other threads of the process hold Python's lock (the GIL)."""

_BLOCKED_SECONDS = 0.4
"""A step that computes or sleeps for this many seconds blocks its event loop."""
_SHORTAGE_SECONDS = 2.0
"""A loop that gets no CPU for this many seconds is worth a warning."""
_WAKES_PER_SECOND = 25
"""A thread that wakes more often, and uses little CPU, waits for Python's lock."""
_SHOWN_FRAMES = 20
"""The number of frames in a logged stack."""
_IMPORTLIB = "<frozen importlib"
"""The beginning of the file name of Python's import machinery."""

reports = Throttle()
"""Limits this process to one line a minute for each kind of stall."""


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Clocks at one moment, in seconds. Only differences between two moments mean anything."""

    wall: float
    cpu: float
    """CPU time that the thread has used."""
    queued: float
    """Time in which the thread was ready to run and had no core; 0.0 if the system does not count it."""
    process: float
    """CPU time that all threads of the process have used."""
    runs: int
    """The number of times that the thread was given a core."""

    @classmethod
    def of(cls, native_id: int) -> ThreadTimes:
        """Read the clocks of a thread of this process, given its `threading.get_native_id()`."""
        process = time.process_time()
        try:
            cpu, queued, runs = Path(f"/proc/self/task/{native_id}/schedstat").read_bytes().split()
        except (OSError, ValueError):  # not Linux, or a kernel without these counts
            return cls(time.monotonic(), process, 0.0, process, 0)
        return cls(time.monotonic(), int(cpu) / 1e9, int(queued) / 1e9, process, int(runs))


@dataclass(frozen=True, slots=True)
class Position:
    """The place in the code at which a thread stands: its frames, the innermost last."""

    frames: Sequence[traceback.FrameSummary]
    imports: str | None
    """The module that is being imported, the outermost one of several; None outside an import."""

    @classmethod
    def of(cls, frames: Sequence[FrameType]) -> Position:
        """Return the position of a thread, given its frames, the innermost last."""
        summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
        importing = (frame for frame in frames if frame.f_code.co_filename.startswith(_IMPORTLIB))
        names = (frame.f_locals.get("name") for frame in importing if frame.f_code.co_name == "_find_and_load")
        return cls(summary, next((str(name) for name in names), None))

    @property
    def stack(self) -> str:
        """The innermost frames, as a traceback shows them."""
        return "".join(traceback.format_list(self.frames[-_SHOWN_FRAMES:]))


def reason(then: ThreadTimes, now: ThreadTimes, *, importing: bool) -> Reason:
    """Return why an event loop is at `now` still in the step in which it was at `then`.

    Time in the queue for a core does not count. A thread that waits for Python's lock uses no CPU, like a sleeping one.
    It differs in two ways: other threads of the process use CPU, and it wakes every 5 ms to request the lock. "no_lock"
    therefore means that this thread used less than half of the time, that the others used at least half, and that it
    woke often.
    """
    if importing:
        return "importing"
    own, cpu = (now.wall - then.wall) - (now.queued - then.queued), now.cpu - then.cpu
    if own < _BLOCKED_SECONDS:
        return "no_cpu"
    others, wakes = (now.process - then.process) - cpu, now.runs - then.runs
    return "no_lock" if cpu < own / 2 <= others and wakes > _WAKES_PER_SECOND * own else "blocked"


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of user code as `file:line in function`, with a path relative to the working directory;
    without user code, the innermost line.
    """
    theirs = (frame for frame in reversed(frames) if is_users_file(frame.filename))
    frame = next(theirs, frames[-1])
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno} in {frame.name}"


def is_worth_a_warning(why: Reason, seconds: float) -> bool:
    """Return whether to warn of a stall that has lasted for `seconds`. Count the warning if so.

    Imports give none, and a shortage of CPU or of the lock only after 2 seconds. Each kind gives at most one a minute,
    a shortage of CPU one a minute for all processes of this machine.
    """
    if why == "importing" or (why != "blocked" and seconds < _SHORTAGE_SECONDS):
        return False
    return reports.admits(why) and (why != "no_cpu" or first_on_this_machine("short-of-cpu", reports.seconds))
