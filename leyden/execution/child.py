"""A runner's process, from the inside: its work and its end.

The process ends when its work is done, when the parent stops it, or when the parent has gone. The parent sends
`RunnerCommand`s and receives `RunnerMessage`s. The forkserver imports this module before any run, so that all runners
share the memory of the modules that it loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from leyden._lib.aio import Latch
from leyden._lib.event_loops import run_on_own_loop
from leyden._lib.frames import current_frames
from leyden._lib.host.child import ChildFailure, Parent
from leyden._lib.host.limits import ResourceLimits
from leyden._lib.host.orphans import RUNNER_MARK, carry_mark, kill_marked
from leyden._lib.logs import setup_child_logging
from leyden.errors import StoreError
from leyden.execution.liveness import Alive, make_responder
from leyden.execution.payload import unpack
from leyden.execution.runner.calls import overdue_seconds
from leyden.execution.runner.runner import torn_down
from leyden.execution.runner.watchdog import LagWatchdog, attempt_in_flight


@dataclass(frozen=True, slots=True)
class Begin:
    """The command to a runner's process to begin its work."""

    at_most: int | None = None
    """How many attempts may be in flight at first, as in `Runner.max_at_first`."""


RunnerCommand = Begin | Literal["stop", "ping"]
"""A command to a runner's process: begin the work, finish it, or reply with `Alive` ("ping")."""


@dataclass(frozen=True, slots=True)
class ChildEnvironment:
    """The environment of a runner's process. The parent sends it, because a forkserver has the variables and log levels
    of the moment when it was started.
    """

    variables: Mapping[str, str]
    log_levels: Mapping[str, int]
    """Levels by the logger's name."""
    left_behind: Sequence[Path] = ()
    """Files, then their folders, that the process removes if the parent was killed and could not."""
    limits: ResourceLimits = field(default_factory=ResourceLimits)


@dataclass(frozen=True, slots=True)
class RunnerFailure(ChildFailure):
    """The error that ends a runner's process."""

    of_the_store: bool = False
    """Whether the store is unreachable or broken, so that another process would fail, too."""
    culprit_may_be_over: bool = False
    """Whether the attempt that is to blame may have ended before the process, because its time was over."""

    @classmethod
    def of(cls, error: BaseException) -> RunnerFailure:
        """Return a description of the error, which the caller is handling."""
        failure = ChildFailure.of(error)
        return cls(failure.headline, failure.traceback, of_the_store=isinstance(error, StoreError))


@dataclass(frozen=True, slots=True)
class Culprit:
    """The attempt whose agent caused the end of the process."""

    attempt_id: str


RunnerMessage = Literal["prepared", "finished"] | RunnerFailure | Culprit | Alive
"""A message of a runner's process to its parent."""

_LOGGERS = ("", "leyden")
"""The loggers whose levels a runner's process takes over from its parent."""
_LAST_SECONDS = 2.0
"""Seconds for agents to leave their `with` blocks after the parent has gone."""
_SETTLE_SECONDS = 1.0
"""Seconds until a parent whose end of the pipe is closed must be seen to have ended."""
_CHECK_SECONDS = 2.0
"""Seconds between two checks of the event loop."""
_BLOCKED_CHECKS = 3
"""Once an agent is overdue at this many checks in a row, the event loop that would cancel it counts as blocked, and the
process is ended. The lag watchdog (`runner/watchdog.py`) has logged the agent long before."""


def run_child(parent: Parent, worker_id: int, packed: bytes, environment: ChildEnvironment) -> None:
    """Run one worker, then end the process without returning. The entry point of a runner's process.

    packed: a `Payload`, packed by `leyden.execution.payload.pack`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # so that processes that agents start can be ended with this one
    link = _ParentLink(parent, environment)
    _report_exits(link)
    code, reserve = 1, bytearray()
    try:
        os.environ.clear()
        os.environ.update(environment.variables)
        carry_mark(environment.variables.get(RUNNER_MARK))
        reserve = environment.limits.apply()
        setup_child_logging()
        set_log_levels(environment.log_levels)
        run_on_own_loop(_work(link, worker_id, packed))
        code = 0
    except asyncio.CancelledError:
        code = 128 + signal.SIGTERM
    except BaseException as error:  # noqa: BLE001 -- the parent reports it
        del reserve  # makes room for the report: a MemoryError's frames keep the full memory alive
        link.send(RunnerFailure.of(error))
    finally:
        link.close()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # a thread that an agent left behind does not hold the process up


def _report_exits(link: _ParentLink) -> None:
    """Replace `os._exit` by a function that first reports the calling attempt to the parent, because the other attempts
    of this process are not to blame.
    """
    leave, pid = os._exit, os.getpid()

    def report_and_leave(status: int) -> NoReturn:
        attempt = attempt_in_flight()
        if attempt is not None and os.getpid() == pid:  # a fork of the agent ends only itself
            link.send(Culprit(attempt.rollout.attempt.attempt_id))
        leave(status)

    os._exit = report_and_leave


async def _work(link: _ParentLink, worker_id: int, packed: bytes) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    link.listen(lambda: loop.call_soon_threadsafe(task.cancel))
    await work(link, worker_id, packed)


class Link(Protocol):
    """The connection of a worker to its strategy."""

    begin: Latch
    stop: Latch
    at_most: int | None
    """How many attempts may be in flight at first (`Runner.max_at_first`); None: the runner's `concurrency`."""

    def send(self, message: RunnerMessage) -> None:
        """Send a message to the strategy."""
        ...


