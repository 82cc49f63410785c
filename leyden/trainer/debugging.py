"""Run under a debugger: agent code on the calling thread, one rollout at a time, no time limits."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Generator
from typing import Any, Protocol

from leyden.execution import ExecutionStrategy, SharedMemoryExecutionStrategy
from leyden.runner import Runner
from leyden.runner.calls import LentThread, call_here


class _Parts(Protocol):
    """The parts of a trainer that a run under a debugger replaces."""

    strategy: ExecutionStrategy
    runner: Runner[Any]


@contextlib.contextmanager
def for_debugging(parts: _Parts) -> Generator[LentThread | None]:
    """Replace the trainer's strategy and runner by those for a debugger, while the block runs.

    Yields the thread that calls sync agents, if the run's loop has another thread because a loop
    runs here already.
    """
    lent = LentThread() if _a_loop_runs_here() else None
    before = parts.strategy, parts.runner
    runner = copy.copy(parts.runner)
    runner.debugger = lent or call_here
    parts.strategy, parts.runner = SharedMemoryExecutionStrategy(main_thread="runner"), runner
    try:
        yield lent
    finally:
        parts.strategy, parts.runner = before


def _a_loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
