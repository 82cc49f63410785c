"""How often Python looks for reference cycles, in processes that are Leyden's alone."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000
"""Containers between two looks at the youngest; Python's own number is 700."""


def look_for_cycles_rarely() -> None:
    """Let this process look for cycles once for many answers, not several times for each.

    One answer with log-probabilities is hundreds of containers, none of them in a cycle, which live
    until it is recorded: every look goes through them in vain, a tenth of what a call costs the
    gateway. Only for a process that runs nothing of the user's.
    """
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
