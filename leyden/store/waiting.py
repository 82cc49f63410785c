"""Implement the store's methods that wait, on three operations that return at once.

The module knows signals, and neither a database nor a network. Stores in this process, on a shared database or behind a
server all wait in the same way. They differ in the source of their `Signals`: commits, notifications of the database,
or news from the server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from leyden.errors import ConfigError, StoreClosed
from leyden.store.base import LightningStore
from leyden.store.notify import Signals
from leyden.types import UNSET, AttemptedRollout, News, Rollout, SpanPage, Unset


class WaitingStore(LightningStore):
    """A store whose waiting methods wait for its `Signals`. A subclass implements three operations that return at once:
    `_claim`, `_finished` and `_new_spans`.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._reading = threading.Lock()
        self._read_up_to: str | None = None
        """The cursor for callers of `poll_new_spans` that pass none."""

    @abstractmethod
    async def _claim(self, limit: int, worker_id: str | None, claim_id: str | None) -> Sequence[AttemptedRollout]:
        """Claim rollouts as `dequeue_many_rollouts` does, without waiting."""

    @abstractmethod
    async def _finished(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        """Return the finished ones of these rollouts, in the order given. Raise UnknownRollout."""

    @abstractmethod
    async def _new_spans(self, after: str | None, rollout_ids: Sequence[str] | None, limit: int) -> SpanPage:
        """Return up to `limit` spans after a cursor, and the next cursor, without waiting."""

    async def _expect_signals(self) -> None:
        """Make sure that signals arrive. A store behind a server starts to read news; others need nothing."""

    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        timeout_seconds: float = 0.0,
        claim_id: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        if limit <= 0:
            return []
        if timeout_seconds <= 0:
            claimed = await self._claim(limit, worker_id, claim_id)
            if not claimed:
                await asyncio.sleep(0)  # a caller that polls must let the others work
            return claimed
        deadline = time.monotonic() + timeout_seconds
        with self._signals.claim() as waiter:
            while True:
                self._signals.begin_read(waiter)
                claimed = await self._claim(limit, worker_id, claim_id)
                if claimed or not await waiter.wait(deadline - time.monotonic()):
                    return claimed

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, len(set(rollout_ids)), timeout)

    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, min(1, len(rollout_ids)), timeout)

    async def poll_new_spans(
        self,
        *,
        after: str | Literal["latest"] | Unset | None = UNSET,
        rollout_ids: Sequence[str] | None = None,
        limit: int = 1000,
        timeout_seconds: float = 0.0,
    ) -> SpanPage:
        if not isinstance(after, Unset):
            return await self._poll(after, rollout_ids, limit, timeout_seconds)
        if rollout_ids is not None:
            raise ConfigError(
                "poll_new_spans(rollout_ids=...) needs a cursor: after=None for the first span there is, 'latest', or the "
                "`after` of the last page; without one, a store remembers only how far it has read the spans of all rollouts"
            )
        deadline = time.monotonic() + timeout_seconds
        while True:
            after = self._read_up_to
            page = await self._poll(after, None, limit, deadline - time.monotonic())
            with self._reading:
                if self._read_up_to == after:  # if not, another caller has returned these spans meanwhile
                    self._read_up_to = page.after
                    return page

    async def _poll(
        self, after: str | None, rollout_ids: Sequence[str] | None, limit: int, timeout_seconds: float
    ) -> SpanPage:
        """Return new spans after a cursor. Wait up to `timeout_seconds` for the first."""
        if timeout_seconds <= 0:
            return await self._new_spans(after, rollout_ids, limit)
        deadline = time.monotonic() + timeout_seconds
        with self._signals.any_news(spans=True) as waiter:
            while True:
                waiter.reset()
                page = await self._new_spans(after, rollout_ids, limit)
                if page.spans:
                    return page
                await self._expect_signals()
                if not await waiter.wait(deadline - time.monotonic()):
                    return page
                after = page.after

    async def get_news(
        self, *, after: str | None = None, spans: bool = False, labels: bool = False, timeout_seconds: float = 0.0
    ) -> News:
        deadline = time.monotonic() + timeout_seconds
        with self._signals.any_news(spans=spans, labels=labels) as waiter:
            while True:
                waiter.reset()
                if self._signals.closed:
                    raise StoreClosed(f"{self.url} is closed; open it again")
                news = self._signals.since(after, spans=spans, labels=labels)
                if after is None or news.finished or news.claimable or news.spans or news.labels or news.gap:
                    return news
                if not await waiter.wait(deadline - time.monotonic()):
                    return news

    async def _wait(self, rollout_ids: Sequence[str], needed: int, timeout: float | None) -> Sequence[Rollout]:
        """Wait until `needed` of the rollouts are finished, or for `timeout` seconds, and return the finished ones."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._signals.rollouts(rollout_ids, needed=needed) as waiter:
            while True:
                waiter.reset()
                finished = await self._finished(rollout_ids)
                if len(finished) >= needed or (timeout is not None and timeout <= 0):
                    return finished
                if self._signals.record_finished(waiter, [rollout.rollout_id for rollout in finished]):
                    continue
                await self._expect_signals()
                if not await waiter.wait(None if deadline is None else deadline - time.monotonic()):
                    return await self._finished(rollout_ids)
