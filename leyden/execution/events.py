"""The signals that strategies share with what they run."""

from __future__ import annotations

from typing import Protocol

from leyden.utils.latch import Latch

__all__ = ["ExecutionEvent", "ThreadingEvent"]


class ExecutionEvent(Protocol):
    """What a bundle may ask of its stop signal."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    async def wait_async(self) -> None: ...


ThreadingEvent = Latch
"""The signal for threads and loops of one process."""
