"""`Outbox`: delivers a session's records to the store.

A record is in a file when `put` returns, so it survives the death of the process. It is delivered in the background:
once each, in order, also by the next process with this file. While the store is unavailable or full, records wait.
Feedback about a rollout that the store does not know waits elsewhere (`unknown`), and so does a record that the store
fails on or refuses (`DeadLetters`). The module knows feedback and live rollouts, and nothing of labels, gateways or
HTTP.

What a store would refuse is refused by `put`, and so is a record that would crowd out the others: one that is too
large, or feedback beyond its share whose rollout no signed claim proves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from leyden.errors import ConfigError, GatewayError, StoreClosed, StoreError, UnknownRollout
from leyden.gateway.dead_letters import DeadLetters, is_refusal, takes_nothing
from leyden.gateway.spool import Spool
from leyden.serving.unknown import UnknownRollouts
from leyden.store.base import LightningStore
from leyden.types import Feedback, LiveRollout
from leyden.types.checks import check_feedback, check_live_rollout

logger = logging.getLogger(__name__)

OutboxRecord = Feedback | LiveRollout

_RECORDS: TypeAdapter[OutboxRecord] = TypeAdapter(OutboxRecord)
_BATCH = 256
"""The most records that are written together."""
_LINGER_SECONDS = 0.05
"""Seconds that the first record of a batch waits for others."""
_AGAIN_SECONDS = 1.0
"""The pause between two tries to reach a store that is unavailable."""
_RECORD_PART, _UNPROVEN_PART = 8, 4
"""The file's largest size, divided by that of one record, and by that of feedback without a proven rollout."""
_MIN_BYTES = 64 * 2**10
"""What one record, and feedback without a proven rollout, may take in a small file."""
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
        self._record_bytes = max(max_bytes // _RECORD_PART, _MIN_BYTES)
        self._unproven_limit = max(max_bytes // _UNPROVEN_PART, _MIN_BYTES)
        self._unproven_bytes = 0
        """The bytes of waiting feedback whose rollout is not proven, of this process."""
        self.dead_letters = DeadLetters(self._spool, store=store, retry=self._retry)
        """Records that the store fails on or refuses."""
        self.unknown = UnknownRollouts(
            self._spool.beside("-unknown", max_bytes=self._unproven_limit),
            write=self._write_late,
            ended=self._count_out,
        )
        """Feedback about rollouts that the store does not know."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._empty = threading.Event()
        self.store_error: str | None = None
        """Why the store takes no records at the moment; None if it does."""
        self._refused = 0

    def __len__(self) -> int:
        """Return the number of records that are not in the store yet, without the dead letters."""
        return len(self._spool) + len(self.unknown)

    @property
    def refused(self) -> int:
        """How many records were dropped: the store did not know their rollouts for long, or refused them while the file
        for refused ones was full.
        """
        return self._refused + self.unknown.dropped

    def put(self, record: OutboxRecord) -> None:
        """Write a record to the file, from which it is sent to the store.

        Raise ConfigError for a record that no store takes, or that is larger than an eighth of the file may be. Raise
        StoreError if the file has its largest size, or feedback without a proven rollout a quarter of it, GatewayError
        if the file cannot be written (a full disk).
        """
        if isinstance(record, Feedback):
            check_feedback(record)
        else:
            check_live_rollout(record)
        line = self._spool.line_of(record)
        if len(line) > self._record_bytes:
            raise ConfigError(
                f"the record of rollout {record.rollout_id!r} has {len(line):,} bytes, and one record may have "
                f"{self._record_bytes:,}; leave parts out, or give the session a larger spool_bytes"
            )
        unproven = len(line) if _is_unproven(record) else 0
        with self._lock:
            if unproven and self._unproven_bytes + unproven > self._unproven_limit:
                raise StoreError(
                    f"{self._unproven_bytes:,} bytes of feedback wait already that name their rollouts by id; give the "
                    "claim that begin returned, which proves the rollout, or try again later"
                )
            was_empty = not len(self._spool)
            if not self._spool.append_lines([line]):
                raise StoreError(
                    f"{len(self._spool):,} records wait already for {self._store.url}, as many as spool_bytes allows; give the "
                    f"session a larger spool_bytes, and check the store ({self.store_error or 'it is slow'})"
                )
            self._unproven_bytes += unproven
            self._empty.clear()
        if was_empty and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ready.set)

    def wait_until_empty(self, seconds: float) -> bool:
        """Block until all records are delivered, for at most `seconds`, and return whether they are."""
        return self._empty.wait(seconds)

    async def deliver(self) -> None:
        """Write records to the store as they are put, until cancelled."""
        self._loop = asyncio.get_running_loop()
        failures = 0
        while True:
            with self._lock:
                batch = self._spool.first(_BATCH)
                self._note_empty()
            if not batch:
                self._ready.clear()
                if not len(self._spool):
                    await self._ready.wait()
                    await asyncio.sleep(_LINGER_SECONDS)
                continue
            try:
                written = await self._write(batch)
            except StoreClosed:
                raise
            except Exception as error:  # noqa: BLE001 -- after any error records wait until the store takes them
                self._wait_for_store(error)
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            failed = written.failed
            if len(failed) == len(batch) and failures < _TRIES:  # perhaps the store is at fault, not its records
                self._wait_for_store(failed[0][1])
                await asyncio.sleep(_AGAIN_SECONDS * 2**failures)
                failures += 1
                continue
            self.store_error, failures = None, 0
            with self._lock:
                later = self._keep_unknown(written.unknown) + self._to_dead_letters([*failed, *written.refused])
                moved = True
                try:
                    # The file's largest size does not apply, because these records were within it already.
                    self._spool.append(later, bounded=False)
                    self._spool.drop(len(batch))
                except GatewayError as error:  # no room on the disk: nothing was added, and the batch stays in front
                    logger.warning("records that cannot be written yet stay at the front: %s", error)
                    moved = False
            if moved:
                wait = {id(record) for record in (*later, *written.unknown)}
                done = [each for each in batch if _is_unproven(each) and id(each) not in wait]
                self._count_out([self._spool.line_of(each) for each in done])
            if len(later) == len(batch) or not moved:
                await asyncio.sleep(_AGAIN_SECONDS)

    def close(self) -> None:
        """Close the file. Waiting records stay in a file that has a name."""
        with self._lock:
            self._spool.close()
            self.dead_letters.close()
            self.unknown.close()

    def _note_empty(self) -> None:
        if not len(self):
            self._empty.set()

    def _count_out(self, lines: Sequence[bytes]) -> None:
        """Count these lines as feedback without a proven rollout that waits no longer."""
        with self._lock:
            self._unproven_bytes = max(0, self._unproven_bytes - sum(map(len, lines)))
            self._note_empty()

    def _wait_for_store(self, error: Exception) -> None:
        if self.store_error is None:
            logger.warning("records of live rollouts and feedback wait for %s: %s", self._store.url, error)
        self.store_error = str(error) or type(error).__name__

    def _keep_unknown(self, unknown: list[OutboxRecord]) -> list[OutboxRecord]:
        """Move feedback about unknown rollouts to its own file. Return the records for which it has no room."""
        try:
            return unknown[self.unknown.add([self._spool.line_of(record) for record in unknown]) :]
        except GatewayError as error:
            logger.warning("feedback that waits for its rollout stays where it is: %s", error)
            return unknown

    def _to_dead_letters(self, failed: list[tuple[OutboxRecord, Exception]]) -> list[OutboxRecord]:
        """Move records that the store fails on or refuses to the dead letters. If they do not fit, drop the refused
        ones, and return the others.
        """
        if not failed:
            return []
        records = [record for record, _ in failed]
        failure = f"{self._store.url} fails on {len(records)} records, such as one of rollout {records[0].rollout_id!r}"
        left = failed[self.dead_letters.append(records, failure, failed[0][1]) :]
        refused = [record for record, error in left if is_refusal(error)]
        if refused:
            self._refused += len(refused)
            logger.error(
                "%d records that the store refused are dropped, such as one of rollout %r",
                len(refused),
                refused[0].rollout_id,
            )
        return [record for record, error in left if not is_refusal(error)]

    async def _write(self, batch: list[OutboxRecord]) -> _Written:
        """Write records to the store, and return the rejected ones. Raise the store's error if it is unavailable or
        full.
        """
        written = _Written()
        await self._write_into(written, batch)
        return written

    async def _write_into(self, written: _Written, records: list[OutboxRecord]) -> None:
        """Write records together, or in smaller parts if that fails, so that a bad one does not take its siblings
        along. Their order stays, because the last feedback of a source counts.
        """
        try:
            if live := [record for record in records if isinstance(record, LiveRollout)]:
                await self._store.record_live_rollouts(live)
            if feedback := [record for record in records if isinstance(record, Feedback)]:
                await self._store.add_many_feedback(feedback)
            return
        except StoreClosed:
            raise
        except Exception as error:
            if await takes_nothing(self._store, error):
                raise
            if len(records) == 1:
                return written.add(records[0], error)
        parts = [list(part) for _, part in itertools.groupby(records, _is_unproven)]
        for part in parts if len(parts) > 1 else [[record] for record in records]:
            await self._write_into(written, part)

    async def _write_late(self, record: OutboxRecord) -> None:
        """Write feedback whose rollout the store did not know; if the store fails on it, it is a dead letter. Raise
        UnknownRollout if the rollout is still unknown, and the store's error if the store is unavailable or full.
        """
        written = await self._write([record])
        if written.unknown:
            raise UnknownRollout(f"rollout {record.rollout_id!r} is not in {self._store.url}")
        if self._to_dead_letters([*written.failed, *written.refused]):
            raise StoreError(f"{self._store.url} fails on feedback about rollout {record.rollout_id!r}")

    async def _retry(self, record: OutboxRecord) -> bool:
        """Write a dead letter. Return whether it remains one. Raise the store's error if it is unavailable or full."""
        written = await self._write([record])
        return bool(written.failed or written.refused or self._keep_unknown(written.unknown))


@dataclass(slots=True)
class _Written:
    """The records of a batch that the store does not take. The others are in the store."""

    unknown: list[OutboxRecord] = field(default_factory=list[OutboxRecord])
    """Feedback whose rollout the store does not know."""
    failed: list[tuple[OutboxRecord, Exception]] = field(default_factory=list[tuple[OutboxRecord, Exception]])
    """Records on which the store itself fails."""
    refused: list[tuple[OutboxRecord, Exception]] = field(default_factory=list[tuple[OutboxRecord, Exception]])
    """Records that the store refuses although `put` took them, such as an id that is taken."""

    def add(self, record: OutboxRecord, error: Exception) -> None:
        if isinstance(error, UnknownRollout):
            self.unknown.append(record)
        else:
            (self.refused if is_refusal(error) else self.failed).append((record, error))


def _is_unproven(record: OutboxRecord) -> bool:
    return isinstance(record, Feedback) and record.version is None
