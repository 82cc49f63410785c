"""An event loop that a fork of its process cannot run: both would take the other's events, and
write to the same connections.
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
"""The seconds that the tasks that are left over may take to end when they are cancelled."""


def new_own_loop() -> asyncio.AbstractEventLoop:
    """Return asyncio's own loop; a forked child that comes back to it ends there."""
    return asyncio.SelectorEventLoop(_OwnSelector())


def run_on_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a loop of its own and cancel the tasks that are left over.

    `asyncio.run` waits without limit for a task that swallows its cancellation, and for threads of
    the default executor. This function leaves both behind after a moment, so it is for a process
    that ends afterwards.
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
    """Cancel the tasks that are left and close the loop's asynchronous generators, in
    `_LEFTOVER_SECONDS` each at most.
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
    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if os.getpid() != self._pid:
            os._exit(0)
        return super().select(timeout)
