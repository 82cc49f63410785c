"""Waiting inside one process: claims wait for the queue, other callers for rollouts to finish or for spans to arrive.

The module knows no database. A store publishes its own commits and those that it was notified of, and waiters on any
event loop wake up. Nothing polls, and no thread is parked for a waiter. To wait for something new, add a kind of waiter
here and a parameter to `publish`.

A wake-up is a hint to read the store again, so a spurious one is harmless. None is ever lost: a waiter registers before
it reads, and a claim that was woken and leaves without reading wakes another claim.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Literal, TypeAlias

from leyden._lib import ids
from leyden.errors import ConfigError
from leyden.types import News


def check_wait(seconds: float | None) -> None:
    """Raise ConfigError for a wait of NaN seconds, which an event loop's timers cannot order."""
    if seconds is not None and math.isnan(seconds):
        raise ConfigError("a wait of nan seconds never ends; give a number, or infinity")


class Waiter:
    """One task that waits, on the loop where it was made. `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Resume the task. Do nothing if its loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, seconds: float | None) -> bool:
        """Return True once `wake` was called, False after `seconds` (None: no limit). Raise ConfigError for NaN."""
        check_wait(seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return self._woken.is_set()
        return True

    def reset(self) -> None:
        """Clear the wake-ups so far, so that `wait` waits for the next one."""
        self._woken.clear()


_Hears: TypeAlias = Literal["rollouts", "spans", "labels"]
"""The news that a waiter of `any_news` waits for. `rollouts`: queued or finished ones. `spans`: these and new spans.
`labels`: changes of labels and releases alone."""

_REMEMBERED = 100_000
"""The number of finished rollouts that are kept for `since`. A caller with an older cursor gets a gap."""


class ClaimWaiter(Waiter):
    """A claim that waits for the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = False
        """Whether the claim was woken and has not read the queue since. Guarded by the lock of its `Signals`."""


class RolloutWaiter(Waiter):
    """A task that waits until `needed` of its rollouts are finished."""

    def __init__(self, rollout_ids: Iterable[str], needed: int) -> None:
        super().__init__()
        self.pending = set(rollout_ids)
        """Rollouts that are not known to be finished. Guarded by the lock of its `Signals`."""
        self.needed = needed
        """How many of them must still finish."""


