"""A run for someone with a debugger: agent code on the thread that called, one rollout at a time, without limits of time."""

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
    """The parts of a trainer that a run for a debugger takes the place of."""

    strategy: ExecutionStrategy
    runner: Runner[Any]


@contextlib.contextmanager
def for_debugging(parts: _Parts) -> Generator[LentThread | None]:
    """Give the trainer a strategy and a runner for a debugger, while the block runs.

    Yields the thread that sync agents are called on, if that is not the one of the run's loop: a loop runs on it already.
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
