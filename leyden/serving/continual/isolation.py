"""Work beside production: in a process of its own, with less priority, and limits that end it.

The process writes its result into a file as its last act, so a result is there whole or not at
all, and survives the process that waits for it. This module knows neither stores nor
algorithms: a `Job` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from leyden.errors import BudgetExceeded, ChildDied
from leyden.host.child import (
    GUARD_MISSING,
    Child,
    ChildFailure,
    Parent,
    describe_exit,
    end_with_parent,
    known_start_method,
    missing_guard,
)
from leyden.options import check_number
from leyden.utils.logs import setup_child_logging
from leyden.utils.pickling import pack

logger = logging.getLogger(__name__)

_RESULT: Final = "-result.json"
_LAST_LINES: Final = 5
_LAST_BYTES: Final = 4096
_RESERVE_BYTES: Final = 16 * 2**20
"""Memory that the process keeps free, to report why it ends. Nothing is written there, so
it is not resident."""
_HARD_SECONDS: Final = 10
"""How much CPU time a process that ignores its limit gets before the kernel kills it."""
_COST_SECONDS: Final = 0.5
"""Interval at which the cost is checked."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources of one piece of work in a cycle (training, a check).

    nice: how much lower its priority is, from 0 to 19. At 19 it gets about a seventieth of the CPU
        time of a process that always works, and all that nobody else wants.
    cpus: how many CPUs it may use; None: all but one, which is left to requests. That is faster for
        threads that wait for each other, too, because none of them is interrupted by a request.
    cpu_seconds: CPU time of the process (`RLIMIT_CPU`). A process that it starts has as much again.
    memory_bytes: memory that the process may reserve (`RLIMIT_DATA`); processes that
        it starts likewise.
    seconds: wall-clock time, also over restarts. It becomes the deadline of the cycle's row.
    cost: limit of the cost of a cycle's model calls that a gateway records
        (`Trainer(llm_proxy=...)`), in the unit of `UpstreamModel.price_per_million`. Calls under
        way when it is reached are not taken back.
    """

    nice: int = 19
    cpus: int | None = None
    cpu_seconds: float | None = 3600.0
    memory_bytes: int | None = None
    seconds: float = 6 * 3600.0
    cost: float | None = None

    def __post_init__(self) -> None:
        check_number("nice", self.nice, at_least=0, at_most=19, whole=True)
        check_number("cpus", self.cpus, at_least=1, whole=True, or_none="all but one")
        check_number("cpu_seconds", self.cpu_seconds, above=0, or_none="no limit")
        check_number("memory_bytes", self.memory_bytes, at_least=1, whole=True, or_none="no limit")
        check_number("seconds", self.seconds, above=0)
        check_number("cost", self.cost, above=0, or_none="no limit")


class Job(Protocol):
    """Picklable work whose result is JSON, and not None."""

    async def run(self) -> Any:
        """Do the job's work in the child process, and return its result.

        A job that is started again continues where its folder shows it to be.
        """
        ...

    async def cost(self) -> float:
        """Return the cost of the job's model calls so far, also of earlier processes.

        It is called while the job runs.
        """
        ...


async def run_isolated(
    job: Job,
    folder: Path,
    *,
    name: str,
    limits: Limits,
    cost_left: float | None,
    go_on: Callable[[], Coroutine[Any, Any, bool]],
) -> Any:
    """Run a job in a process of its own, and return its result, or None if `go_on` has said to
    stop.

    folder: gets the result as NAME-result.json, and what the process writes as NAME.log. A result
        that is there already is returned at once.
    go_on: awaited again and again while the job runs; it takes as long between two
        looks as it likes.
    Raise ChildDied with the process's last words if it fails, dies or exceeds a limit.
    """
    result, log = folder / f"{name}{_RESULT}", folder / f"{name}.log"
    if (found := _read(result)) is not None:
        return found["result"]
    child = Child(
        _work,
        (pack(job), result, log, limits, cost_left),
        name=f"leyden-learning-{name}",
        start_method=known_start_method(None),
        daemon=False,
    )
    failures: list[ChildFailure] = []
    ended = child.attend(failures.append)
    try:
        while not ended.done():
            watching = asyncio.ensure_future(go_on())
            await asyncio.wait({ended, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                watching.cancel()
            elif not watching.result():
                return None
        code = ended.result()
    finally:
        if not ended.done():
            child.kill()
            await child.stop(0.0)
    if code == 0 and (found := _read(result)) is not None:
        return found["result"]
    if code == GUARD_MISSING:
        raise missing_guard("start ContinualLearning from a module that is imported")
    words = failures[-1].headline if failures else _last_words(code, limits, log)
    raise ChildDied(f"the process of {name} ended: {words}; its log is {log}")


def spent(folder: Path) -> float:
    """Return the cost of a folder's finished jobs."""
    return sum(json.loads(path.read_text())["cost"] for path in folder.glob(f"[!.]*{_RESULT}"))


