"""Choose the number of torch's threads by the model's size and the machine's cores."""

from __future__ import annotations

import os
from typing import Final, Literal

from leyden._lib.options import check_number
from leyden.errors import ConfigError

Threads = int | Literal["auto"] | None
"""The option `threads`: a number, "auto", or None for torch's default."""

SMALLEST_SHARED: Final = 16_000_000
"""The number of parameters from which several threads are worth it. A smaller model is fastest with one."""


def check_threads(threads: object) -> None:
    """Raise ConfigError unless `threads` is "auto", a number of at least 1, or None."""
    if isinstance(threads, str) and threads != "auto":
        raise ConfigError(f'threads is {threads!r}; give a number, "auto", or None for torch\'s default')
    if threads != "auto":
        check_number("threads", threads, at_least=1, whole=True, or_none="torch's default")


def threads_for(n_parameters: int, n_cores: int) -> int:
    """Return the number of threads for "auto", for decoding and for training each.

    A small model gets one thread. A larger one gets every core of a small machine, because agents wait for the model
    most of the time. From four cores on it gets all but one, which is left to agents and the gateway.
    """
    if n_parameters < SMALLEST_SHARED:
        return 1
    return n_cores if n_cores < 4 else n_cores - 1


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
