"""The signals that strategies share with the two bundles."""

from __future__ import annotations

from typing import Protocol

from leyden._lib.aio import Latch


class ExecutionEvent(Protocol):
    """The part of a stop signal that a bundle may use."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    async def wait_async(self) -> None: ...


ThreadingEvent = Latch
"""The signal for threads and loops of one process."""


class StopSignal(Latch):
    """The signal that stops the runners, as the algorithm's bundle gets it.

    An algorithm that has failed can end the runners before it raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.end_requested = Latch()
        """Set to ask the strategy to end the runners."""
        self.ended = Latch()
        """Set by the strategy when the runners have ended."""
        self.deserted = Latch()
        """Set when all runners have ended by themselves while the algorithm still runs."""

    async def end_runners(self) -> None:
        """Request the end of the runners, with time to drain, and wait until they have ended."""
        self.end_requested.set()
        await self.ended.wait_async()