def _read(result: Path) -> dict[str, Any] | None:
    return json.loads(result.read_text()) if result.exists() else None


def _last_words(code: int, limits: Limits, log: Path) -> str:
    """Return how the child ended (its exit code or signal) with the last lines of its log."""
    said = describe_exit(code)
    if code == -signal.SIGKILL and limits.memory_bytes is None:
        said += " (out of memory, for example; memory_bytes= gives it a limit of its own)"
    lines: list[str] = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    return said if not lines else f"{said}, after: {' | '.join(lines)}"


# ---- in the process ------------------------------------------------------------------------------


def _work(parent: Parent, packed: bytes, result: Path, log: Path, limits: Limits, cost_left: float | None) -> None:
    """Run the job and end the process.

    It does not return, so threads of agents do not hold it up.
    """
    code, reserve = 1, bytearray(0)
    try:
        result.parent.mkdir(parents=True, exist_ok=True)
        end_with_parent(parent.pid, also=parent.connection.fileno())
        _write_to(log)
        reserve = bytearray(0 if limits.memory_bytes is None else _RESERVE_BYTES)
        _apply(limits, parent)
        job: Job = pickle.loads(packed)
        _write_whole(result, asyncio.run(_within_cost(job, cost_left)))
        code = 0
    except BaseException as error:  # noqa: BLE001 -- the parent reports it
        del reserve
        failure = ChildFailure.of(error)
        parent.send(failure)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(failure.traceback)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


async def _within_cost(job: Job, cost_left: float | None) -> Any:
    """Return the job's result and cost. Raise BudgetExceeded when it has cost too much."""
    running = asyncio.ensure_future(job.run())
    while not running.done():
        await asyncio.wait({running}, timeout=_COST_SECONDS)
        if cost_left is not None and (cost := await job.cost()) > cost_left:
            running.cancel()
            raise BudgetExceeded(
                f"its model calls have cost {cost:g}, and {cost_left:g} was left of Limits(cost=); give a larger limit"
            )
    return {"result": running.result(), "cost": await job.cost()}


def _apply(limits: Limits, parent: Parent) -> None:
    """Apply the limits to this child process: priority, CPUs (the last ones of its parent's),
    memory and CPU time.

    Beyond `cpu_seconds`, report the reason to the parent and exit.
    """
    _lower_priority(limits.nice)
    if sys.platform == "linux":
        here = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, here[-(limits.cpus or max(1, len(here) - 1)) :])
    if limits.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    if limits.cpu_seconds is not None:
        seconds = max(1, round(limits.cpu_seconds))

        def out_of_time(number: int, frame: FrameType | None) -> None:
            parent.send(
                ChildFailure(f"it has used {seconds} s of CPU time, as many as Limits(cpu_seconds=) allows", "")
            )
            os._exit(1)

        signal.signal(signal.SIGXCPU, out_of_time)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + _HARD_SECONDS))


def _lower_priority(nice: int) -> None:
    """Lower the priority of this process, and of what it starts, against all others of the machine.

    Linux may share out CPU time among sessions first (autogroups), and `nice` then counts within
    a session alone. So this process begins a session, which gets the same priority.
    """
    os.nice(nice)
    with contextlib.suppress(OSError):  # no autogroups, or it leads a session already
        os.setsid()
        Path(f"/proc/{os.getpid()}/autogroup").write_text(str(nice))


def _write_to(log: Path) -> None:
    """Send everything that the process writes to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    setup_child_logging()


def _write_whole(path: Path, value: Any) -> None:
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
