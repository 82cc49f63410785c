"""The processes of a run, as a test sees them."""

from __future__ import annotations

import psutil

__all__ = ["gone", "runners"]


def runners() -> list[psutil.Process]:
    """Processes that runners of this process are in: children of its forkserver."""
    return [
        process
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "forkserver" in " ".join(child.cmdline())
        for process in child.children()
    ]


def gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still there after `seconds`."""
    return psutil.wait_procs(processes, timeout=seconds)[1]
