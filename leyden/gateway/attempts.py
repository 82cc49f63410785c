"""Decide which attempts may call a model, and number each attempt's calls.

The store is read once for each attempt, so that later calls cost no store read. Attempts also follow the store's news:
one whose rollout has ended is refused within a second, even if its runner never reported the end. An attempt that is
older than this gateway (after a restart) continues the numbers of its recorded calls. The module knows no HTTP beyond
the status of a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from leyden._lib.clock import unix_time
from leyden._lib.host.http import Refusal
from leyden.errors import ConfigError, LeydenError, UnknownAttempt, UnknownRollout
from leyden.gateway.call_replay import CallReplay, load
from leyden.gateway.limits import Spent
from leyden.store.base import LightningStore
from leyden.types import Attempt, AttemptedRollout, LiveClaim, Rollout, Span, read_replay_from, semconv

logger = logging.getLogger(__name__)

AttemptKey = tuple[str, str]
"""A rollout id and an attempt id."""

_CLAIM_SECONDS = 86_400.0
"""Seconds after its beginning within which a live rollout may make its first call to this gateway."""
_RECHECK_SECONDS = 30.0
"""The seconds for which an attempt that a sweep ended can still call while its rollout continues.

The store reports no news of such an attempt.
"""
_NEWS_SECONDS = 30.0
"""Seconds that one request for the store's news waits."""
_REST_SECONDS = 0.2
"""The pause between two requests for news, so that a busy store gets at most five a second."""
_UNAVAILABLE_SECONDS = 2.0
"""The pause between two tries while the store cannot be reached."""
_PATIENCE_SECONDS = 2.0
"""The seconds for which a call of a known attempt waits for the store to say whether the attempt is over."""
_MAX_LIVE = 65_536
"""The most attempts under way that are kept in memory. The one without a call for the longest time is dropped first."""
_MAX_SEARCHED = 256
"""How many of an attempt's newest calls are searched for the highest number.

It exceeds the number of calls that one attempt has under way.
"""
_CLOCK_SKEW_SECONDS = 1.0
"""Seconds by which the store's clock may be further ahead than was measured."""
_FIRST_CALL_SECONDS = 10.0
"""Seconds after its beginning within which a live rollout's first call needs no store read."""
_MAX_ENDED = 65_536
"""The most ended attempts in memory. Older ones are looked up in the store."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Permission for one call: its number, and its attempt's state."""

    call_index: int
    """The number of the call within its attempt, from 0."""
    trace_id: str
    """The trace of the attempt's calls that do not bring one."""
    mode: str | None
    sampling_key: str
    """The key from which the seeds of the attempt's calls are derived."""
    replay: CallReplay | None
    """The recorded calls that the attempt repeats; None if it repeats none."""
    spent: Spent
    """The tokens and the cost that the attempt has spent so far."""


@dataclass(slots=True)
class _Live:
    trace_id: str
    calls: int = 0
    """The number of calls that this gateway has numbered."""
    calls_before: int | None = None
    """How many calls an earlier gateway numbered; None until the store has been asked."""
    mode: str | None = None
    sampling_key: str = ""
    replay: CallReplay | None = None
    spent: Spent = field(default_factory=Spent)
    check_again_at: float = 0.0
    """The monotonic time from which the store is asked again; 0: before the first answer."""


