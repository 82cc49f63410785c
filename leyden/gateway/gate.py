"""A gate that holds calls up while a model's weights change.

Everything runs in the gateway's event loop. The gate counts calls, and does not know what they are.
"""

from __future__ import annotations

import asyncio

from leyden._lib.host.http import Refusal

_RETRY_AFTER_SECONDS = 1


class Gate:
    """A gate that is open, or closed with calls waiting before it."""

    def __init__(self, wait_seconds: float, *, closed: bool = False) -> None:
        """wait_seconds: the longest time that a call waits before the closed gate.
        closed: whether the gate is closed at first.
        """
        self._wait_seconds = wait_seconds
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        if not closed:
            self._open.set()
        self._empty.set()
        self.inside = 0
        """The number of calls that have entered and not left."""
        self.waiting = 0
        """The number of calls that wait before the closed gate."""

    @property
    def closed(self) -> bool:
        """Whether calls are held up."""
        return not self._open.is_set()

    async def enter(self) -> None:
        """Enter as soon as the gate is open. `leave` must follow.

        Raise Refusal (429) if the gate stays closed for longer than `wait_seconds`.
        """
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError as error:
            raise Refusal(
                429,
                "gateway_paused",
                f"the gateway has been paused for more than {self._wait_seconds:g} s (LLMProxy's pause_wait_seconds); try again",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            ) from error
        finally:
            self.waiting -= 1
        self.inside += 1
        self._empty.clear()

    def leave(self) -> None:
        """Count the end of a call that had entered."""
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    def close(self) -> None:
        """Hold up new calls."""
        self._open.clear()

    def open(self) -> None:
        """Let the waiting calls enter."""
        self._open.set()

    async def drain(self) -> None:
        """Hold up new calls, and wait until every call inside has left."""
        self._open.clear()
        await self._empty.wait()