async def work(link: Link, worker_id: int, packed: bytes) -> None:
    """Unpack a worker (a `Payload`), and run it from `link.begin` until `link.stop`.

    Sends "prepared" when the worker can begin, and "finished" when its work is done.
    """
    payload = unpack(packed)
    payload.bundle.init()
    with torn_down(payload.bundle.teardown):
        async with payload.store as store:
            link.send("prepared")
            await link.begin.wait_async()
            if not link.stop.is_set():
                await payload.bundle(store, worker_id, link.stop, at_most=link.at_most)
    link.send("finished")


def log_levels() -> dict[str, int]:
    """Return this process's log levels by the logger's name, for `set_log_levels` in its runners' processes."""
    return {name: logging.getLogger(name).getEffectiveLevel() for name in _LOGGERS}


def set_log_levels(levels: Mapping[str, int]) -> None:
    """Set the log levels that the parent process has, by the logger's name."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class _ParentLink:
    """The child's end of the pipe to its parent. Implements `Link`. When the parent has gone, it ends this process and
    the processes that agents started in it.
    """

    def __init__(self, parent: Parent, environment: ChildEnvironment) -> None:
        self.begin = Latch()
        self.stop = Latch()
        self.at_most: int | None = None
        self._parent = parent
        self._left_behind = environment.left_behind
        self._mark = environment.variables.get(RUNNER_MARK)
        self._ended = threading.Event()
        self._orphaned = False
        """Whether the parent has gone."""
        self._unreadable = False
        """Whether reading the pipe failed. If the parent has gone, reading meets the pipe's end instead."""
        self._blocked_checks = 0
        """How many checks in a row found an overdue agent."""

    def send(self, message: RunnerMessage) -> None:
        self._parent.send(message)  # safe in any thread

    def listen(self, cancel: Callable[[], Any]) -> None:
        """Follow the parent's commands in a thread. `cancel` is called when the parent has gone."""
        thread = threading.Thread(target=self._listen, args=(cancel,), name="leyden-parent", daemon=True)
        vars(thread)["pydev_do_not_trace"] = True  # debuggers of IDEs do not stop a thread with this attribute
        thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._orphaned:
            self._end_family()

    def _listen(self, cancel: Callable[[], Any]) -> None:
        """Obey the parent's commands until its pipe ends, then end this process and those that agents started.

        cancel: cancels the runner's work, in its own loop. Runs in a thread, because an agent may block the event loop.
        """
        respond = make_responder()
        if (alive := respond()) is not None:
            self.send(alive)
        while (command := self._next_command()) is not None:
            if command == "ping":
                if (alive := respond()) is not None:
                    self.send(alive)
                continue
            if isinstance(command, Begin):
                self.at_most = command.at_most
            else:
                self.stop.set()
            self.begin.set()
        parent_has_ended = self._parent.has_ended(_SETTLE_SECONDS)
        if self._unreadable and not parent_has_ended:
            return  # an agent has closed the descriptors of this process, so its event loop ends it
        self._orphaned = True
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            cancel()
        for path in self._left_behind if parent_has_ended else ():
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        self._ended.wait(_LAST_SECONDS)
        self._end_family()

    def _next_command(self) -> RunnerCommand | None:
        """Wait for a command and return it; None if the parent has gone, or the pipe cannot be read. Ends this process
        if its event loop is blocked meanwhile.
        """
        while True:
            try:
                return self._parent.receive(_CHECK_SECONDS)
            except TimeoutError:
                self._check_loop()
            except EOFError:
                return None
            except OSError:
                self._unreadable = True
                return None

    def _check_loop(self) -> None:
        """If an agent blocks the event loop, report it, interrupt the other attempts, and kill the process group."""
        self._blocked_checks = self._blocked_checks + 1 if overdue_seconds() > _CHECK_SECONDS else 0
        if self._blocked_checks == _BLOCKED_CHECKS:
            stack = traceback.extract_stack(current_frames()[threading.main_thread().ident or 0])
            last = stack[-1]
            at = f"{last.filename}:{last.lineno} in {last.name}: {last.line}"
            headline = f"an agent blocks the event loop beyond an agent's time, at {at}"
            LagWatchdog.interrupt_siblings(headline)
            shown = "".join([*traceback.format_list(stack), headline])
            self.send(RunnerFailure(headline, shown, culprit_may_be_over=True))
            os.killpg(0, signal.SIGKILL)

    def _end_family(self) -> None:
        if self._mark is not None:
            kill_marked(RUNNER_MARK, self._mark)
        os.killpg(0, signal.SIGKILL)
