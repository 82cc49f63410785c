"""Agents of the monitor's tests, at the top of a module: they travel by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import leyden as ly


@ly.rollout
def stop_once(task: str) -> float:
    """It stops its process, unless the file that the task names is there; nothing but SIGCONT or SIGKILL ends that."""
    marker = Path(task)
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0
