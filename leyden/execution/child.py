"""What runs in a runner's process, and how it ends: when its work is done, when its parent says so, or when its parent has gone.

The parent sends `Order`s over a pipe and hears `Word`s. Ctrl-C is the parent's to handle. A light module: the forkserver imports it before
any run, and each child shares what it loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from leyden.errors import StoreError
from leyden.execution.signs_of_life import Alive, prepare_answers
from leyden.execution.travel import unpack
from leyden.host.orphans import RUNNER_MARK, carry_mark, kill_marked
from leyden.runner.calls import overdue_seconds
from leyden.runner.watchdog import LagWatchdog, attempt_in_flight
from leyden.utils.latch import Latch
from leyden.utils.logs import setup_child_logging
from leyden.utils.own_loop import run_on_own_loop


@dataclass(frozen=True, slots=True)
class Begin:
    """The command to begin."""

    at_most: int | None = None
    """How many attempts may be in flight at first, as in `Runner.most_at_first`."""


Order = Begin | Literal["stop", "ask"]
"""A command to the child. It replies to `ask` with `Alive`."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a child finds around it: a forkserver has the environment and the log levels of the moment when it was started."""

    environment: Mapping[str, str]
    log_levels: Mapping[str, int]
    """By logger's name."""
    left_behind: Sequence[Path] = ()
    """What is removed when the parent was killed: files, then the folders that they were in."""
    cpus: Sequence[int] | None = None
    """None: any."""
    memory_bytes: int | None = None
    """None: no limit."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a child ends, in its own words."""

    headline: str
    """In one line."""
    traceback: str
    of_the_store: bool
    """The store cannot be reached or cannot do its work: another process would fare no better."""
    culprit_may_be_over: bool = False
    """The attempt that is to blame may have ended before the process, because its time was over."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What an error says that is being handled."""
        headline = traceback.format_exception_only(error)[-1].strip()
        return cls(headline, traceback.format_exc(), of_the_store=isinstance(error, StoreError))


@dataclass(frozen=True, slots=True)
class Culprit:
    """The attempt whose agent ends the child."""

    attempt_id: str


Word = Literal["prepared", "finished"] | Failure | Culprit | Alive

_LOGGERS = ("", "leyden")
_LAST_SECONDS = 2.0
"""How long agents may take to leave their `with` blocks when the parent has gone."""
_RESERVE_BYTES = 16 * 2**20
"""What a child with a limit keeps free of it, to say why it ends. Not resident: nothing is written there."""
_LOOK_SECONDS = 2.0
_BLOCKED_LOOKS = 3
"""The time of an agent was over for at least a look, so often in a row: the event loop, which would have cancelled it, is blocked.
The lag watchdog (`runner/watchdog.py`) has said by whom, long before."""


def run_child(
    connection: Connection[Word, Order],
    parent: int,
    worker_id: int,
    packed: bytes,
    surroundings: Surroundings,
    inherited: Sequence[Connection],
) -> None:
    """The target of the process; does not return.

    packed: a Luggage. inherited: what a fork brought along and is the parent's alone.
    """
    for end in inherited:
        end.close()
    signal.set_wakeup_fd(-1)  # a fork brought the parent's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)  # so that what agents start can be ended with this process
    link = _Link(connection, parent, surroundings)
    _name_who_exits(link)
    reserve = bytearray(0 if surroundings.memory_bytes is None else _RESERVE_BYTES)
    code = 1
    try:
        _settle(surroundings)
        run_on_own_loop(_work(link, worker_id, packed))
        code = 0
    except asyncio.CancelledError:
        code = 128 + signal.SIGTERM
    except BaseException as error:  # noqa: BLE001 -- the parent is told, whatever it is
        del reserve  # a MemoryError holds, with its frames, what has filled the memory
        link.say(Failure.of(error))
    finally:
        link.close()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # a thread that an agent left behind does not hold the process up


def _name_who_exits(link: _Link) -> None:
    """Tell the parent which attempt calls `os._exit`, because the other attempts of this process are not to blame."""
    leave, pid = os._exit, os.getpid()

    def leave_by_name(status: int) -> NoReturn:
        attempt = attempt_in_flight()
        if attempt is not None and os.getpid() == pid:  # a fork ends for itself
            link.say(Culprit(attempt.rollout.attempt.attempt_id))
        leave(status)

    os._exit = leave_by_name


async def _work(link: _Link, worker_id: int, packed: bytes) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    link.listen(lambda: loop.call_soon_threadsafe(task.cancel))
    await work(link, worker_id, packed)


class Link(Protocol):
    """What joins a worker and those who started it."""

    begin: Latch
    stop: Latch
    at_most: int | None
    """How many attempts may be in flight at first; None: no limit of its own."""

    def say(self, word: Word) -> None:
        """Tell them."""
        ...


