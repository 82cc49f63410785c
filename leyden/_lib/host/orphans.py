"""Find and end processes that left their group and lost their parent, by a mark that they inherit.

There are two marks. The first is an environment variable. A program that is started with another environment lacks it,
and so does a fork that runs no program. On Linux these keep the second mark, an unusual resource limit on the CPU time
of real-time threads (`RLIMIT_RTTIME`), which is too high to limit anything. This module knows neither runners nor
programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource

import psutil

RUNNER_MARK = "LEYDEN_RUNNER"
"""The variable that marks the processes which agents start in a runner's process. Its value is the run, a dot and the
worker's number."""
_ROUNDS = 10
"""How often to look for marked processes again, since a process may fork before it is killed."""
_LIMIT: int | None = getattr(psutil, "RLIMIT_RTTIME", None)
_OURS = 1 << 62
"""The part of the limit that marks our processes, in microseconds: more than a hundred thousand years."""
_WORKER_BITS = 20
"""The lower bits of the limit, which hold the worker's number. The bits above hold the run's."""


def carry_mark(mark: str | None) -> None:
    """Mark this process and its future children with a value of RLIMIT_RTTIME. None removes it."""
    if _LIMIT is None:
        return
    _, most = resource.getrlimit(_LIMIT)
    with contextlib.suppress(ValueError, OSError):  # a lower hard limit: only the variable marks
        resource.setrlimit(_LIMIT, (resource.RLIM_INFINITY if mark is None else _limit_of(mark), most))


def kill_marked(name: str, value: str, *, all_below: bool = False) -> None:
    """End all other processes of this user that have the environment variable `name` set to `value`, or, for
    RUNNER_MARK, carry the mark as a resource limit.

    all_below: also end the processes whose value continues after `value` with a dot.
    """
    for _ in range(_ROUNDS):
        orphans = [process for process in psutil.process_iter() if _has_mark(process, name, value, all_below)]
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(psutil.Error):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=0.1)


def kill_orphans() -> int:
    """End the processes that agents left behind when the program of their run was killed; return how many.

    A run is over if none of its marked processes has a Python program as its parent, because a runner always has one.
    Processes of runs under way are left alone, and so are those of other users.
    """
    runs: dict[int, list[psutil.Process]] = {}
    under_way: set[int] = set()
    for process in psutil.process_iter():
        run = _run_of(process)
        if run is None:
            continue
        runs.setdefault(run, []).append(process)
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and _run_of(parent) != run and "python" in parent.exe().lower():
                under_way.add(run)
    orphans = [process for run, members in runs.items() if run not in under_way for process in members]
    for orphan in orphans:
        with contextlib.suppress(psutil.Error):
            orphan.kill()
    psutil.wait_procs(orphans, timeout=1.0)
    return len(orphans)


def _run_of(process: psutil.Process) -> int | None:
    """Return the number of the run that a process is marked with; None for any other process."""
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        mark = process.environ().get(RUNNER_MARK)
        if mark is not None:
            return _limit_of(mark) >> _WORKER_BITS
        if _LIMIT is None:
            return None
        found, _ = process.rlimit(_LIMIT)
    except (psutil.Error, OSError):
        return None
    return found >> _WORKER_BITS if found != resource.RLIM_INFINITY and found & _OURS else None


def _has_mark(process: psutil.Process, name: str, value: str, all_below: bool) -> bool:
    """Return whether another process carries a mark, as `kill_marked` describes it."""
    if process.pid == os.getpid():
        return False
    if name == RUNNER_MARK and _LIMIT is not None:
        ignored_bits = _WORKER_BITS if all_below else 0
        with contextlib.suppress(psutil.Error, OSError):
            found, _ = process.rlimit(_LIMIT)
            if (
                found != resource.RLIM_INFINITY
                and process.status() != psutil.STATUS_ZOMBIE
                and found >> ignored_bits == _limit_of(value) >> ignored_bits
            ):
                return True
    try:
        found = process.environ().get(name, "")
    except psutil.Error:
        return False
    return found == value or (all_below and found.startswith(f"{value}."))


def _limit_of(mark: str) -> int:
    """Return the limit that encodes a mark: the run in its upper bits, the worker in its lower ones."""
    run, _, worker = mark.partition(".")
    # A mark without a worker counts as worker 0 and has the number 0 + 1.
    number = int.from_bytes(hashlib.sha256(run.encode()).digest()[:5])
    return _OURS | number << _WORKER_BITS | (int(worker or 0) + 1) % (1 << _WORKER_BITS)
