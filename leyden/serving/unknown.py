"""`UnknownRollouts`: feedback about rollouts that the store does not know yet.

Another process may report the rollout later. So each piece is tried again, with pauses that double, until the store has
answered for `_UNKNOWN_SECONDS` that it does not know the rollout. Time in which the store is unavailable does not
count, and neither does any wall clock. The module knows a spool and feedback; its owner writes to the store.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from leyden.errors import GatewayError, StoreClosed, UnknownRollout
from leyden.gateway.spool import Spool
from leyden.types import Feedback, LiveRollout

logger = logging.getLogger(__name__)

_UNKNOWN_SECONDS = 900.0
"""The seconds for which feedback waits for its rollout, from the store's first answer that it does not know it."""
_ROUND_SECONDS, _MAX_SECONDS = 1.0, 60.0
"""The seconds between two rounds of tries, and the longest pause between two tries of a piece."""
_ROUND_RECORDS, _ROUND_BYTES = 200, 4 * 2**20
"""The most records and bytes that one round tries, those with the fewest tries first."""


@dataclass(slots=True)
class _Waiting:
    """A piece of feedback, as a line of JSON."""

    line: bytes
    since: float | None
    """When the store first answered that it does not know the rollout, by the monotonic clock; None if the store has
    been unavailable since."""
    due: float
    """When it is tried again, by the monotonic clock."""
    pause: float
    """Seconds between the last try and that one."""


class UnknownRollouts:
    """Feedback that waits for its rollout, in memory and in a file.

    All methods belong to one event loop, except `len`, which any thread may call.
    """

    def __init__(
        self,
        spool: Spool[Feedback | LiveRollout],
        *,
        write: Callable[[Feedback | LiveRollout], Awaitable[None]],
        ended: Callable[[Sequence[bytes]], None],
    ) -> None:
        """spool: the file, with what an earlier process left there. Closed by `close`.
        write: writes one record to the store, or puts it elsewhere. Raises UnknownRollout if the store does not know
            its rollout, and an error for a store that is unavailable.
        ended: called with the lines of feedback that waits no longer.
        """
        self._spool, self._write, self._ended = spool, write, ended
        self._any = asyncio.Event()
        self._waiting: list[_Waiting] = []
        self._dead_bytes = 0
        """The bytes in the file of records that wait no longer."""
        self.dropped = 0
        """How many records were dropped because their rollouts stayed unknown."""
        self._take(spool.lines(), None)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, lines: Sequence[bytes]) -> int:
        """Add records that the store has just refused as unknown, and return how many of the first ones fit.

        Raise GatewayError, and add none, if the file cannot be written.
        """
        kept = self._spool.append_lines(lines)
        if kept < len(lines) and self._dead_bytes:
            self._rewrite()
            kept += self._spool.append_lines(lines[kept:])
        self._take(lines[:kept], time.monotonic())
        return kept

    async def run(self) -> None:
        """Try the records again, each after its pause, until cancelled."""
        while True:
            if not self._waiting:
                self._any.clear()
                await self._any.wait()
            await asyncio.sleep(_ROUND_SECONDS)
            try:
                await self._round()
            except StoreClosed:
                raise
            except Exception as error:  # noqa: BLE001 -- after any error records wait until the store answers
                logger.debug("feedback about unknown rollouts waits: %s", error)
                for each in self._waiting:
                    each.since = None

    def close(self) -> None:
        """Close the file. Records in a file that has a name stay there."""
        self._spool.close()

    def _take(self, lines: Sequence[bytes], since: float | None) -> None:
        now = time.monotonic()
        self._waiting += [_Waiting(line, since, now + _ROUND_SECONDS, _ROUND_SECONDS) for line in lines]
        if lines:
            self._any.set()

    async def _round(self) -> None:
        """Try some of the records that are due. Raise the store's error if it is unavailable."""
        now, size = time.monotonic(), 0
        due = heapq.nsmallest(
            _ROUND_RECORDS,
            (each for each in self._waiting if each.due <= now),
            key=lambda each: (each.pause, each.due),
        )
        done: list[_Waiting] = []
        expired: list[str] = []
        try:
            for each in due:
                size += len(each.line)
                if size > _ROUND_BYTES and size > len(each.line):
                    break
                record = self._spool.load(each.line)
                try:
                    await self._write(record)
                except UnknownRollout:
                    now = time.monotonic()
                    if each.since is None:
                        each.since = now
                    if now - each.since < _UNKNOWN_SECONDS:
                        each.pause = min(2 * each.pause, _MAX_SECONDS)
                        each.due = now + each.pause
                        continue
                    expired.append(record.rollout_id)
                done.append(each)
        finally:
            if done:
                self._remove(done)
            if expired:
                self.dropped += len(expired)
                logger.error(
                    "%d records of feedback are dropped, because the store has not known their rollouts for %g s, such as "
                    "rollout %r",
                    len(expired),
                    _UNKNOWN_SECONDS,
                    expired[0],
                )

    def _remove(self, done: Sequence[_Waiting]) -> None:
        """Remove records from memory, and from the file once they are half of it. Until then, the next process delivers
        them again, which does no harm.
        """
        gone = {id(each) for each in done}
        self._waiting = [each for each in self._waiting if id(each) not in gone]
        self._dead_bytes += sum(len(each.line) for each in done)
        self._ended([each.line for each in done])
        if self._dead_bytes >= sum(len(each.line) for each in self._waiting):
            try:
                self._rewrite()
            except GatewayError as error:
                logger.warning("feedback that waits no longer stays in its file: %s", error)

    def _rewrite(self) -> None:
        self._spool.replace([each.line for each in self._waiting])
        self._dead_bytes = 0
