"""Run work beside production: in a process of its own, with a lower priority, within limits.

The process writes its result to a file as its last act, so a result is complete or absent, and survives the process
that waits for it. This module knows neither stores nor algorithms; the `Job` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from leyden._lib.atomic import private_directory, write_file
from leyden._lib.host.child import (
    GUARD_MISSING,
    Child,
    ChildFailure,
    Parent,
    describe_exit,
    end_with_parent,
    known_start_method,
    missing_guard,
)
from leyden._lib.host.limits import ResourceLimits
from leyden._lib.logs import setup_child_logging
from leyden._lib.options import check_number
from leyden._lib.pickling import pack
from leyden._lib.text import describe_error
from leyden.errors import BudgetExceeded, ChildDied, ConfigError

logger = logging.getLogger(__name__)

_RESULT: Final = "-result.json"
"""The end of the name of a result's file."""
_LAST_LINES: Final = 5
"""The number of the log's last lines in an error message."""
_LAST_BYTES: Final = 4096
"""The part of the log that is read for them."""
_COST_SECONDS: Final = 0.5
"""Seconds between two checks of the cost."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources of one piece of work in a cycle (training, a check).

    nice: how much lower the process's priority is, from 0 to 19. At 19 a busy process of priority 0 on the same CPU
        gets about 70 times as much CPU time; idle CPU time is used in full.
    cpus: how many CPUs the process may use; None: all but one, which is left to requests. That is also faster for
        threads that wait for each other, because no request interrupts them.
    cpu_seconds: the CPU time of the process (`RLIMIT_CPU`). Each process that it starts may use as much.
    memory_bytes: the memory that the process may allocate (`RLIMIT_DATA`), and each process that it starts.
    seconds: wall-clock time, over all restarts. It becomes the deadline of the cycle.
    cost: the cost of a cycle's model calls that a gateway records (`Trainer(llm_proxy=...)`), in the unit of
        `UpstreamModel.price_per_million`. Calls under way when the limit is reached may exceed it.
    None: no limit.
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
        """Do the work, in the child process. A job that is started again continues from the state in its folder."""
        ...

    async def cost(self) -> float:
        """Return the cost of the job's model calls so far, with those of earlier processes. Called during the job."""
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
    """Run a job in a process of its own, and return its result, or None if `go_on` has returned False. Cancelling this
    call kills the process.

    folder: where the result is written as NAME-result.json, and the process's output as NAME.log. A result that is
        there already is returned at once.
    cost_left: the cost that the job's model calls may have; None: any.
    go_on: called again and again while the job runs. It sleeps as long as it wants between two checks, and returns
        whether the job may continue.
    Raise ChildDied, with the error or the last lines of the log, if the process fails, dies or exceeds a limit. Raise
    ConfigError if this program cannot start such a process.
    """
    result, log = folder / f"{name}{_RESULT}", folder / f"{name}.log"
    if (found := _read(result)) is not None:
        return found["result"]
    try:
        packed = pack(job)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot go to a process of its own: {describe_error(error)}; give an algorithm, an agent and options "
            "that can be pickled"
        ) from error
    child = Child(
        _work,
        (packed, result, log, limits, cost_left),
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
    """Return the sum of the costs of the finished jobs in a folder."""
    return sum(json.loads(path.read_text())["cost"] for path in folder.glob(f"[!.]*{_RESULT}"))


def _read(result: Path) -> dict[str, Any] | None:
    """Return a job's result; None if it has not been written."""
    return json.loads(result.read_text()) if result.exists() else None


def _last_words(code: int, limits: Limits, log: Path) -> str:
    """Return a phrase that says how the child ended (its exit code or signal), with the last lines of its log."""
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
    """Run the job, and exit without returning, so that threads that agents left behind do not delay the end."""
    code, reserve = 1, bytearray(0)
    try:
        private_directory(result.parent)
        end_with_parent(parent.pid, also=parent.connection.fileno())
        _write_to(log)
        reserve = _apply(limits, parent)
        job: Job = pickle.loads(packed)
        write_file(result, json.dumps(asyncio.run(_within_cost(job, cost_left))))
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
    """Run a job, and return its result and cost. Cancel it and raise BudgetExceeded if that exceeds `cost_left`."""
    running = asyncio.ensure_future(job.run())
    while not running.done():
        await asyncio.wait({running}, timeout=_COST_SECONDS)
        if cost_left is not None and (cost := await job.cost()) > cost_left:
            running.cancel()
            raise BudgetExceeded(
                f"its model calls have cost {cost:g}, and {cost_left:g} was left of Limits(cost=); give a larger limit"
            )
    return {"result": running.result(), "cost": await job.cost()}


def _apply(limits: Limits, parent: Parent) -> bytearray:
    """Apply the limits to this child process, and return the memory to free for a report.

    The CPUs are the last ones of the parent's, so that the first stays free for requests. Beyond `cpu_seconds`, the
    process reports the reason to the parent and exits.
    """

    def out_of_time(seconds: int) -> None:
        parent.send(ChildFailure(f"it has used {seconds} s of CPU time, as many as Limits(cpu_seconds=) allows", ""))

    cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else None
    return ResourceLimits(
        cpus=None if cpus is None else cpus[-(limits.cpus or max(1, len(cpus) - 1)) :],
        memory_bytes=limits.memory_bytes,
        cpu_seconds=limits.cpu_seconds,
        nice=limits.nice,
    ).apply(out_of_time)


def _write_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    setup_child_logging()
