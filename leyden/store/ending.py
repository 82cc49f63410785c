"""The end of a run, said by the store server that runs for it to those who wait for it elsewhere.

It knows neither runs nor runners: whoever serves the store announces (`LightningStoreServer.announce_end`), whoever works for it asks
(`LightningStoreClient.wait_for_end`). A server that dies announces nothing; its clients notice that it is away.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyden.errors import ConfigError
from leyden.store.wire import PREFIX
from leyden.utils.latch import Latch

END: Final = f"{PREFIX}/waits/end"


class WaitForEnd(BaseModel):
    """Wait up to `timeout_seconds` for the end of the run that the server runs for, and answer whether it has come."""

    model_config = ConfigDict(extra="forbid", strict=True)

    watcher: str
    """Who asks: the same in every question of one waiting client."""
    timeout_seconds: float = Field(default=0.0, ge=0, le=60)


class EndAnswer(BaseModel):
    """Whether the run has ended."""

    ended: bool


class End:
    """One server's word on it. `answer` is for the server's loop, the rest for any."""

    def __init__(self) -> None:
        self._announced = False
        self._waiting_is_over = Latch()
        self._watchers: set[str] = set()
        """Who asked and was not told the end yet."""
        self._all_told = Latch()

    async def answer(self, body: bytes) -> EndAnswer:
        """Answer a WaitForEnd. Raises ConfigError for anything else."""
        try:
            question = WaitForEnd.model_validate_json(body)
        except ValidationError as error:
            raise ConfigError(f"POST {END}: {error.errors()[0]['msg']}") from None
        self._watchers.add(question.watcher)
        with suppress(TimeoutError):
            async with asyncio.timeout(question.timeout_seconds):
                await self._waiting_is_over.wait_async()
        if self._announced:
            self._watchers.discard(question.watcher)
            self._look_whether_all_are_told()
        return EndAnswer(ended=self._announced)

    async def announce(self, *, within_seconds: float) -> None:
        """Tell everyone; return when those who were waiting have been told, or after so long."""
        self._announced = True
        self._waiting_is_over.set()
        self._look_whether_all_are_told()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_seconds):
                await self._all_told.wait_async()

    def stop_waiting(self) -> None:
        """Answer everyone who waits, as it is: the server stops."""
        self._waiting_is_over.set()

    def _look_whether_all_are_told(self) -> None:
        if not self._watchers:
            self._all_told.set()
