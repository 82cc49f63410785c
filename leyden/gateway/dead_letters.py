"""`DeadLetters`: a file for records on which the store itself fails (status 500), so that they hold up no others.

They are tried again one by one until the store takes them, after pauses that double up to an hour. The module knows a
spool. It does not know what the records are, or how the owner writes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from leyden.errors import GatewayError, LeydenError, StoreAway, StoreClosed, StoreError, StoreFull
from leyden.gateway.spool import Spool
from leyden.store.base import LightningStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_SECONDS = 2.0
"""Seconds that a store may take to reply to a probe."""
_FIRST_SECONDS, _MAX_SECONDS = 60.0, 3600.0
"""The first and the longest pause before records are tried again."""


class DeadLetters(Generic[T]):
    """Records that the store fails on. All methods belong to one event loop, but any thread may call `len`."""

    def __init__(self, spool: Spool[T], *, store: LightningStore, retry: Callable[[T], Awaitable[bool]]) -> None:
        """Open the file, whose name is that of the spool's file with `-aside`.

        spool: where records wait for the store.
        retry: writes a record, and returns whether to keep it here. Raises the store's error.
        """
        self._records = spool.beside("-aside")
        self._store, self._retry = store, retry
        self._any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    def append(self, records: Sequence[T], failure: str, error: Exception) -> int:
        """Add records, and return how many of the first ones fit; 0 if the file cannot be written.

        failure: a phrase for the log that says on which records the store fails.
        error: the store's error on the first record.
        """
        try:
            kept = self._records.append(list(records))
        except LeydenError as problem:
            logger.warning("%s, and they cannot be set aside: %s", failure, problem)
            return 0
        if kept:
            where = self._records.path or "a temporary file"
            logger.error("%s; set aside in %s and tried again: %s", failure, where, error)
            self._any.set()
        return kept

    async def run(self) -> None:
        """Try to write the records again and again, the first time at once. Runs until cancelled."""
        pause = 0.0
        while True:
            if not len(self._records):
                pause = _FIRST_SECONDS
                self._any.clear()
                await self._any.wait()
            await asyncio.sleep(pause)
            await self._try_each()
            pause = min(max(2 * pause, _FIRST_SECONDS), _MAX_SECONDS)

    async def _try_each(self) -> None:
        """Try each record once, or none if the store is unavailable or full."""
        for _ in range(len(self._records)):
            for record in self._records.first(1):
                try:
                    stays = await self._retry(record)
                except StoreClosed:
                    raise
                except Exception as error:  # noqa: BLE001 -- after any error the record stays
                    if await takes_nothing(self._store, error):
                        return
                    stays = True
                try:  # to the end of the file, where it is tried again after the others
                    self._records.append([record] if stays else [], bounded=False)
                except GatewayError:
                    return
                self._records.drop(1)

    def close(self) -> None:
        """Close the file. Records in a file that has a name stay there."""
        self._records.close()


def is_refusal(error: Exception) -> bool:
    """Return whether an error means that the store has refused a record, so that a retry is of no use."""
    return isinstance(error, LeydenError) and not isinstance(error, StoreError)


async def takes_nothing(store: LightningStore, error: Exception) -> bool:
    """Return whether a write failed because the store is unavailable or full, and not because of the records."""
    if isinstance(error, StoreAway | StoreFull):  # even if it is back by now
        return True
    return not isinstance(error, StoreClosed) and not is_refusal(error) and not await replies(store)


async def replies(store: LightningStore) -> bool:
    """Return whether the store replies within `_PROBE_SECONDS`, or is closed."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            await store.statistics()
    except (StoreError, TimeoutError) as failure:
        return isinstance(failure, StoreClosed)
    return True
