"""Processes that left their group and lost their parent, known by a mark that they inherit.

There are two marks. An environment variable is lost by a program that is started with another
environment, and by a fork that runs no program. On Linux these keep the second mark, an unusual
resource limit on the CPU time of real-time threads (`RLIMIT_RTTIME`), which is too high to limit
anything. This module knows neither runners nor programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource

import psutil

RUNNER_MARK = "LEYDEN_RUNNER"
"""The variable by which what agents start in a runner's process is known: the run, a dot, the
worker."""
_ROUNDS = 10
"""The rounds of killing, since a process may fork before it is killed."""
_LIMIT: int | None = getattr(psutil, "RLIMIT_RTTIME", None)
_OURS = 1 << 62
"""The part of the limit that marks our processes, in microseconds: more than a hundred thousand
years.
"""
_WORKER_BITS = 20


def carry_mark(mark: str | None) -> None:
    """Mark this process and its future children by the resource limit; None removes the mark."""
    if _LIMIT is None:
        return
    _, most = resource.getrlimit(_LIMIT)
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit: only the variable marks
        resource.setrlimit(_LIMIT, (resource.RLIM_INFINITY if mark is None else _limit_of(mark), most))


def kill_marked(name: str, value: str, *, all_below: bool = False) -> None:
    """End all other processes of this user that have the environment variable `name` set to `value`.

    all_below: also end the processes whose value continues after `value` with a dot. For
        RUNNER_MARK, also end the processes that carry the mark as a resource limit.
    """
    for _ in range(_ROUNDS):
        orphans = [process for process in psutil.process_iter() if _has(process, name, value, all_below)]
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(psutil.Error):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=0.1)


def _has(process: psutil.Process, name: str, value: str, all_below: bool) -> bool:
    if process.pid == os.getpid():
        return False
    if name == RUNNER_MARK and _has_limit(process, value, all_below):
        return True
    try:
        found = process.environ().get(name, "")
    except psutil.Error:
        return False
    return found == value or (all_below and found.startswith(f"{value}."))


def _has_limit(process: psutil.Process, mark: str, all_below: bool) -> bool:
    if _LIMIT is None:
        return False
    try:
        found, _ = process.rlimit(_LIMIT)
        if found == resource.RLIM_INFINITY or process.status() == psutil.STATUS_ZOMBIE:
            return False
    except (psutil.Error, OSError):
        return False
    return found >> _WORKER_BITS == _limit_of(mark) >> _WORKER_BITS if all_below else found == _limit_of(mark)


def _limit_of(mark: str) -> int:
    """Return the limit that encodes a mark: the run in its upper bits, the worker in its lower
    ones.
    """
    run, _, worker = mark.partition(".")
    number = int.from_bytes(hashlib.sha256(run.encode()).digest()[:5])
    return _OURS | number << _WORKER_BITS | (int(worker or 0) + 1) % (1 << _WORKER_BITS)
