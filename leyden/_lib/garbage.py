"""The frequency of garbage collection, in processes that run no user code."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000
"""The garbage collector's threshold for the youngest generation. Python's default is 700."""


def look_for_cycles_rarely() -> None:
    """Let the garbage collector run once for many responses, not several times for each.

    A response with log-probabilities consists of hundreds of containers, none of them in a cycle,
    which live until it is recorded. Each collection visits them in vain, which takes a tenth of the
    gateway's CPU time for a call. Use it only in a process that runs no user code, which may rely
    on Python's thresholds.
    """
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
