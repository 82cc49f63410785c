"""An event loop that runs only in the process that made it. A forked child would take its parent's events and write to
its parent's connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LEFTOVER_SECONDS = 1.0
"""The seconds that remaining tasks have to end after they were cancelled."""


def new_own_loop() -> asyncio.AbstractEventLoop:
    """Return an asyncio event loop. A forked child that goes on running it exits with status 0."""
    return asyncio.SelectorEventLoop(_OwnSelector())


def run_on_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a new event loop, cancel the remaining tasks, and return the result of `main`.

    `asyncio.run` waits without limit for a task that swallows its cancellation, and for threads of the default
    executor. This function abandons both, the tasks after a second, so use it only in a process that ends afterwards.
    """
    loop = new_own_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            loop.run_until_complete(_end_leftovers(loop))
        finally:
            loop.close()


async def _end_leftovers(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the remaining tasks, then close the loop's asynchronous generators. Wait for each of the two steps for at
    most `_LEFTOVER_SECONDS`.
    """
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=_LEFTOVER_SECONDS)
        if stubborn:
            logger.warning("%d tasks ignored their cancellation and are left behind", len(stubborn))
    await asyncio.wait({asyncio.ensure_future(loop.shutdown_asyncgens())}, timeout=_LEFTOVER_SECONDS)


class _OwnSelector(selectors.DefaultSelector):
    """A selector that ends a forked child in the place of waiting for its parent's events."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if os.getpid() != self._pid:
            os._exit(0)
        return super().select(timeout)