async def work(link: Link, worker_id: int, packed: bytes) -> None:
    """Make the worker that is in `packed` (a Luggage), and run it between `begin` and `stop`."""
    luggage = unpack(packed)
    luggage.bundle.init()
    try:
        async with luggage.store as store:
            link.say("prepared")
            await link.begin.wait_async()
            if not link.stop.is_set():
                await luggage.bundle(store, worker_id, link.stop, at_most=link.at_most)
    finally:
        luggage.bundle.teardown()
    link.say("finished")


def _settle(surroundings: Surroundings) -> None:
    os.environ.clear()
    os.environ.update(surroundings.environment)
    carry_mark(surroundings.environment.get(RUNNER_MARK))
    if surroundings.cpus is not None:
        os.sched_setaffinity(0, surroundings.cpus)
    if surroundings.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (surroundings.memory_bytes, surroundings.memory_bytes))
    setup_child_logging()
    set_log_levels(surroundings.log_levels)


def log_levels() -> dict[str, int]:
    """This process's, by logger's name, for the processes of its runners."""
    return {name: logging.getLogger(name).getEffectiveLevel() for name in _LOGGERS}


def set_log_levels(levels: Mapping[str, int]) -> None:
    """Log what the process that started this one would."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class _Link:
    """This end of the pipe to the parent. When the other end is gone, so is this process and all that agents started in it."""

    def __init__(self, connection: Connection[Word, Order], parent: int, surroundings: Surroundings) -> None:
        self.begin = Latch()
        self.stop = Latch()
        self.at_most: int | None = None
        self._connection = connection
        self._sending = threading.RLock()  # a signal handler of an agent may call os._exit meanwhile
        self._parent = parent
        self._left_behind = surroundings.left_behind
        self._mark = surroundings.environment.get(RUNNER_MARK)
        self._ended = threading.Event()
        self._orphaned = False
        self._blocked_looks = 0

    def say(self, word: Word) -> None:
        """Tell the parent; it may have gone."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(word)

    def listen(self, cancel: Callable[[], Any]) -> None:
        """Follow the parent's orders in a thread; `cancel` is called when it has gone."""
        thread = threading.Thread(target=self._listen, args=(cancel,), name="leyden-parent", daemon=True)
        setattr(thread, "pydev_do_not_trace", True)  # noqa: B010 -- debuggers of IDEs do not stop a thread with this attribute
        thread.start()

    def close(self) -> None:
        """The work is over. Without a parent to do it, this ends what agents started, and this process."""
        self._ended.set()
        if self._orphaned:
            self._end_family()

    def _listen(self, cancel: Callable[[], Any]) -> None:
        answer = prepare_answers()
        if (alive := answer()) is not None:
            self.say(alive)
        while (order := self._next_order()) is not None:
            if order == "ask":
                if (alive := answer()) is not None:
                    self.say(alive)
                continue
            if isinstance(order, Begin):
                self.at_most = order.at_most
            else:
                self.stop.set()
            self.begin.set()
        self._orphaned = True
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            cancel()
        for path in self._left_behind:
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        self._ended.wait(_LAST_SECONDS)
        self._end_family()

    def _next_order(self) -> Order | None:
        """None when the parent has gone."""
        watched: list[Any] = [self._connection]
        try:  # another process may have inherited the other end of the pipe, so ask for the parent itself where that is possible
            watched.append(os.pidfd_open(self._parent))
        except AttributeError:
            pass
        except ProcessLookupError:
            return None
        try:
            readable = self._watch(watched)
            return self._connection.recv() if self._connection in readable else None
        except (EOFError, OSError):
            return None
        finally:
            for descriptor in watched[1:]:
                os.close(descriptor)

    def _watch(self, watched: Sequence[Any]) -> Sequence[Any]:
        """Those that have something to say. Ends this process when its event loop is blocked meanwhile."""
        while not (readable := wait(watched, _LOOK_SECONDS)):
            self._blocked_looks = self._blocked_looks + 1 if overdue_seconds() > _LOOK_SECONDS else 0
            if self._blocked_looks == _BLOCKED_LOOKS:
                failure = _blocked()
                LagWatchdog.interrupt_siblings(failure.headline)
                self.say(failure)
                os.killpg(0, signal.SIGKILL)
        return readable

    def _end_family(self) -> None:
        """End what agents started, and this process."""
        if self._mark is not None:
            kill_marked(RUNNER_MARK, self._mark)
        os.killpg(0, signal.SIGKILL)


def _blocked() -> Failure:
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] -- documented, under this name
    where = traceback.extract_stack(frames[threading.main_thread().ident or 0])
    last = where[-1]
    headline = f"an agent blocks the event loop beyond an agent's time, at {last.filename}:{last.lineno} in {last.name}: {last.line}"
    return Failure(
        headline, "".join([*traceback.format_list(where), headline]), of_the_store=False, culprit_may_be_over=True
    )
