"""An event loop that a fork of its process cannot run: both would take the other's events, and write to the same connections."""

from __future__ import annotations

import asyncio
import os
import selectors

__all__ = ["new_own_loop"]


def new_own_loop() -> asyncio.AbstractEventLoop:
    """asyncio's own; a forked child that comes back to it ends there."""
    return asyncio.SelectorEventLoop(_OwnSelector())


class _OwnSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if os.getpid() != self._pid:
            os._exit(0)
        return super().select(timeout)