class Signals:
    """The waiters of one store. The cost of publishing grows with the waiters that the news concerns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[ClaimWaiter, None] = {}
        self._rollouts: dict[str, dict[RolloutWaiter, None]] = {}
        self._listeners: dict[Waiter, _Hears] = {}
        """The waiters of `any_news`."""
        self._epoch = ids.span_id()
        """A random text in each cursor, which differs in cursors of another or an earlier epoch."""
        self._claimable = 0
        self._spans = 0
        self._labels = 0
        self._finished: deque[str] = deque(maxlen=_REMEMBERED)
        self._finished_ever = 0
        self.closed = False
        """Whether the store is closed, so that no more news will come."""

    def publish(self, claimable: int, finished: Sequence[str], spans: bool, labels: bool = False) -> None:
        """Wake the waiters that these changes concern. Call it after the commit, from any thread.

        claimable: how many rollouts were put in the queue.
        finished: rollouts that finished.
        spans, labels: whether spans were added, and whether labels or releases changed.
        """
        with self._lock:
            self._spans += spans
            self._labels += labels
            if not (claimable or finished or self._listeners):
                return
            wake: list[Waiter] = []
            if claimable:
                self._claimable += claimable
                wake += self._choose_claims(claimable)
            if finished:
                self._finished.extend(finished)
                self._finished_ever += len(finished)
                for rollout_id in finished:
                    for waiter in self._rollouts.pop(rollout_id, {}):
                        if _count(waiter, rollout_id):
                            wake.append(waiter)
            if self._listeners:
                of_rollouts = bool(claimable or finished)
                wake += [
                    waiter
                    for waiter, hears in self._listeners.items()
                    if (labels if hears == "labels" else of_rollouts or (spans and hears == "spans"))
                ]
        for waiter in wake:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake every waiter to read again, because notifications may have been missed."""
        with self._lock:
            self._epoch = ids.span_id()  # a caller with an earlier cursor gets a gap
            waiters: set[Waiter] = {*self._claims, *self._listeners}
            for group in self._rollouts.values():
                waiters.update(group)
        for waiter in waiters:
            waiter.wake()

    def close(self) -> None:
        """Wake every waiter because the store is closed."""
        self.closed = True
        self.wake_all()

    @property
    def wanted(self) -> bool:
        return bool(self._claims or self._rollouts or self._listeners)

    @property
    def spans_wanted(self) -> bool:
        with self._lock:
            return "spans" in self._listeners.values()

    @contextmanager
    def any_news(self, *, spans: bool = False, labels: bool = False) -> Generator[Waiter, None, None]:
        """Register a waiter during the block. It wakes when news of rollouts is published.

        spans: wake for new spans too.
        labels: wake for changes of labels and releases alone; `spans` then has no effect.
        """
        waiter = Waiter()
        with self._lock:
            self._listeners[waiter] = "labels" if labels else "spans" if spans else "rollouts"
        try:
            yield waiter
        finally:
            with self._lock:
                del self._listeners[waiter]

    def since(self, after: str | None, *, spans: bool = False, labels: bool = False) -> News:
        """Return the news that was published after a cursor, with the cursor of now.

        after: the cursor of an earlier result; None returns the cursor alone. For a cursor of another `Signals`, or one
            that is too old, the result is a gap.
        spans: report new spans too.
        labels: report labels and releases, and nothing else.
        """
        with self._lock:
            now = f"{self._epoch}.{self._claimable}.{self._finished_ever}.{self._spans}.{self._labels}"
            epoch, *counts = (after or "").split(".")
            # At most 18 digits, so that `int` is cheap.
            are_numbers = all(count.isdecimal() and len(count) < 19 for count in counts)
            if epoch != self._epoch or len(counts) != 4 or not are_numbers:
                return News(after=now, gap=after is not None)
            claimable, finished, spans_before, labels_before = map(int, counts)
            if labels:
                return News(after=now, labels=self._labels > labels_before)
            missed = self._finished_ever - finished
            if missed > len(self._finished):
                return News(after=now, gap=True)
            recent = list(islice(reversed(self._finished), max(0, missed)))[::-1]
            return News(
                after=now,
                claimable=max(0, self._claimable - claimable),
                finished=recent,
                spans=spans and self._spans > spans_before,
            )

    @contextmanager
    def claim(self) -> Generator[ClaimWaiter, None, None]:
        """Register a waiter for the queue during the block.

        If it was woken and has not read the queue since, another claim is woken at the end.
        """
        waiter = ClaimWaiter()
        with self._lock:
            self._claims[waiter] = None
        try:
            yield waiter
        except BaseException:
            waiter.woken = True  # it may not have read the queue after its last wake-up
            raise
        finally:
            with self._lock:
                del self._claims[waiter]
                heirs = self._choose_claims(1) if waiter.woken else []
            for heir in heirs:
                heir.wake()

    def begin_read(self, waiter: ClaimWaiter) -> None:
        """Clear the wake-ups of a claim that is about to read the queue."""
        with self._lock:
            waiter.woken = False
            waiter.reset()

    @contextmanager
    def rollouts(self, rollout_ids: Iterable[str], *, needed: int) -> Generator[RolloutWaiter, None, None]:
        """Register a waiter during the block. It wakes when `needed` of these rollouts are finished."""
        waiter = RolloutWaiter(rollout_ids, needed)
        with self._lock:
            for rollout_id in waiter.pending:
                self._rollouts.setdefault(rollout_id, {})[waiter] = None
        try:
            yield waiter
        finally:
            with self._lock:
                for rollout_id in waiter.pending:
                    self._forget(rollout_id, waiter)

    def record_finished(self, waiter: RolloutWaiter, finished: Iterable[str]) -> bool:
        """Record the rollouts that a waiter found finished in the store. Return whether it is done, counting the
        rollouts that were published as finished too.
        """
        with self._lock:
            for rollout_id in finished:
                if rollout_id in waiter.pending:
                    _count(waiter, rollout_id)
                    self._forget(rollout_id, waiter)
            return waiter.needed <= 0

    def _forget(self, rollout_id: str, waiter: RolloutWaiter) -> None:
        group = self._rollouts.get(rollout_id)
        if group is not None:
            group.pop(waiter, None)
            if not group:
                del self._rollouts[rollout_id]

    def _choose_claims(self, count: int) -> list[ClaimWaiter]:
        """Mark up to `count` claims as woken, the longest waiting first, and return them. Hold the lock."""
        chosen: list[ClaimWaiter] = []
        for waiter in self._claims:
            if len(chosen) == count:
                break
            if not waiter.woken:
                waiter.woken = True
                chosen.append(waiter)
        return chosen


def _count(waiter: RolloutWaiter, rollout_id: str) -> bool:
    waiter.pending.discard(rollout_id)
    waiter.needed -= 1
    return waiter.needed == 0
