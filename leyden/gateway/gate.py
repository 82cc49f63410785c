"""What holds calls up while a model's weights change.

Everything runs in the gateway's event loop. It knows that calls go in and out, and nothing of them.
"""

from __future__ import annotations

import asyncio

from leyden.host.http import Refusal

_RETRY_AFTER_SECONDS = 1


class Gate:
    """Open, or closed with calls waiting before it."""

    def __init__(self, wait_seconds: float) -> None:
        """wait_seconds: the longest time that a call waits."""
        self._wait_seconds = wait_seconds
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self.inside = 0
        """Calls that have gone in and not come out."""
        self.waiting = 0
        """Calls before the closed gate."""

    @property
    def closed(self) -> bool:
        """Whether calls are held up."""
        return not self._open.is_set()

    async def enter(self) -> None:
        """Go in as soon as the gate is open; `leave` must follow. Raises Refusal (429) if that takes too long."""
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
        """A call is over."""
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    async def close(self) -> None:
        """Let nobody in."""
        self._open.clear()

    async def open(self) -> None:
        """Let everybody in."""
        self._open.set()

    async def drain(self) -> None:
        """Let nobody in, and wait until everybody is out."""
        self._open.clear()
        await self._empty.wait()