class Attempts:
    """The attempts that call through this gateway.

    `admit` runs in the gateway's event loop; `end` may be called from any thread.
    """

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._all_met_since = unix_time() + _CLOCK_SKEW_SECONDS
        """A time by this process's clock. Attempts that began later made their first call here.

        This gateway has numbered all calls of such an attempt, so the store need not be asked.
        """
        self._store_is_ahead: float | None = None
        """Seconds by which the store's clock, which dates attempts, is ahead of this process's. None until the store is
        asked.
        """
        self._live: OrderedDict[AttemptKey, _Live] = OrderedDict()
        self._ended: dict[AttemptKey, bool] = {}
        """Ended attempts, each with whether a call that came too late has been recorded."""

    def __len__(self) -> int:
        """Return the number of attempts in memory that may still call."""
        return len(self._live)

    @property
    def n_ended(self) -> int:
        """The number of ended attempts in memory."""
        return len(self._ended)

    async def admit(
        self, rollout_id: str, attempt_id: str, *, call_index: int | None = None, claim: LiveClaim | None = None
    ) -> Admission:
        """Admit one call, and number it.

        call_index: the number that the call already has, if its client sends it again.
        claim: the claim of a live rollout that a session signed. The rollout is admitted even if the store does not
            know it yet.
        Raise Refusal: 404 for ids that the store does not know, 410 for an attempt that is over, 503 if the store
        cannot be reached.
        """
        key = (rollout_id, attempt_id)
        if key in self._ended:
            raise _gone(rollout_id, attempt_id, "the attempt is over")
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = _Live(trace_id=trace_id_of(key)) if claim is None else self._begin_live(key, claim)
            if len(self._live) > _MAX_LIVE:
                self._live.popitem(last=False)
                self._all_met_since = unix_time() + _CLOCK_SKEW_SECONDS  # the dropped one may call again
        else:
            with contextlib.suppress(KeyError):  # ended this very moment
                self._live.move_to_end(key)
        number = live.calls
        if call_index is None:
            live.calls += 1
        now = time.monotonic()
        if now >= live.check_again_at:
            if claim is None and live.calls_before is None:
                await self._check(key, live)
            else:
                await self._check_if_possible(key, live, claim)
            live.check_again_at = now + _RECHECK_SECONDS
        if key in self._ended:
            raise _gone(rollout_id, attempt_id, "the attempt is over")
        if call_index is None:
            call_index = (live.calls_before or 0) + number
        return Admission(
            call_index=call_index,
            trace_id=live.trace_id,
            mode=live.mode,
            sampling_key=live.sampling_key,
            replay=live.replay,
            spent=live.spent,
        )

    def _begin_live(self, key: AttemptKey, claim: LiveClaim) -> _Live:
        """Return a new entry for a live rollout. Raise Refusal (401) if its claim is too old."""
        now = unix_time()
        if abs(now - claim.start_time) > _CLAIM_SECONDS:
            raise Refusal(
                401,
                "claim_expired",
                f"the live rollout {claim.rollout_id!r} began {now - claim.start_time:,.0f} s ago by this machine's clock, and may "
                f"call for {_CLAIM_SECONDS:,.0f} s; begin another, and see that the clocks agree",
            )
        # The key of a first attempt, as `_sampling_key` makes it: the rollout's id and 0 failures.
        live = _Live(trace_id=trace_id_of(key), mode="live", sampling_key=f"{claim.rollout_id}\x1f0")
        began_now = abs(now - claim.start_time) <= _FIRST_CALL_SECONDS  # else its clock may be wrong
        if began_now and claim.start_time > self._all_met_since:  # no other gateway has numbered its calls
            live.calls_before = 0
            live.check_again_at = time.monotonic() + _RECHECK_SECONDS
        return live

    async def _check_if_possible(self, key: AttemptKey, live: _Live, claim: LiveClaim | None = None) -> None:
        """Check a known attempt as `_check` does. If the store is unavailable, let it go on; its records then wait."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._check(key, live)
        except TimeoutError:
            logger.debug("cannot read the status of attempt %r (rollout %r); continuing", key[1], key[0])
        except Refusal as refusal:
            # A session reports a live rollout to the store while its first call is under way.
            if claim is not None and refusal.status == HTTPStatus.NOT_FOUND:
                self._live.setdefault(key, live)
            elif refusal.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise

    def note_late_call(self, rollout_id: str, attempt_id: str) -> bool:
        """Return whether this is the first late call of an ended attempt, and remember that there was one. Only the
        first is recorded, because an agent may repeat the call for ever.
        """
        first = not self._ended.get((rollout_id, attempt_id), False)
        self._ended[rollout_id, attempt_id] = True
        return first

    def end(self, rollout_id: str, attempt_id: str) -> None:
        """Refuse all later calls of this attempt. Safe to repeat."""
        key = (rollout_id, attempt_id)
        self._ended.setdefault(key, False)
        self._live.pop(key, None)
        if len(self._ended) > _MAX_ENDED:
            self._ended.pop(next(iter(self._ended)), None)

    async def follow_news(self, give_up: Callable[[str, str], None]) -> None:
        """Follow the store's news, and end attempts as soon as their rollouts are over. Runs until cancelled.

        give_up: called with the ids of each such attempt, to cancel its calls under way.
        """
        after: str | None = None
        missed = False
        while True:
            try:
                news = await self._store.get_news(after=after, timeout_seconds=_NEWS_SECONDS)
                after = news.after
                if news.gap or missed:  # ends may have been missed
                    missed = False
                    for live in self._live.copy().values():  # each is checked before its next call
                        live.check_again_at = 0.0
                elif finished := set(news.finished):
                    for key in [key for key in self._live.copy() if key[0] in finished]:
                        await self._end_if_over(key, give_up)
                await asyncio.sleep(_REST_SECONDS)
            except LeydenError as error:
                logger.debug("cannot follow the store's news: %s", error)
                after, missed = None, True
                await asyncio.sleep(_UNAVAILABLE_SECONDS)

    async def end_if_known(self, rollout_id: str, attempt_id: str) -> None:
        """End an attempt that a caller names over HTTP. Raise Refusal if the store does not know the ids."""
        key = (rollout_id, attempt_id)
        live = self._live.get(key)
        admitted = live is not None and live.check_again_at > 0
        if not admitted and key not in self._ended:
            with _looking_up(key):
                await self._find(rollout_id, attempt_id)
        self.end(rollout_id, attempt_id)

    async def _end_if_over(self, key: AttemptKey, give_up: Callable[[str, str], None]) -> None:
        """Look up in the store whether an attempt is over. If so, drop its state and cancel its calls."""
        live = self._live.get(key)
        if live is None or not live.check_again_at:
            return  # ended meanwhile, or its first call is asking the store
        try:
            await self._check(key, live)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.GONE:
                give_up(*key)
            else:
                live.check_again_at = 0.0  # the next call asks the store again

    async def _check(self, key: AttemptKey, live: _Live) -> None:
        """Check in the store that the attempt may call models. Raise Refusal if it is unknown (404) or over (410)."""
        rollout_id, attempt_id = key
        try:
            with _looking_up(key):
                over = await self._read(rollout_id, attempt_id, live)
        except Refusal as refusal:
            if refusal.status == HTTPStatus.NOT_FOUND:
                self._live.pop(key, None)
            raise
        if over is not None:
            self.end(rollout_id, attempt_id)
            raise _gone(rollout_id, attempt_id, over)

    async def _read(self, rollout_id: str, attempt_id: str, live: _Live) -> str | None:
        """Read from the store what `live` lacks: mode, sampling key, the number of earlier calls, and the calls to
        replay. Return why the attempt may no longer call models, or None if it may.
        """
        rollout = await self._store.get_rollout_by_id(rollout_id)
        live.mode = rollout.mode
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.attempt_id == attempt_id:
            attempt = rollout.attempt
        else:
            attempt = await self._find(rollout_id, attempt_id)
        if not live.sampling_key:
            live.sampling_key = await self._sampling_key(rollout, attempt)
        if live.calls_before is None:
            if self._store_is_ahead is None:
                asked = unix_time()
                self._store_is_ahead = (await self._store.statistics())["time"] - asked
            before = 0
            if attempt.start_time - self._store_is_ahead <= self._all_met_since:
                spans = await self._store.query_spans(
                    rollout_id, attempt_id, name=semconv.MODEL_CALL, limit=_MAX_SEARCHED, sort_order="desc"
                )
                numbers = (span.attributes.get(semconv.CALL_INDEX) for span in spans)
                before = max((number + 1 for number in numbers if isinstance(number, int)), default=0)
            replay = await self._replay(rollout, attempt, before)
            if live.calls_before is None:  # else another call of the attempt has set it meanwhile
                live.calls_before, live.replay = before, replay
        if attempt.finished:
            return f"the attempt is over: {attempt.status}"
        return f"the rollout is over: {rollout.status}" if rollout.finished else None

    async def _find(self, rollout_id: str, attempt_id: str) -> Attempt:
        """Return the attempt with this id. Raise UnknownAttempt for "latest", as a record needs a fixed attempt."""
        attempt = await self._store.get_attempt_by_id(rollout_id, attempt_id)
        if attempt.attempt_id != attempt_id:
            raise UnknownAttempt(f"{attempt_id!r} is not an id; the latest attempt is {attempt.attempt_id!r}")
        return attempt

    async def _sampling_key(self, rollout: Rollout, attempt: Attempt) -> str:
        """Return the rollout's key with the number of its failures so far.

        A retry samples other responses, because the same ones would fail in the same way. An attempt that follows an
        interrupted one samples what that one would have sampled, so that a resumed run equals one that was never
        stopped.
        """
        failures = 0
        if attempt.sequence_id > 1:
            earlier = await self._store.query_attempts(rollout.rollout_id)
            failures = sum(one.sequence_id < attempt.sequence_id and not one.interrupted for one in earlier)
        return f"{rollout.metadata.get(semconv.SAMPLING_KEY, rollout.rollout_id)}\x1f{failures}"

    async def _replay(self, rollout: Rollout, attempt: Attempt, calls_before: int) -> CallReplay | None:
        """Return the recorded calls that the attempt repeats; None if its rollout repeats none. Raise Refusal if the
        store has no record to repeat.
        """
        try:
            source = read_replay_from(rollout.metadata)
        except ConfigError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, "replay_unreadable", str(error)) from error
        if source is None:
            return None
        own: Sequence[Span] = ()
        if calls_before:
            own = await self._store.query_spans(rollout.rollout_id, attempt.attempt_id, name=semconv.MODEL_CALL)
        return await load(self._store, source, own)


@contextlib.contextmanager
def _looking_up(key: AttemptKey) -> Generator[None]:
    """Turn the store's errors about an attempt into a Refusal: 404 for unknown ids, else 503."""
    rollout_id, attempt_id = key
    try:
        yield
    except (UnknownRollout, UnknownAttempt) as error:
        noun = "rollout" if isinstance(error, UnknownRollout) else "attempt"
        raise Refusal(
            404,
            f"{noun}_not_found",
            f"the gateway cannot record a call of rollout {rollout_id!r}, attempt {attempt_id!r}: {error}. "
            "Use the base URL of the `llm` that the agent was given, and the store that holds its rollout.",
        ) from error
    except LeydenError as error:
        logger.error("cannot look up rollout %r, attempt %r: %s", rollout_id, attempt_id, error)
        raise Refusal(503, "store_unavailable", f"the gateway cannot reach its store: {error}") from error


def _gone(rollout_id: str, attempt_id: str, why: str) -> Refusal:
    return Refusal(
        410,
        "attempt_ended",
        f"rollout {rollout_id!r}, attempt {attempt_id!r}: {why}. Make model calls before the agent returns and before "
        "its timeout, with the base URL of the current attempt: make the client in each rollout, not once for all.",
    )


def trace_id_of(key: AttemptKey) -> str:
    """Return the trace id of an attempt's calls that do not bring one. It is derived from the ids, so that an attempt
    stays in one trace after a restart of the gateway.
    """
    return hashlib.sha256("\x1f".join(key).encode()).hexdigest()[:32]
