"""Start and end child processes of `leyden.rl`: environment workers, and producers of a
`DataQueue`.

A child leaves Ctrl-C and SIGTERM to its parent, and ends when the parent has gone. This module knows no environments.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator
from multiprocessing import forkserver
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, Final, Literal, TypeAlias, get_args

from leyden.errors import ConfigError

StartMethod: TypeAlias = Literal["forkserver", "spawn", "fork"]
GUARD_MISSING: Final = 78
"""Exit code of a child whose main script makes environments, or trains, at its top level."""
_PRELOADED: Final = ["leyden.rl.env.worker"]


def process_context(start_method: StartMethod | None) -> Any:
    """Return the multiprocessing context of a start method; None: forkserver if available.

    Raises ConfigError for a method that this platform lacks, and for a main script that children cannot import.
    """
    available = multiprocessing.get_all_start_methods()
    method = start_method or ("forkserver" if "forkserver" in available else "spawn")
    if method not in get_args(StartMethod) or method not in available:
        raise ConfigError(f"start_method={method!r}; this platform has {', '.join(available)}")
    script = getattr(sys.modules["__main__"], "__file__", None)
    if method != "fork" and script is not None and script.startswith("<"):
        raise ConfigError(
            f"worker processes import the main script, and {script} is no file that they can read. Save the program in a file and run "
            "that file, or choose start_method='fork' or env_type='dummy'"
        )
    if method == "forkserver":
        server: Any = forkserver
        if (
            getattr(server._forkserver, "_forkserver_pid", None) is None
        ):  # it has no public name; one that runs keeps what it has
            multiprocessing.set_forkserver_preload(_PRELOADED)
    return multiprocessing.get_context(method)


@contextlib.contextmanager
def without_sigterm() -> Generator[None]:
    """Start children with SIGTERM blocked, a forkserver for good.

    SIGTERM often goes to a whole group of processes, and the parent should handle it.
    `become_child` unblocks it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_child() -> None:
    """Leave signals to the parent and end with it. A child calls this first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_to_parent)  # a handler, which processes that a simulator starts do not inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinels: list[Any] = [parent.sentinel]
        threading.Thread(target=lambda: (wait(sentinels), os._exit(1)), name="leyden-parent", daemon=True).start()


def refuse_in_a_worker() -> None:
    """Exit if a worker makes environments, or trains, while it imports the main script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(GUARD_MISSING)


def ending_of(process: Any, seconds: float) -> str:
    """Wait for a process and describe its end. Raise ConfigError for a missing guard."""
    process.join(seconds)
    code = process.exitcode
    if code == GUARD_MISSING:
        raise ConfigError(
            "the main script starts worker processes at its top level, and these import it; put that under "
            "`if __name__ == '__main__':`, or choose start_method='fork'"
        )
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def end_process(process: Any, seconds: float = 0.0) -> None:
    """Wait for a process at most so long, then kill it. Free its resources."""
    if seconds > 0:
        process.join(seconds)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


def _leave_to_parent(number: int, frame: FrameType | None) -> None:
    """Do nothing: the parent got the signal too, and decides."""
