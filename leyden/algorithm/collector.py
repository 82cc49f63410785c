"""`RolloutCollector`: runs an algorithm's requests, and yields each rollout as soon as it has finished.

It enqueues rollouts, waits for them, reads spans in bulk, keeps a budget, and pins in the store exactly the rollouts
that the algorithm will still read. Requests with derived ids (`rollout_id_at`, `rollout_id_of`) are answered from the
store if it has their rollouts. So a resumed algorithm runs nothing twice, and equal evaluations are run once.

A budget of tokens or cost holds requests back: a rollout is enqueued when the limits of its attempts are reserved, and
the unused part is released when it has finished.

The collector knows the store. It does not know what a rollout is worth, nor who runs it. `budget.py` decides what is
limited, and how it is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel

from leyden._lib import ids
from leyden._lib.aio import first_done
from leyden._lib.clock import unix_time
from leyden._lib.numbers import exact_number
from leyden._lib.options import check_number
from leyden.algorithm.budget import Budget, busy_seconds
from leyden.errors import ConfigError, IllegalTransition, LeydenError, UnknownRollout
from leyden.store.base import LightningStore
from leyden.training.live_view import RolloutTally
from leyden.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Span,
    failure_reason,
    find_final_reward,
)
from leyden.types.run_record import algorithm_group

logger = logging.getLogger(__name__)

_READ_TOGETHER = 256
"""How many rollouts' spans are read in one call."""
_RELEASE_TOGETHER = 100
"""Unpin consumed rollouts in batches of at least this size, and at least half of the rollouts still pinned."""
_CANCEL_TOGETHER = 16
"""How many rollouts are cancelled at a time."""
_REST_SECONDS_EACH = 25e-6
"""The pause between two waits, for each pending rollout. A wait begins with a check of all of them, which takes about a
tenth of this, so checks take a tenth of the time at most."""
_SILENCE_SECONDS = 60.0
"""After this many seconds without a result, and after twice as long each further time, a collection logs which rollouts
it waits for."""
_NAMED = 5
"""How many unfinished rollouts such a message names."""
_UNFINISHED: tuple[RolloutStatus, ...] = ("queuing", "preparing", "running", "requeuing")
_AT_LEAST = 128
"""The smallest number of rollouts that `max_unfinished="auto"` enqueues at a time."""

_PendingRequest = tuple[int, EnqueueRolloutRequest, bool]
"""A request of a collection whose result is still to be yielded: its index in the argument of `collect`, the request,
and whether its rollout had finished before it was requested."""


def rollout_id_at(run_id: str, *place: str | int) -> str:
    """Return the id of the rollout at a place in a run, such as ("train", step, index).

    A resumed run derives the same ids, and so finds the rollouts that it has already enqueued.
    """
    return ids.derived_id("ro", run_id, *place)


def rollout_id_of(*content: Any) -> str:
    """Return the id of the rollout with this content, such as (agent's version, prompt, task, repeat).

    Equal contents have one rollout, whichever run requests it first, so include everything that the result depends on.
    A failed rollout is also reused: to try again, add a number.

    content: JSON values, resources and other pydantic models.
    Raise ConfigError for anything else, because its text may differ between processes.
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
    return exact_number(value)


@dataclass(frozen=True, slots=True)
class CollectedRollout:
    """One finished rollout: succeeded, failed or cancelled."""

    place: int
    """The request's index in the argument of `collect`, from 0."""
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
        return self.rollout.rollout_id

    @property
    def status(self) -> RolloutStatus:
        """The final status: succeeded, failed or cancelled."""
        return self.rollout.status

    @property
    def reason(self) -> str | None:
        """Why the rollout did not succeed, in one line; None if it did."""
        return None if self.status == "succeeded" else failure_reason(self.rollout)


