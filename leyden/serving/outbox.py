"""`Outbox`: delivers a session's records to the store.

A record is in a file when `put` returns, so it survives the death of the process. It is delivered
in the background: once each, in order, also by the next process with this file. While the store is
away or full, records wait. A record on which the store itself fails is set aside (`SetAside`). The
module knows feedback and live rollouts, and nothing of labels, gateways or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

from pydantic import TypeAdapter

from leyden.errors import GatewayError, LeydenError, StoreClosed, StoreError, UnknownRollout
from leyden.gateway.aside import SetAside, takes_nothing
from leyden.gateway.spool import Spool
from leyden.store.base import LightningStore
from leyden.types import Feedback, LiveRollout

logger = logging.getLogger(__name__)

OutboxRecord = Feedback | LiveRollout

_RECORDS: TypeAdapter[OutboxRecord] = TypeAdapter(OutboxRecord)
_BATCH = 256
"""The most records that are written together."""
_LINGER_SECONDS = 0.05
"""Seconds that the first record of a batch waits for others."""
_AGAIN_SECONDS = 1.0
"""The pause between two tries to reach a store that is away."""
_UNKNOWN_SECONDS = 900.0
"""The seconds for which feedback waits for its rollout, which another process may not have reported
yet."""
_TRIES = 5
"""How often a batch is tried again if the store fails on every record of it. The pauses double."""


class Outbox:
    """A queue of records on disk, and their delivery to the store.

    `put` may be called from any thread. `deliver` runs in one event loop until it is cancelled.
    """

    def __init__(self, store: LightningStore, path: Path | None, *, max_bytes: int) -> None:
        """path: the file; None for a temporary one, which is lost with this process.
        max_bytes: the largest size of the file.
        """
        self._store = store
        self._spool: Spool[OutboxRecord] = Spool(path, max_bytes=max_bytes, items=_RECORDS)
        self.aside = SetAside(self._spool, store=store, retry=self._must_wait)
        """Records that the store failed to take."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._empty = threading.Event()
        self.store_error: str | None = None
        """Why the store takes no records at the moment; None if it does."""
        self.refused = 0
        """How many records the store has refused, such as feedback about unknown rollouts."""

    def __len__(self) -> int:
        """Return the number of records that are not in the store yet."""
        return len(self._spool)

    def put(self, record: OutboxRecord) -> None:
        """Write a record to the file, from which it is sent to the store.

        Raise StoreError if the file has its largest size, GatewayError if it cannot be written (a
        full disk), ConfigError if the record cannot be encoded as JSON.
        """
        with self._lock:
            was_empty = not len(self._spool)
            if not self._spool.append([record]):
                raise StoreError(
                    f"{len(self._spool):,} records wait already for {self._store.url}, as many as spool_bytes allows; give the "
                    f"session a larger spool_bytes, and check the store ({self.store_error or 'it is slow'})"
                )
            self._empty.clear()
        if was_empty and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ready.set)

    def wait_until_empty(self, seconds: float) -> bool:
        """Block until all records are delivered, for at most `seconds`, and return whether they
        are.
        """
        return self._empty.wait(seconds)

    async def deliver(self) -> None:
        """Write records to the store as they are put, until cancelled."""
        self._loop = asyncio.get_running_loop()
        failures = 0
        while True:
            with self._lock:
                batch = self._spool.first(_BATCH)
                if not batch:
                    self._empty.set()
            if not batch:
                self._ready.clear()
                if not len(self._spool):
                    await self._ready.wait()
                    await asyncio.sleep(_LINGER_SECONDS)
                continue
            try:
                later, failed = await self._write(batch)
            except StoreClosed:
                raise
            except Exception as error:  # noqa: BLE001 -- after any error records wait until the store takes them
                self._wait_for_store(error)
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            if len(failed) == len(batch) and failures < _TRIES:  # perhaps the store is at fault, not its records
                self._wait_for_store(failed[0][1])
                await asyncio.sleep(_AGAIN_SECONDS * 2**failures)
                failures += 1
                continue
            self.store_error, failures = None, 0
            with self._lock:
                later += self._set_aside(failed)
                moved = self._move_back(later, len(batch))
            if len(later) == len(batch) or not moved:
                await asyncio.sleep(_AGAIN_SECONDS)

    def close(self) -> None:
        """Close the file. Waiting records stay in a file that has a name."""
        with self._lock:
            self._spool.close()
            self.aside.close()

    def _wait_for_store(self, error: Exception) -> None:
        """Note that the store does not take records, and log it the first time."""
        if self.store_error is None:
            logger.warning("records of live rollouts and feedback wait for %s: %s", self._store.url, error)
        self.store_error = str(error) or type(error).__name__

    def _set_aside(self, failed: list[tuple[OutboxRecord, Exception]]) -> list[OutboxRecord]:
        """Move records on which the store fails to their own file; return those that do not fit."""
        if not failed:
            return []
        records = [record for record, _ in failed]
        said = f"{self._store.url} fails on {len(records)} records, such as one of rollout {records[0].rollout_id!r}"
        return records[self.aside.append(records, said, failed[0][1]) :]

    def _move_back(self, later: list[OutboxRecord], count: int) -> bool:
        """Remove the first `count` records, and append those of `later` behind the others. Return
        False, and change nothing, if the disk has no room for them.

        The file's largest size does not apply, because these records were within it already.
        """
        try:
            self._spool.append(later, bounded=False)
        except GatewayError as error:  # nothing was added, and the batch stays at the front
            logger.warning("feedback that waits for its rollout stays at the front: %s", error)
            return False
        self._spool.drop(count)
        return True

    async def _write(
        self, batch: list[OutboxRecord]
    ) -> tuple[list[OutboxRecord], list[tuple[OutboxRecord, Exception]]]:
        """Write records to the store. Return the ones to retry later, and the ones on which the
        store fails, each with its error.

        Raise the store's error if it is away or full.
        """
        try:
            await self._add(batch)
            return [], []
        except StoreClosed:
            raise
        except Exception as error:
            if await takes_nothing(self._store, error):
                raise
        later: list[OutboxRecord] = []
        failed: list[tuple[OutboxRecord, Exception]] = []
        for record in batch:  # one bad record must not take its siblings along
            try:
                if await self._must_wait(record):
                    later.append(record)
            except StoreClosed:
                raise
            except Exception as error:
                if await takes_nothing(self._store, error):
                    raise
                failed.append((record, error))
        return later, failed

    async def _must_wait(self, record: OutboxRecord) -> bool:
        """Write a record to the store. Return True if it must wait, because its rollout may still
        arrive; False if it is written, or if the store has refused it, so that it is dropped.

        Raise StoreError if the store is away.
        """
        try:
            await self._add([record])
        except StoreError:
            raise
        except UnknownRollout as error:
            age = time.time() - (getattr(record, "given_time", None) or 0.0)  # only feedback has a time
            if 0 <= age < _UNKNOWN_SECONDS:
                return True
            self._refuse(record, error)
        except LeydenError as error:
            self._refuse(record, error)
        return False

    async def _add(self, records: list[OutboxRecord]) -> None:
        """Write records to the store."""
        if live := [record for record in records if isinstance(record, LiveRollout)]:
            await self._store.record_live_rollouts(live)
        if feedback := [record for record in records if isinstance(record, Feedback)]:
            await self._store.add_many_feedback(feedback)

    def _refuse(self, record: OutboxRecord, error: LeydenError) -> None:
        """Count and log a record that the store refused."""
        self.refused += 1
        logger.error(
            "%s refused a record of rollout %r, which is dropped: %s", self._store.url, record.rollout_id, error
        )
