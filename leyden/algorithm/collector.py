"""`RolloutCollector`: an algorithm's requests in, scored rollouts out, each as soon as it has finished.

It enqueues, waits by event, reads spans in bulk, keeps a budget, and pins in the store exactly the
rollouts that the algorithm will still read. Requests whose ids are derived (`rollout_id_at`,
`rollout_id_of`) are answered from the store if it has them, so a resumed algorithm runs nothing
twice and equal evaluations are run once.

It knows the store. It does not know what a rollout is worth, nor who runs it. To limit something
besides rollouts, add a field to `Budget`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel

from leyden.errors import BudgetExceeded, ConfigError, IllegalTransition, LeydenError, UnknownRollout
from leyden.options import check_number
from leyden.store.base import LightningStore
from leyden.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutStatus,
    Span,
    failure_reason,
    find_final_reward,
)
from leyden.utils import ids

logger = logging.getLogger(__name__)

_READ_TOGETHER = 256
"""Rollouts whose spans are read in one call."""
_RELEASE_TOGETHER = 100
"""Consumed rollouts are unpinned together once there are so many, because each change rewrites all pins."""
_CANCEL_TOGETHER = 16
"""Rollouts that are cancelled at a time."""
_REST_SECONDS_EACH = 25e-6
"""Between two waits, for each rollout waited for: a wait begins with a look at all of them, about ten times as fast."""
_SILENCE_SECONDS = 60.0
"""After so long without a result, and twice as long each time after that, a collection names what it waits for."""
_NAMED = 5
"""Rollouts that are named then."""
_AT_LEAST = 128
"""Rollouts enqueued at a time by `max_unfinished="auto"` if the runners are few or unknown."""


def rollout_id_at(run_id: str, *place: str | int) -> str:
    """Return the id of the rollout at a place in a run, such as ("train", step, index).

    A resumed run derives the same ids, and so finds the rollouts that it has already enqueued.
    """
    return ids.derived_id("ro", run_id, *place)


def rollout_id_of(*content: Any) -> str:
    """Return the id of the rollout with this content, such as (agent's version, prompt, task, repeat).

    Equal contents have one rollout, whichever run asks first, so name everything that the result
    depends on. A rollout that failed is answered from the store too: to try again, add a number.

    content: JSON values, resources and other pydantic models.
    Raises ConfigError for anything else, because its text may differ between processes.
    """
    try:
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"rollout_id_of takes JSON values and pydantic models, got {content!r:.200}: {error}"
        ) from error
    return f"ro-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"


def _plain(value: object) -> Any:
    if isinstance(value, BaseModel):
        return [type(value).__name__, value.model_dump(mode="json")]
    raise TypeError(f"{type(value).__name__} is no JSON value")


@dataclass(slots=True)
class Budget:
    """A limit that a collector never exceeds.

    A rollout counts once, when it is first requested. One that the store has already counts too if
    it belongs to the same run, so that a resumed run spends what an uninterrupted one would have.
    One that another run has paid for is free.
    """

    rollouts: int | None = None
    """How many rollouts may be requested in all. None: no limit."""
    seconds: float | None = None
    """How long rollouts may be requested and may run, from the first request on. The `Evaluator`
    cancels at this time what has not finished, and raises BudgetExceeded. None: no limit."""
    used: int = field(default=0, init=False)
    """Rollouts requested so far."""
    earlier_seconds: float = field(default=0.0, init=False)
    """Time that earlier processes of a resumed run have spent."""
    _started_at: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("rollouts", self.rollouts, at_least=0, whole=True, or_none="no limit")
        check_number("seconds", self.seconds, above=0, or_none="no limit")

    @property
    def is_unlimited(self) -> bool:
        """Return whether neither rollouts nor time are limited."""
        return self.rollouts is None and self.seconds is None

    @property
    def left(self) -> int | None:
        """Return how many rollouts may still be requested; None without a limit."""
        return None if self.rollouts is None else max(0, self.rollouts - self.used)

    @property
    def seconds_left(self) -> float | None:
        """Return for how long rollouts may still be requested; None without a limit."""
        if self.seconds is None:
            return None
        here = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return max(0.0, self.seconds - self.earlier_seconds - here)

    def metrics(self) -> dict[str, float]:
        """Return what is left of each limit, for the metrics of a step."""
        left = {"budget_rollouts_left": self.left, "budget_seconds_left": self.seconds_left}
        return {name: value for name, value in left.items() if value is not None}

    def take(self, rollouts: int) -> None:
        """Count `rollouts` more. Raise BudgetExceeded, and count none, if they are too many or too late."""
        if self._started_at is None:
            self._started_at = time.monotonic()
        if rollouts and self.seconds_left == 0:
            raise BudgetExceeded(
                f"{rollouts:,} more rollouts were requested, and the time of Budget(seconds={self.seconds:g}) is over; "
                "give a larger budget"
            )
        if self.left is not None and rollouts > self.left:
            raise BudgetExceeded(
                f"{rollouts:,} more rollouts were requested, and {self.left:,} are left of Budget(rollouts={self.rollouts:,}); "
                "request no more than budget.left, or give a larger budget"
            )
        self.used += rollouts


@dataclass(frozen=True, slots=True)
class CollectedRollout:
    """One finished rollout: succeeded, failed or cancelled."""

    place: int
    """The request's place in the argument of `collect`, from 0."""
    request: EnqueueRolloutRequest
    rollout: Rollout
    spans: list[Span]
    """Spans of the latest attempt, by sequence id."""
    reward: float | None
    """The final reward; None if the rollout did not succeed, or succeeded without a reward."""
    cached: bool
    """Whether the rollout had finished before it was requested."""

    @property
    def rollout_id(self) -> str:
        """Return the rollout's id."""
        return self.rollout.rollout_id

    @property
    def status(self) -> RolloutStatus:
        """Return the final status: succeeded, failed or cancelled."""
        return self.rollout.status

    @property
    def reason(self) -> str | None:
        """Return in one line why the rollout did not succeed; None if it did."""
        return None if self.status == "succeeded" else failure_reason(self.rollout)


class RolloutCollector:
    """Runs an algorithm's rollouts. Not thread-safe: use it from one event loop at a time.

    Leaving it as a context manager calls `close`.

    store: where runners claim rollouts.
    pin: the name under which needed rollouts are pinned; nothing else may pin under it. Give one that
        a restarted program gives again, so that it takes over the pins. None: a name of its own.
    concurrency: how many rollouts the runners work on at once; None if unknown.
    budget: None for no limit.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        pin: str | None = None,
        concurrency: int | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._store = store
        self._pin = pin or f"collector {secrets.token_hex(6)}"
        self._concurrency = concurrency
        self.budget = budget or Budget()
        """The limit on requests. Set it before the first request."""
        self._unread: dict[str, int] = {}
        """Rollouts that are enqueued and not consumed, each with the number of collections that have yet to yield it."""
        self._kept: dict[str, int] = {}
        """Rollouts that are consumed and kept, each with the iteration whose checkpoint lets it go."""
        self._in_doubt: set[str] = set()
        """Rollouts whose enqueuing was interrupted: the store may have them."""
        self._foreign: set[str] = set()
        """Rollouts of other runs, which are not this collector's to cancel."""
        self._counted: set[str] = set()
        """Rollouts that the budget has counted, or that are free."""
        self._released = 0
        """Rollouts that are pinned and no longer needed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    @property
    def store(self) -> LightningStore:
        """Return the store that rollouts are enqueued in."""
        return self._store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def enqueue(self, requests: Iterable[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue all requests, or none, and pin their rollouts until their results are consumed.

        Return the rollouts as they are now: one whose id the store has already is not run again,
        whatever its status. `collect` with requests of the same ids yields the results. A request's own
        `pin` is replaced by the collector's.
        Raises BudgetExceeded, and enqueues nothing, if the budget does not cover the new ones.
        """
        return [rollout for _, rollout in await self._enqueue(list(requests))]

    async def collect(
        self,
        requests: Iterable[EnqueueRolloutRequest],
        *,
        keep_until: int | None = None,
        max_unfinished: int | Literal["auto"] | None = None,
        check: Callable[[], None] | None = None,
        check_seconds: float = 0.5,
    ) -> AsyncGenerator[CollectedRollout]:
        """Enqueue requests, and yield each one's result as soon as it has finished, in that order.

        A failed or cancelled rollout is a result too. Requests with one id have one rollout and a
        result each. A rollout stays pinned until the caller asks for the next result. If the caller
        stops early, the others go on and stay pinned, until they are collected or cancelled.

        requests: an iterator is read as rollouts are enqueued.
        keep_until: keep the rollouts pinned after that, until `release(iterations)` is called with at
            least this many; for an algorithm that reads them again when it resumes. None: do not.
        max_unfinished: rollouts of this collection that are enqueued and unfinished at a time; None:
            all. "auto": twice as many as the runners work on at once, at least 128, and more whenever
            the runners have nothing left to claim.
        check: called at least every `check_seconds` while rollouts are unfinished. What it raises ends
            the collection.
        Raises BudgetExceeded before it enqueues what the budget does not cover.
        """
        if max_unfinished != "auto":
            check_number("max_unfinished", max_unfinished, at_least=1, whole=True, or_none="all")
        window, silence = _Window(max_unfinished, self._concurrency), _Silence()
        to_come = enumerate(requests)
        waiting: dict[str, list[_Asked]] = {}
        try:
            while True:
                await self._fill(window, to_come, waiting)
                if not waiting:
                    break
                timeout = _SILENCE_SECONDS if check is None else check_seconds
                finished = await self._store.wait_for_any_rollout(rollout_ids=list(waiting), timeout=timeout)
                if check is not None and len(finished) < len(waiting):
                    check()
                if silence.is_due(bool(finished)):
                    await self._tell(list(waiting), silence.seconds)
                for rollouts in _batches(sorted(finished, key=_end_time), _READ_TOGETHER):
                    spans_of = await self._store.query_spans_of([rollout.rollout_id for rollout in rollouts])
                    for rollout in rollouts:
                        asked = waiting[rollout.rollout_id]
                        while asked:
                            yield _result(asked[0], rollout, spans_of[rollout.rollout_id])
                            self._consume(rollout.rollout_id, keep_until)
                            del asked[0]
                        del waiting[rollout.rollout_id]
                await self._release_when_many()
                await asyncio.sleep(_REST_SECONDS_EACH * len(waiting))
                await window.widen(self._store)
        finally:
            for rollout_id, asked in waiting.items():
                if rollout_id in self._unread:
                    self._unread[rollout_id] -= len(asked)
        if self._released:
            await self._write_pins()

    async def _tell(self, rollout_ids: Sequence[str], seconds: float) -> None:
        """Log which rollouts a collection waits for, and what they do."""
        shown = await self._store.query_rollouts(rollout_id_in=rollout_ids[:_NAMED])
        rest = len(rollout_ids) - len(shown)
        logger.info(
            "no rollout has finished for %.0f s; waiting for %d: %s%s",
            seconds,
            len(rollout_ids),
            "; ".join(map(_state, shown)),
            f"; and {rest} more" if rest else "",
        )

    async def release(self, iterations: int) -> None:
        """Unpin the results that were kept until at most so many finished iterations.

        What is enqueued, or kept for longer, stays pinned. Safe to repeat.
        """
        self._kept = {rollout_id: until for rollout_id, until in self._kept.items() if until > iterations}
        await self._write_pins()

    async def count_earlier(self, run_id: str, *, seconds: float = 0.0) -> None:
        """Charge the budget for what earlier processes of a resumed run have spent.

        Call it before the first request. Rollouts that are requested again are not counted again.
        seconds: how long the run has taken so far.
        """
        self.budget.earlier_seconds = seconds
        if not self.budget.is_unlimited:
            stored = {rollout.rollout_id for rollout in await self._store.query_rollouts(run_id=run_id)}
            self.budget.used += len(stored - self._counted)
            self._counted |= stored

    async def cancel(self, rollout_ids: Collection[str] | None = None) -> int:
        """Cancel rollouts that this collector has enqueued and that have not finished; return how many.

        Collections under way yield them, with the status `cancelled`; what no collection waits for is
        unpinned. Rollouts of other runs, which this collector only waits for, go on.

        rollout_ids: None for all of them; others than this collector's are left alone.
        """
        async with self._exclusively():
            chosen = {*self._unread, *self._in_doubt} - self._foreign
            to_cancel = chosen if rollout_ids is None else chosen & set(rollout_ids)
            slots = asyncio.Semaphore(_CANCEL_TOGETHER)
            cancelled = sum(await asyncio.gather(*(self._cancel_one(each, slots) for each in to_cancel)))
            self._in_doubt -= to_cancel
            self._unread = {
                rollout_id: readers
                for rollout_id, readers in self._unread.items()
                if readers > 0 or (rollout_ids is not None and rollout_id not in to_cancel)
            }
        await self._write_pins()
        return cancelled

    async def close(self) -> None:
        """Cancel what has not finished, and unpin everything. Safe to repeat."""
        await self.cancel()
        self._unread.clear()
        self._kept.clear()
        await self._write_pins()

    # ---- enqueuing -----------------------------------------------------------------------------------------------------

    async def _fill(
        self, window: _Window, to_come: Iterator[tuple[int, EnqueueRolloutRequest]], waiting: dict[str, list[_Asked]]
    ) -> None:
        """Enqueue as many of the requests to come as the window has room for."""
        room = window.room(len(waiting))
        asked = list(itertools.islice(to_come, room))
        window.exhausted = room is None or len(asked) < room
        if not asked:
            return
        enqueued = await self._enqueue([request for _, request in asked])
        for (place, _), (request, rollout) in zip(asked, enqueued, strict=True):
            waiting.setdefault(rollout.rollout_id, []).append(_Asked(place, request, rollout.finished))
            self._unread[rollout.rollout_id] += 1

    async def _enqueue(self, requests: Sequence[EnqueueRolloutRequest]) -> list[tuple[EnqueueRolloutRequest, Rollout]]:
        """Enqueue the requests. Return each with its id and its rollout."""
        named = [
            request.model_copy(update={"rollout_id": request.rollout_id or ids.rollout_id(), "pin": self._pin})
            for request in requests
        ]
        if not named:
            return []
        rollout_ids = {str(request.rollout_id) for request in named}
        async with self._exclusively():
            await self._pay(named)
            new = rollout_ids - self._unread.keys()
            self._in_doubt |= new
            try:
                rollouts = await self._store.enqueue_many_rollouts(named)
            except LeydenError:
                self._in_doubt -= new
                raise
            self._in_doubt -= new
            for request, rollout in zip(named, rollouts, strict=True):
                self._unread.setdefault(rollout.rollout_id, 0)
                if rollout.run_id != request.run_id:
                    self._foreign.add(rollout.rollout_id)
        return list(zip(named, rollouts, strict=True))

    async def _pay(self, requests: Sequence[EnqueueRolloutRequest]) -> None:
        """Count the requests that the budget has not counted yet. A failed enqueuing that is repeated is paid once."""
        if self.budget.is_unlimited:
            return
        new = {str(request.rollout_id): request for request in requests if request.rollout_id not in self._counted}
        stored = await self._store.query_rollouts(rollout_id_in=list(new)) if new else ()
        free = sum(rollout.run_id != new[rollout.rollout_id].run_id for rollout in stored)
        self.budget.take(len(new) - free)
        self._counted.update(new)

    # ---- pins ----------------------------------------------------------------------------------------------------------

    def _consume(self, rollout_id: str, keep_until: int | None) -> None:
        """The caller has asked for what comes after this rollout's result."""
        if rollout_id not in self._unread:
            return  # closed meanwhile
        self._unread[rollout_id] -= 1
        if keep_until is not None:
            self._kept[rollout_id] = max(keep_until, self._kept.get(rollout_id, keep_until))
        if self._unread[rollout_id] <= 0:
            del self._unread[rollout_id]
            self._released += rollout_id not in self._kept

    async def _release_when_many(self) -> None:
        """Unpin consumed rollouts if they are many beside the needed ones, so that all changes together stay cheap."""
        if self._released >= max(_RELEASE_TOGETHER, (len(self._unread) + len(self._kept)) // 2):
            await self._write_pins()

    async def _write_pins(self) -> None:
        async with self._exclusively():  # or rollouts that are enqueued meanwhile would lose their pins
            self._released = 0
            await self._store.pin(self._pin, list({**self._unread, **self._kept}))

    def _exclusively(self) -> asyncio.Lock:
        """Return the lock of the running loop; a sync algorithm may start one after another."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock

    async def _cancel_one(self, rollout_id: str, slots: asyncio.Semaphore) -> bool:
        async with slots:
            try:
                await self._store.update_rollout(rollout_id, status="cancelled")
            except (IllegalTransition, UnknownRollout):  # it has finished, or never was
                return False
            return True


class _Silence:
    """The time since a collection had its last result."""

    def __init__(self) -> None:
        self._since, self._limit = time.monotonic(), _SILENCE_SECONDS

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def is_due(self, has_result: bool) -> bool:
        """Note whether there is a result now; return whether the silence has lasted long enough to speak of it."""
        if has_result:
            self._since, self._limit = time.monotonic(), _SILENCE_SECONDS
        if self.seconds < self._limit:
            return False
        self._limit *= 2
        return True


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of a collection whose result is still to be yielded."""

    place: int
    request: EnqueueRolloutRequest
    cached: bool


class _Window:
    """How many rollouts of one collection are enqueued and unfinished at a time."""

    def __init__(self, max_unfinished: int | Literal["auto"] | None, concurrency: int | None) -> None:
        self._grows = max_unfinished == "auto"
        self._most = max(_AT_LEAST, 2 * (concurrency or 1)) if max_unfinished == "auto" else max_unfinished
        self.exhausted = False
        """Whether there are no more requests."""

    def room(self, unfinished: int) -> int | None:
        """Return how many more may be enqueued; None: all."""
        return None if self._most is None else max(0, self._most - unfinished)

    async def widen(self, store: LightningStore) -> None:
        """Double the window if the runners could take more: no rollout waits, and most of the window is under way."""
        if not self._grows or self._most is None or self.exhausted:
            return
        count = (await store.statistics())["rollouts_by_status"].get
        waiting, under_way = count("queuing", 0) + count("requeuing", 0), count("preparing", 0) + count("running", 0)
        if waiting == 0 and under_way > self._most / 2:
            self._most *= 2


def _batches(rollouts: Sequence[Rollout], size: int) -> Iterator[Sequence[Rollout]]:
    return (rollouts[start : start + size] for start in range(0, len(rollouts), size))


def _state(rollout: Rollout) -> str:
    """Return what an unfinished rollout does, in a few words."""
    if not isinstance(rollout, AttemptedRollout) or rollout.status in ("queuing", "requeuing"):
        return f"{rollout.rollout_id} {rollout.status}, and no runner has claimed it"
    attempt, limit = rollout.attempt, rollout.config.timeout_seconds
    ends = "it has no time limit" if limit is None else f"timeout_seconds={limit:g} ends it"
    lasted = time.time() - attempt.start_time
    return f"{rollout.rollout_id} {attempt.status} for {lasted:.0f} s on {attempt.worker_id or 'a runner'}, {ends}"


def _end_time(rollout: Rollout) -> float:
    return rollout.end_time or 0.0


def _result(asked: _Asked, rollout: Rollout, spans: list[Span]) -> CollectedRollout:
    return CollectedRollout(
        place=asked.place,
        request=asked.request,
        rollout=rollout,
        spans=spans,
        reward=find_final_reward(spans) if rollout.status == "succeeded" else None,
        cached=asked.cached,
    )
