"""Announce the end of a run to clients of the run's store server that wait for it in other processes.

The module knows neither runs nor runners. The process that serves the store announces the end
(`LightningStoreServer.announce_end`); a client waits for it (`LightningStoreClient.wait_for_end`). A server that dies
announces nothing, and its clients notice that it is unavailable.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyden._lib.aio import Latch
from leyden._lib.text import fault_reason
from leyden.errors import ConfigError
from leyden.store.wire import PREFIX

END: Final = f"{PREFIX}/waits/end"


class WaitForEnd(BaseModel):
    """A request to wait up to `timeout_seconds` for the end of the server's run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    watcher: str
    """The id of the waiting client, the same in each of its requests."""
    timeout_seconds: float = Field(default=0.0, ge=0, le=60)


class EndReply(BaseModel):
    """The reply: whether the run has ended."""

    ended: bool


class End:
    """Notifies clients of the run's end. Call `answer` in the server's loop, the other methods in any thread."""

    def __init__(self) -> None:
        self._announced = False
        self._waiting_is_over = Latch()
        self._watchers: set[str] = set()
        """Clients that asked and have not been notified of the end."""
        self._all_notified = Latch()

    async def answer(self, body: bytes) -> EndReply:
        """Wait for the end as a client's WaitForEnd (in JSON) asks, and return whether it has come.

        Raise ConfigError for another body.
        """
        try:
            request = WaitForEnd.model_validate_json(body)
        except ValidationError as error:
            raise ConfigError(f"POST {END}: {fault_reason(error.errors()[0])}") from None
        self._watchers.add(request.watcher)
        with suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_seconds):
                await self._waiting_is_over.wait_async()
        if self._announced:
            self._watchers.discard(request.watcher)
            self._check_all_notified()
        return EndReply(ended=self._announced)

    async def announce(self, *, within_seconds: float) -> None:
        """Announce the end. Return when all waiting clients were notified, at the latest after `within_seconds`."""
        self._announced = True
        self._waiting_is_over.set()
        self._check_all_notified()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self._all_notified.wait_async()

    def stop_waiting(self) -> None:
        """Reply to every waiting client at once, because the server stops."""
        self._waiting_is_over.set()

    def _check_all_notified(self) -> None:
        if not self._watchers:
            self._all_notified.set()
