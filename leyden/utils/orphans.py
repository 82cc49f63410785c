"""Processes that nobody ends any more: they left their group and lost their parent, and are known by a variable in their environment.

It knows neither runners nor programs; whoever starts processes that must not stay behind puts the mark there.
"""

from __future__ import annotations

import contextlib
import os

import psutil

__all__ = ["RUNNER_MARK", "kill_marked"]

RUNNER_MARK = "LEYDEN_RUNNER"
"""The variable by which what agents start in a runner's process is known: the run, a dot, the worker."""
_ROUNDS = 10
"""Of killing, since what is killed may have forked meanwhile."""


def kill_marked(name: str, value: str, *, all_below: bool = False) -> None:
    """End every process of this user that was started with `name` set to `value`, but not this one.

    all_below: and those whose value continues after it with a dot. What forked and never ran a program of its own is not seen.
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
    try:
        found = process.environ().get(name, "")
    except psutil.Error:
        return False
    return found == value or (all_below and found.startswith(f"{value}."))
