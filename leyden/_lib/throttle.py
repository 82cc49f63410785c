"""Limit how often something happens, such as a warning: in this process, or on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Hashable
from pathlib import Path


class Throttle:
    """Admits each key at most once every `seconds`. Thread-safe."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._admitted: dict[Hashable, float] = {}

    def admits(self, key: Hashable = None) -> bool:
        """Return whether the key was not admitted in the last `seconds`. If so, it is admitted now."""
        with self._lock:
            now = time.monotonic()
            due = now >= self._admitted.get(key, float("-inf")) + self.seconds
            if due:
                self._admitted[key] = now
            return due

    def reset(self) -> None:
        with self._lock:
            self._admitted.clear()


def first_on_this_machine(name: str, seconds: float = 60.0) -> bool:
    """Return whether this is the first call for `name` by any process of this user in `seconds`.

    A file in the folder for temporary files keeps the time. Return True if it cannot be used.
    """
    path = Path(tempfile.gettempdir()) / f"leyden-{os.getuid()}-{name}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return True
    with contextlib.closing(os.fdopen(descriptor, "r+b")) as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            last = float(file.read() or b"-inf")
            now = time.time()
            if last <= now < last + seconds:  # a time in the future is of a clock that was wrong
                return False
            file.seek(0)
            file.truncate()
            file.write(str(now).encode())
        except (OSError, ValueError):  # the file is unusable, or holds no number
            pass
        return True