class RolloutCollector:
    """Runs an algorithm's rollouts. Not thread-safe: use it from one event loop at a time.

    As a context manager it calls `close` at the end.

    store: where runners claim rollouts.
    pin: the name under which needed rollouts are pinned; nothing else may pin under it. Give a name that a restarted
        program gives again, so that it takes over the pins. None: a random name.
    concurrency: how many rollouts the runners work on at once; None if unknown.
    budget: limits the requests; None: no limit.
    on_unfinished: called when rollouts were requested that a runner must still run.
    tally: counts the collected rollouts, for a live view of them; None: no view.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        pin: str | None = None,
        concurrency: int | None = None,
        budget: Budget | None = None,
        on_unfinished: Callable[[], None] | None = None,
        tally: RolloutTally | None = None,
    ) -> None:
        check_number("concurrency", concurrency, at_least=1, whole=True, or_none="an unknown number")
        self._store = store
        self._pin = pin or f"collector {secrets.token_hex(6)}"
        self._concurrency = concurrency
        self._on_unfinished, self._tally = on_unfinished, tally
        if tally is not None:
            tally.unfinished = lambda: len(self._unread)
        self.budget = budget or Budget()
        """The limit on requests. Set it before the first request."""
        self._unread: dict[str, int] = {}
        """Rollouts that are enqueued and not consumed, each with the number of times that collections will still yield
        it."""
        self._kept: dict[str, int] = {}
        """Rollouts that are consumed but stay pinned, each with the number of iterations after which `release` unpins
        it."""
        self._in_doubt: set[str] = set()
        """Rollouts whose enqueuing was interrupted, so that the store may or may not have them."""
        self._foreign: set[str] = set()
        """Rollouts of other runs, which this collector must not cancel."""
        self._counted: set[str] = set()
        """Rollouts that the budget has counted, or that cost it nothing."""
        self._unsent: dict[str, int] = {}
        """Counted rollouts that are still to be enqueued, each with the number of attempts to reserve for it."""
        self._sent: set[str] = set()
        """Rollouts with a reservation that are in the store."""
        self._calls: dict[str, None] = {}
        """Keys of reservations for attempts that the algorithm makes itself, the newest last."""
        self._freed = asyncio.Event()
        """An event that is set, and replaced by a new one, when a reservation is released."""
        self._released = 0
        """The number of rollouts that are pinned and no longer needed."""
        self._warned: set[str] = set()
        """Problems with the budget that were logged."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    @property
    def store(self) -> LightningStore:
        return self._store

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def enqueue(self, requests: Iterable[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue all requests, or none, and pin their rollouts until their results are consumed.

        Return the rollouts as they are now. If the store has a rollout with a request's id, that one is used and not
        run again, whatever its status. `collect` with requests of the same ids yields the results. A request's own
        `pin` is replaced by the collector's.
        Raise BudgetExceeded, and enqueue nothing, if the budget has no room for the new ones now.
        """
        named = [self._named(request) for request in requests]
        if self.budget.is_reserved:
            await self._settle_finished()
        return await self._enqueue(named, whole=True)

    async def collect(
        self,
        requests: Iterable[EnqueueRolloutRequest],
        *,
        keep_until: int | None = None,
        max_unfinished: int | Literal["auto"] | None = None,
        check: Callable[[], None] | None = None,
        check_seconds: float = 0.5,
    ) -> AsyncGenerator[CollectedRollout]:
        """Enqueue requests, and yield each result as soon as its rollout has finished.

        A failed or cancelled rollout is a result too. Requests with equal ids share one rollout, and each yields a
        result. A rollout stays pinned until the caller requests the next result. If the caller stops early, the other
        rollouts continue and stay pinned, until they are collected or cancelled.

        requests: an iterator is read as rollouts are enqueued.
        keep_until: keep the rollouts pinned after that, until `release(iterations)` is called with at least this
            number; for an algorithm that reads them again when it resumes. None: unpin them.
        max_unfinished: how many rollouts of this collection are enqueued and unfinished at a time; None: all. "auto":
            twice as many as the runners work on at once, at least 128, and more whenever the runners have nothing left
            to claim.
        check: called at least every `check_seconds` while rollouts are unfinished. An error that it raises ends the
            collection.
        Raise BudgetExceeded if the budget has no room for a request. With a budget of tokens or cost, first wait for
        running attempts, which may release part of their reservations, and yield their results.
        """
        if max_unfinished != "auto":
            check_number("max_unfinished", max_unfinished, at_least=1, whole=True, or_none="all")
        window = _Window(max_unfinished, self._concurrency)
        heard_at, silence_seconds = time.monotonic(), _SILENCE_SECONDS
        to_come = enumerate(requests)
        held: deque[tuple[int, EnqueueRolloutRequest]] = deque()
        waiting: dict[str, list[_PendingRequest]] = {}
        try:
            while True:
                await self._fill(window, to_come, held, waiting)
                if not waiting and not held:
                    break
                timeout = _SILENCE_SECONDS if check is None else check_seconds
                if not waiting:
                    await self._wait_for_room(self._unsent.get(str(held[0][1].rollout_id), 1), timeout)
                    if check is not None:
                        check()
                    continue
                others = self._sent - waiting.keys() if held else ()  # when they finish, there may be room
                known = await self._store.wait_for_any_rollout(rollout_ids=[*waiting, *others], timeout=timeout)
                await self._settle(known)
                finished = [rollout for rollout in known if rollout.rollout_id in waiting]
                if check is not None and len(finished) < len(waiting):
                    check()
                if finished:
                    heard_at, silence_seconds = time.monotonic(), _SILENCE_SECONDS
                elif (seconds := time.monotonic() - heard_at) >= silence_seconds:
                    silence_seconds *= 2
                    await self._log_waiting(list(waiting), seconds)
                finished.sort(key=lambda rollout: rollout.end_time or 0.0)
                for start in range(0, len(finished), _READ_TOGETHER):
                    rollouts = finished[start : start + _READ_TOGETHER]
                    spans_of = await self._store.query_spans_of([rollout.rollout_id for rollout in rollouts])
                    for rollout in rollouts:
                        requested, spans = waiting[rollout.rollout_id], spans_of[rollout.rollout_id]
                        reward = find_final_reward(spans) if rollout.status == "succeeded" else None
                        while requested:
                            place, request, cached = requested[0]
                            if self._tally is not None:
                                self._tally.add(rollout, spans, reward, cached=cached)
                            yield CollectedRollout(place, request, rollout, spans, reward, cached)
                            self._consume(rollout.rollout_id, keep_until)
                            del requested[0]
                        del waiting[rollout.rollout_id]
                # Each change rewrites all pins, so few changes keep the total cost low.
                if self._released >= max(_RELEASE_TOGETHER, (len(self._unread) + len(self._kept)) // 2):
                    await self._write_pins()
                await asyncio.sleep(_REST_SECONDS_EACH * len(waiting))
                await window.widen(self._store)
        finally:
            self._give_up([request for _, request in held])
            for rollout_id, requested in waiting.items():
                if rollout_id in self._unread:
                    self._unread[rollout_id] -= len(requested)
        if self._released:
            await self._write_pins()

    async def _log_waiting(self, rollout_ids: Sequence[str], seconds: float) -> None:
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
        """Unpin the rollouts that were collected with a `keep_until` of at most `iterations`. Safe to repeat.

        Rollouts that are enqueued, or kept for longer, stay pinned.
        """
        self._kept = {rollout_id: until for rollout_id, until in self._kept.items() if until > iterations}
        await self._write_pins()

    async def count_earlier(self, run_id: str, *, seconds: float = 0.0) -> None:
        """Charge the budget with what earlier processes of a resumed run have spent.

        Call it before the first request. Rollouts that are requested again are not counted again. Unfinished rollouts
        for which the budget has no room are cancelled.
        seconds: how long the run has taken so far.
        """
        self.budget.earlier_seconds = seconds
        if self.budget.is_unlimited:
            return
        own = await self._store.query_rollouts(group_id=algorithm_group(run_id))
        found = [
            each for each in await self._store.query_rollouts(run_id=run_id) if each.rollout_id not in self._counted
        ]
        self.budget.used += len(found)
        self._counted.update(rollout.rollout_id for rollout in found)
        attempts = {rollout.rollout_id: await self._attempts_of(rollout) for rollout in (*own, *found)}
        self.budget.earlier_seconds = max(seconds, busy_seconds(itertools.chain(*attempts.values())))
        if self.budget.is_reserved:
            for rollout in (*own, *found):
                await self._charge_earlier(rollout, attempts[rollout.rollout_id])

    async def _charge_earlier(self, rollout: Rollout, attempts: Sequence[Attempt]) -> None:
        """Charge the budget with tokens and cost of a rollout that an earlier process has enqueued. Reserve the rest of
        an unfinished one, or cancel it if there is no room.
        """
        if rollout.finished:
            self._warn(self.budget.spend(attempts))
        elif self.budget.reserve(rollout.rollout_id, _attempts_at_most(rollout, attempts)):
            self._sent.add(rollout.rollout_id)
        else:
            await self._cancel_each([rollout.rollout_id])
            self._warn(self.budget.spend(attempts))

    @contextlib.asynccontextmanager
    async def reserve_attempt(self) -> AsyncGenerator[Callable[[Attempt], None]]:
        """Keep room in the budget, during the block, for one attempt that the algorithm makes itself. Wait until there
        is room.

        Yield a function to call with the attempt when it has ended. If it is never called, the attempt counts with its
        limits, because a call may be billed although no answer came. Raise BudgetExceeded if there is no room, and no
        attempt is running that could make room.
        """
        ended: list[Attempt] = []
        if not self.budget.is_reserved:
            yield ended.append
            return
        key = f"call {secrets.token_hex(6)}"
        while not self.budget.reserve(key):
            await self._wait_for_room(1, _SILENCE_SECONDS)
        self._calls[key] = None
        try:
            yield ended.append
        finally:
            del self._calls[key]
            lost = Attempt(rollout_id=key, attempt_id=key, sequence_id=1, start_time=0.0, status="cancelled")
            self._warn(self.budget.settle(key, ended or [lost]))
            self._notify_freed()

    async def cancel(self, rollout_ids: Collection[str] | None = None) -> int:
        """Cancel rollouts that this collector has enqueued and that have not finished. Return how many.

        A running collection yields its cancelled rollouts, with the status `cancelled`. Rollouts that no collection
        waits for are unpinned. Rollouts of other runs, for which this collector only waits, continue.

        rollout_ids: the rollouts to cancel; None: all of this collector. Ids of rollouts that other collectors have
            enqueued are ignored.
        """
        async with self._exclusively():
            chosen = {*self._unread, *self._in_doubt} - self._foreign
            to_cancel = chosen if rollout_ids is None else chosen & set(rollout_ids)
            cancelled = await self._cancel_each(to_cancel)
            self._in_doubt -= to_cancel
            self._unread = {
                rollout_id: readers
                for rollout_id, readers in self._unread.items()
                if readers > 0 or (rollout_ids is not None and rollout_id not in to_cancel)
            }
        await self._write_pins()
        if self.budget.is_reserved:
            await self._settle_finished()
        return cancelled

    async def cancel_earlier(self, run_id: str) -> int:
        """Cancel the unfinished rollouts that earlier processes of a run have enqueued. Return how many."""
        left = await self._store.query_rollouts(run_id=run_id, status_in=_UNFINISHED)
        return await self._cancel_each(rollout.rollout_id for rollout in left)

    async def close(self) -> None:
        """Cancel the unfinished rollouts, and unpin all rollouts. Safe to repeat."""
        await self.cancel()
        self._unread.clear()
        self._kept.clear()
        await self._write_pins()

    # ---- enqueuing -------------------------------------------------------------------------------

    def _named(self, request: EnqueueRolloutRequest) -> EnqueueRolloutRequest:
        return request.model_copy(update={"rollout_id": request.rollout_id or ids.rollout_id(), "pin": self._pin})

    async def _fill(
        self,
        window: _Window,
        to_come: Iterator[tuple[int, EnqueueRolloutRequest]],
        held: deque[tuple[int, EnqueueRolloutRequest]],
        waiting: dict[str, list[_PendingRequest]],
    ) -> None:
        """Enqueue as many requests as the window and the budget have room for, in order.

        to_come: the requests that were not read yet.
        held: requests that the window has admitted and the budget has not yet. The budget may admit only the first of
            them.
        waiting: the enqueued requests by rollout id; new ones are added.
        """
        room = window.room(len(waiting) + len(held))
        requested = [(place, self._named(request)) for place, request in itertools.islice(to_come, room)]
        window.exhausted = room is None or len(requested) < room
        held.extend(requested)
        if not held:
            return
        for rollout in await self._enqueue([request for _, request in held], whole=False):
            place, request = held.popleft()
            waiting.setdefault(rollout.rollout_id, []).append((place, request, rollout.finished))
            self._unread[rollout.rollout_id] += 1

    async def _enqueue(self, requests: Sequence[EnqueueRolloutRequest], *, whole: bool) -> Sequence[Rollout]:
        """Enqueue the first requests, as many as the budget has room for now, and return their rollouts.

        whole: enqueue all or none, and raise BudgetExceeded if there is no room for all.
        """
        if not requests:
            return []
        async with self._exclusively():
            # Rollouts and time are counted for all requests; tokens and cost are reserved for the
            # first ones, as far as there is room.
            await self._pay(requests)
            fitting = requests[: self._reserve(requests)]
            new = {str(request.rollout_id) for request in fitting} - self._unread.keys()
            if whole and len(fitting) < len(requests):
                self._release(new)
                self._give_up(requests)
                raise self.budget.exceeded(len(requests))
            try:
                return await self._send(fitting, new)
            except LeydenError:
                self._in_doubt -= new
                self._release(new)
                raise

    def _release(self, rollout_ids: set[str]) -> None:
        for rollout_id in rollout_ids - self._sent:
            self.budget.release(rollout_id)

    async def _send(self, requests: Sequence[EnqueueRolloutRequest], new: set[str]) -> Sequence[Rollout]:
        """Enqueue requests that the budget has admitted.

        new: the ids of those that this collector has not enqueued before.
        """
        if not requests:
            return []
        self._in_doubt |= new  # if this task is cancelled now, the store may have them
        rollouts = await self._store.enqueue_many_rollouts(requests)
        self._in_doubt -= new
        reserved = self.budget.reserved
        for request, rollout in zip(requests, rollouts, strict=True):
            self._unsent.pop(rollout.rollout_id, None)
            self._unread.setdefault(rollout.rollout_id, 0)
            if rollout.run_id != request.run_id:
                self._foreign.add(rollout.rollout_id)
                self.budget.release(rollout.rollout_id)
            elif rollout.rollout_id in reserved:
                self._sent.add(rollout.rollout_id)
        if self._on_unfinished is not None and not all(rollout.finished for rollout in rollouts):
            self._on_unfinished()
        return rollouts

    # ---- the budget ------------------------------------------------------------------------------

    async def _pay(self, requests: Sequence[EnqueueRolloutRequest]) -> None:
        """Count the requests that the budget has not counted yet. Rollouts that another run has enqueued are free, and
        a repeated request is counted once.

        Raise BudgetExceeded, and count none, if there are too few rollouts left or no time.
        """
        if self.budget.is_unlimited:
            return
        new = {str(request.rollout_id): request for request in requests if request.rollout_id not in self._counted}
        stored = await self._store.query_rollouts(rollout_id_in=list(new)) if new else ()
        free = {rollout.rollout_id for rollout in stored if rollout.run_id != new[rollout.rollout_id].run_id}
        self.budget.take(len(new) - len(free), unsent=sum(request.rollout_id in self._unsent for request in requests))
        self._counted.update(new)
        for rollout_id in new.keys() - free:
            self._unsent[rollout_id] = (new[rollout_id].config or RolloutConfig()).max_attempts
        if self.budget.is_reserved:
            for rollout in stored:
                if rollout.rollout_id in free:
                    continue
                attempts = await self._attempts_of(rollout)
                if rollout.finished:
                    del self._unsent[rollout.rollout_id]
                    self._warn(self.budget.spend(attempts))
                else:
                    self._unsent[rollout.rollout_id] = _attempts_at_most(rollout, attempts)

    def _reserve(self, requests: Sequence[EnqueueRolloutRequest]) -> int:
        for count, request in enumerate(requests):
            attempts = self._unsent.get(str(request.rollout_id))
            if attempts is not None and not self.budget.reserve(str(request.rollout_id), attempts):
                return count
        return len(requests)

    def _give_up(self, requests: Iterable[EnqueueRolloutRequest]) -> None:
        dropped = {str(request.rollout_id) for request in requests} & self._unsent.keys()
        for rollout_id in dropped:
            del self._unsent[rollout_id]
        self._counted -= dropped
        self.budget.give_back(len(dropped))

    async def _wait_for_room(self, attempts: int, timeout: float) -> None:
        """Wait until there may be room for the attempts, at most `timeout` seconds.

        Raise BudgetExceeded if there is no room, and no attempt is running that could make room.
        """
        await self._settle_finished()
        if (self.budget.attempts_left or 0) >= attempts:
            return
        if not self.budget.reserved:
            raise self.budget.exceeded(attempts)
        events: list[Awaitable[Any]] = [self._freed.wait()]
        if self._sent:
            events.append(self._store.wait_for_any_rollout(rollout_ids=list(self._sent), timeout=timeout))
        async with first_done(*events, timeout_seconds=timeout):
            pass

    async def _settle_finished(self) -> None:
        """Settle reservations of rollouts that have finished meanwhile, and release those that the store lacks."""
        async with self._exclusively():
            rollouts = [key for key in self.budget.reserved if key not in self._calls]
            stored = await self._store.query_rollouts(rollout_id_in=rollouts) if rollouts else ()
            self._sent = {rollout.rollout_id for rollout in stored}
            for rollout_id in set(rollouts) - self._sent:
                self.budget.release(rollout_id)
        await self._settle([rollout for rollout in stored if rollout.finished])

    async def _settle(self, finished: Iterable[Rollout]) -> None:
        """Count the usage of finished rollouts, each once, and release the rest of their reservations."""
        for rollout in finished:
            if rollout.rollout_id in self._sent:
                attempts = await self._attempts_of(rollout)
                self._warn(self.budget.settle(rollout.rollout_id, attempts))
                self._sent.discard(rollout.rollout_id)
                self._notify_freed()

    async def _attempts_of(self, rollout: Rollout) -> Sequence[Attempt]:
        if not isinstance(rollout, AttemptedRollout):
            return ()
        if rollout.attempt.sequence_id == 1:
            return (rollout.attempt,)
        return await self._store.query_attempts(rollout.rollout_id)

    def _notify_freed(self) -> None:
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def _warn(self, problem: str | None) -> None:
        if problem is not None and problem not in self._warned and len(self._warned) < _NAMED:
            self._warned.add(problem)
            logger.warning("the budget cannot be kept exactly: %s", problem)

    # ---- pins ------------------------------------------------------------------------------------

    def _consume(self, rollout_id: str, keep_until: int | None) -> None:
        """Mark a rollout's result as consumed, because the caller has requested the next one."""
        if rollout_id not in self._unread:
            return  # closed meanwhile
        self._unread[rollout_id] -= 1
        if keep_until is not None:
            self._kept[rollout_id] = max(keep_until, self._kept.get(rollout_id, keep_until))
        if self._unread[rollout_id] <= 0:
            del self._unread[rollout_id]
            self._released += rollout_id not in self._kept

    async def _write_pins(self) -> None:
        async with self._exclusively():  # or rollouts that are enqueued meanwhile would lose their pins
            self._released = 0
            await self._store.pin(self._pin, list({**self._unread, **self._kept}))

    def _exclusively(self) -> asyncio.Lock:
        """Return the running loop's lock. A sync algorithm may run one loop after another, and each needs one."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._lock, self._freed = loop, asyncio.Lock(), asyncio.Event()
        return self._lock

    async def _cancel_each(self, rollout_ids: Iterable[str]) -> int:
        """Cancel rollouts, a few at a time. Return how many had not finished and are in the store."""
        slots = asyncio.Semaphore(_CANCEL_TOGETHER)

        async def cancel(rollout_id: str) -> bool:
            async with slots:
                with contextlib.suppress(IllegalTransition, UnknownRollout):
                    await self._store.update_rollout(rollout_id, status="cancelled")
                    return True
                return False

        return sum(await asyncio.gather(*map(cancel, rollout_ids)))


class _Window:
    """Limits how many rollouts of one collection are enqueued and unfinished at a time."""

    def __init__(self, max_unfinished: int | Literal["auto"] | None, concurrency: int | None) -> None:
        self._grows = max_unfinished == "auto"
        self._most = max(_AT_LEAST, 2 * (concurrency or 1)) if max_unfinished == "auto" else max_unfinished
        self.exhausted = False
        """Whether there are no more requests."""

    def room(self, unfinished: int) -> int | None:
        """Return how many more rollouts may be enqueued; None: any number.

        unfinished: how many are enqueued and unfinished now.
        """
        return None if self._most is None else max(0, self._most - unfinished)

    async def widen(self, store: LightningStore) -> None:
        """Double the window if none is waiting in the store and more than half of the window is running."""
        if not self._grows or self._most is None or self.exhausted:
            return
        count = (await store.statistics())["rollouts_by_status"].get
        waiting, under_way = count("queuing", 0) + count("requeuing", 0), count("preparing", 0) + count("running", 0)
        if waiting == 0 and under_way > self._most / 2:
            self._most *= 2


def _state(rollout: Rollout) -> str:
    if not isinstance(rollout, AttemptedRollout) or rollout.status in ("queuing", "requeuing"):
        return f"{rollout.rollout_id} {rollout.status}, and no runner has claimed it"
    attempt, limit = rollout.attempt, rollout.config.timeout_seconds
    ends = "it has no time limit" if limit is None else f"timeout_seconds={limit:g} ends it"
    lasted = unix_time() - attempt.start_time
    return f"{rollout.rollout_id} {attempt.status} for {lasted:.0f} s on {attempt.worker_id or 'a runner'}, {ends}"


def _attempts_at_most(rollout: Rollout, attempts: Sequence[Attempt]) -> int:
    return max(len(attempts), rollout.config.max_attempts + sum(attempt.interrupted for attempt in attempts))
