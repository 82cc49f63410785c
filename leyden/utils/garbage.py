"""The frequency of garbage collection, in processes that run no user code."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000
"""The garbage collector's threshold for the youngest generation. Python's default is 700."""


def look_for_cycles_rarely() -> None:
    """Let Python look for reference cycles once for many answers, not several times for each.

    An answer with log-probabilities is hundreds of containers, none of them in a cycle, which live
    until it is recorded. Every look visits them in vain, at a tenth of the gateway's cost of a
    call. Call this only in a process that runs no code of the user's.
    """
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
