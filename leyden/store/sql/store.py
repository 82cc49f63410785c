"""`LightningStore` over a SQL driver: a table of which body function is which method, and the three methods that wait.

It knows no database and no thread. To add a method: the protocol in `store/base.py`, a function in `body/`, a line in
the table here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

from leyden.errors import StoreError
from leyden.store.base import LightningStore, StoreCapabilities, StoreStatistics
from leyden.store.notify import Signals
from leyden.store.sql.body import attempts, resources, rollouts, spans, statistics, workers
from leyden.store.sql.driver import Driver
from leyden.types import AttemptedRollout, Rollout

__all__ = ["SqlLightningStore"]

F = TypeVar("F", bound=Callable[..., Any])


def _reads(method: F, operation: Callable[..., Any]) -> F:
    """The protocol's `method`, as a read of the body's `operation`; a test compares their arguments."""

    @wraps(method, updated=())
    def read(self: SqlLightningStore, *args: Any, **kwargs: Any) -> Any:
        return self._driver.read(operation, args, kwargs)  # pyright: ignore[reportPrivateUsage] -- becomes a method

    return cast(F, read)


def _writes(method: F, operation: Callable[..., Any]) -> F:
    """The same as a write."""

    @wraps(method, updated=())
    def write(self: SqlLightningStore, *args: Any, **kwargs: Any) -> Any:
        return self._driver.write(operation, args, kwargs)  # pyright: ignore[reportPrivateUsage] -- becomes a method

    return cast(F, write)


class SqlLightningStore(LightningStore):
    """A store whose truth is a SQL database that this process reaches through `driver`."""

    def __init__(self, driver: Driver, signals: Signals, *, durable: bool) -> None:
        self._driver = driver
        self._signals = signals
        self._durable = durable
        self._opened = time.monotonic()

    @property
    def url(self) -> str:
        return self._driver.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=False, otlp_traces=False, durable=self._durable
        )

    def __reduce__(self) -> NoReturn:
        raise StoreError(
            f"{self.url} belongs to the process that opened it and cannot be pickled; "
            "let the other process open a store of its own, or talk to this one's server"
        )

    async def close(self) -> None:
        await self._driver.close()
        self._signals.close()

    start_rollout = _writes(LightningStore.start_rollout, rollouts.start_rollout)
    enqueue_many_rollouts = _writes(LightningStore.enqueue_many_rollouts, rollouts.enqueue_many_rollouts)
    start_attempt = _writes(LightningStore.start_attempt, attempts.start_attempt)
    add_many_spans = _writes(LightningStore.add_many_spans, spans.add_many_spans)
    get_many_span_sequence_ids = _writes(LightningStore.get_many_span_sequence_ids, spans.get_many_span_sequence_ids)
    query_spans = _reads(LightningStore.query_spans, spans.query_spans)
    query_spans_of = _reads(LightningStore.query_spans_of, spans.query_spans_of)
    query_rollouts = _reads(LightningStore.query_rollouts, rollouts.query_rollouts)
    get_rollout_by_id = _reads(LightningStore.get_rollout_by_id, rollouts.get_rollout_by_id)
    query_attempts = _reads(LightningStore.query_attempts, attempts.query_attempts)
    get_latest_attempt = _reads(LightningStore.get_latest_attempt, attempts.get_latest_attempt)
    get_attempt_by_id = _reads(LightningStore.get_attempt_by_id, attempts.get_attempt_by_id)
    update_rollout = _writes(LightningStore.update_rollout, rollouts.update_rollout)
    update_attempt = _writes(LightningStore.update_attempt, attempts.update_attempt)
    sweep = _writes(LightningStore.sweep, attempts.sweep)
    release_claims = _writes(LightningStore.release_claims, attempts.release_claims)
    add_resources = _writes(LightningStore.add_resources, resources.add_resources)
    update_resources = _writes(LightningStore.update_resources, resources.update_resources)
    get_resources_by_id = _reads(LightningStore.get_resources_by_id, resources.get_resources_by_id)
    get_latest_resources = _reads(LightningStore.get_latest_resources, resources.get_latest_resources)
    query_resources = _reads(LightningStore.query_resources, resources.query_resources)
    query_workers = _reads(LightningStore.query_workers, workers.query_workers)
    get_worker_by_id = _reads(LightningStore.get_worker_by_id, workers.get_worker_by_id)
    update_worker = _writes(LightningStore.update_worker, workers.update_worker)

    async def next_deadline(self) -> float | None:
        """When `sweep` will have something to do if nothing more is heard of any attempt; None for never."""
        return await self._driver.read(attempts.next_deadline, (), {})

    async def statistics(self) -> StoreStatistics:
        totals, by_status = await self._driver.read(statistics.counts, (), {})
        return StoreStatistics(
            name=type(self).__name__,
            total_rollouts=totals["rollouts"],
            total_attempts=totals["attempts"],
            total_spans=totals["spans"],
            total_resources=totals["resources"],
            total_workers=totals["workers"],
            rollouts_by_status=by_status,
            uptime_seconds=time.monotonic() - self._opened,
        )

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout_seconds: float = 0.0
    ) -> Sequence[AttemptedRollout]:
        if limit <= 0:
            return []
        if timeout_seconds <= 0:
            claimed = await self._claim(limit, worker_id)
            if not claimed:
                await asyncio.sleep(0)  # a caller that polls must let the others work
            return claimed
        deadline = time.monotonic() + timeout_seconds
        with self._signals.claim() as waiter:
            while True:
                self._signals.looking(waiter)
                claimed = await self._claim(limit, worker_id)
                if claimed or not await waiter.wait(deadline - time.monotonic()):
                    return claimed

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, len(set(rollout_ids)), timeout)

    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, min(1, len(rollout_ids)), timeout)

    async def _claim(self, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        return await self._driver.write(attempts.claim, (limit, worker_id), {}, undo=attempts.unclaim)

    async def _wait(self, rollout_ids: Sequence[str], needed: int, timeout: float | None) -> Sequence[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._signals.rollouts(rollout_ids, needed=needed) as waiter:
            finished = await self._finished(rollout_ids)
            if len(finished) >= needed or (timeout is not None and timeout <= 0):
                return finished
            if not self._signals.found(waiter, [rollout.rollout_id for rollout in finished]):
                await waiter.wait(None if deadline is None else deadline - time.monotonic())
        return await self._finished(rollout_ids)

    async def _finished(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        return await self._driver.read(rollouts.finished_rollouts, (rollout_ids,), {})
