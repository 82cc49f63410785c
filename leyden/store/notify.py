"""Who waits for what, inside one process: claims for the queue, anyone for rollouts to finish.

It knows no database: a store publishes what was committed, and waiters on any event loop wake up. Nothing polls, and no
thread is parked for a waiter. To wait for something new, add a kind of waiter here and a word to `publish`.

A wake-up is a hint to look again, never the truth, so a spurious one is harmless. One is never lost: a waiter registers
before it looks, and a claim that was woken and leaves without having looked passes its wake-up on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress

__all__ = ["ClaimWaiter", "RolloutWaiter", "Signals", "Waiter"]


class Waiter:
    """One task that waits, on the loop where it was made. `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Let the task go on. Does nothing when its loop is closed: nobody waits there."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, seconds: float | None) -> bool:
        """Until `wake` was called (True) or `seconds` have passed (False; None: no limit)."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return self._woken.is_set()
        return True

    def reset(self) -> None:
        """Wait for the next wake-up."""
        self._woken.clear()


class ClaimWaiter(Waiter):
    """A claim that waits for the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.told = False
        """Whether it was woken and has not looked since. Guarded by the lock of its `Signals`."""


class RolloutWaiter(Waiter):
    """A task that waits until `needed` of its rollouts are finished."""

    def __init__(self, rollout_ids: Iterable[str], needed: int) -> None:
        super().__init__()
        self.pending = set(rollout_ids)
        """Those not known to be finished. Guarded by the lock of its `Signals`, like the next."""
        self.needed = needed


class Signals:
    """The waiters of one store. Publishing costs what the news touches, whatever the number of waiters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[ClaimWaiter, None] = {}
        self._rollouts: dict[str, dict[RolloutWaiter, None]] = {}

    def publish(self, claimable: int, finished: Iterable[str]) -> None:
        """Rollouts were put in the queue, rollouts were finished: call after the commit, from any thread."""
        with self._lock:
            wake: list[Waiter] = []
            if claimable:
                wake += self._tell_claims(claimable)
            for rollout_id in finished:
                for waiter in self._rollouts.pop(rollout_id, {}):
                    if _count(waiter, rollout_id):
                        wake.append(waiter)
        for waiter in wake:
            waiter.wake()

    def close(self) -> None:
        """Wake everyone; they look again, and learn that the store is closed."""
        with self._lock:
            waiters: set[Waiter] = {*self._claims}
            for group in self._rollouts.values():
                waiters.update(group)
        for waiter in waiters:
            waiter.wake()

    @contextmanager
    def claim(self) -> Generator[ClaimWaiter, None, None]:
        """A registered waiter for the queue."""
        waiter = ClaimWaiter()
        with self._lock:
            self._claims[waiter] = None
        try:
            yield waiter
        except BaseException:
            waiter.told = True  # its last look may not have happened
            raise
        finally:
            with self._lock:
                del self._claims[waiter]
                heirs = self._tell_claims(1) if waiter.told else []
            for heir in heirs:
                heir.wake()

    def looking(self, waiter: ClaimWaiter) -> None:
        """The waiter is about to look at the queue: what was published before is seen by that."""
        with self._lock:
            waiter.told = False
            waiter.reset()

    @contextmanager
    def rollouts(self, rollout_ids: Iterable[str], *, needed: int) -> Generator[RolloutWaiter, None, None]:
        """A registered waiter that wakes when `needed` of these rollouts are finished."""
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

    def found(self, waiter: RolloutWaiter, finished: Iterable[str]) -> bool:
        """The waiter looked and found these finished; whether, with what was published since, it need not wait."""
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

    def _tell_claims(self, count: int) -> list[ClaimWaiter]:
        """Choose up to `count` claims that were not told yet, the longest waiting first. Call with the lock held."""
        told: list[ClaimWaiter] = []
        for waiter in self._claims:
            if len(told) == count:
                break
            if not waiter.told:
                waiter.told = True
                told.append(waiter)
        return told


def _count(waiter: RolloutWaiter, rollout_id: str) -> bool:
    """One more of the waiter's rollouts is finished: whether that was the last one it needed."""
    waiter.pending.discard(rollout_id)
    waiter.needed -= 1
    return waiter.needed == 0
