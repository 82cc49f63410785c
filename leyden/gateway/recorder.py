"""`Recorder`: the queue between a call's response and the store.

Calls are queued before the last byte of their response is sent, and written afterwards in batches. The queue is
bounded: if the store cannot keep up, responses wait, and nothing is dropped. While the store is unavailable or full,
records wait in a file of bounded size (`spool`). They are delivered once each, in order, when the store is back. A
record on which the store itself fails is kept among the `DeadLetters`, and its attempt's `flush` raises. The module
knows no HTTP.

All methods but `settled`, `pending` and `remembers` run in the gateway's event loop. A crash of the process loses the
calls that were not written yet: the last hundredths of a second, or more on a busy machine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from leyden._lib.logs import Preview
from leyden.errors import ConfigError, GatewayError, StoreError, StoreFull
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.dead_letters import DeadLetters, is_refusal, replies, takes_nothing
from leyden.gateway.prefixes import Prefixes
from leyden.gateway.record import ModelCall, span_of
from leyden.gateway.spool import Spool
from leyden.store.base import LightningStore
from leyden.types import Span, parse_claim, semconv

logger = logging.getLogger(__name__)

Failures = dict[AttemptKey, StoreError]
"""The first error of writing each attempt's calls, until `flush` raises it."""

_BATCH = 256
"""The most calls that are written together."""
_QUEUE_LIMIT = 4096
"""The most calls that are queued. Beyond it responses wait."""
_LINGER_SECONDS = 0.01
"""The seconds that the first call of a batch waits for others, unless a `flush` waits for it."""
_AGAIN_SECONDS = 1.0
"""The pause between two tries to reach a store that is unavailable."""
_SLOW_SECONDS = 1.0
"""The seconds that a write may take before the recorder probes whether the store is there."""
_PATIENCE_SECONDS = 30.0
"""Seconds that the store may be unavailable before `flush` raises."""
_MAX_REPORTED = 65_536
"""The most live rollouts that the recorder keeps as known to the store."""
_UNREPORTED_LIMIT = 200_000
"""How many live rollouts may call before the store has them. The gateway knows only their signatures."""
_LAST_SECONDS = 5.0
"""Seconds that the gateway waits at its end for a store that is unavailable."""


class Recorder:
    """Writes calls to the store, after their responses were sent."""

    def __init__(self, store: LightningStore, failures: Failures, spool: Spool[Span] | None = None) -> None:
        """Set up an empty queue.

        spool: where records wait while the store is unavailable. None: their calls fail at once.
        """
        self._store = store
        self._spool = spool
        self.dead_letters = None if spool is None else DeadLetters(spool, store=store, retry=self._retry)
        """Records on which the store fails. The owner of the spool closes this file, too."""
        self._delivering: asyncio.Task[None] | None = None
        self._unavailable_since: float | None = None
        """The time at which the store began to refuse records, by the monotonic clock; None if it takes them."""
        self._trouble = ""
        """Why records wait: the store is unavailable, or the error in which it says that it is full."""
        self._failures = failures
        self._queue: deque[ModelCall] = deque()
        self._pending: dict[AttemptKey, int] = {}
        self._waiters: dict[AttemptKey, list[asyncio.Future[None]]] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        """Futures of callers that wait until one call is written, by span id."""
        self._ready = asyncio.Event()
        self._space = asyncio.Event()
        self._closing = False
        self._prefixes = Prefixes()
        self._reported: dict[str, None] = {}
        """Live rollouts that the store has, newest last."""
        self._unreported: set[str] = set()
        """Live rollouts with pending calls that the store does not have yet."""
        self._over: set[AttemptKey] = set()
        """Attempts to drop as soon as their pending calls are written."""

    def begin(self, key: AttemptKey, *, is_live: bool = False) -> None:
        """Announce one more call of this attempt, for which `flush` waits. `put` must follow.

        is_live: a session signed the rollout, and the store may not have it yet.
        """
        self._pending[key] = self._pending.get(key, 0) + 1
        if is_live and key[0] not in self._reported:
            self._unreported.add(key[0])

    def has_room_for(self, rollout_id: str) -> bool:
        """Return whether a live rollout may call: the store has it, or there are not too many live rollouts that the
        store does not have yet.
        """
        return (
            len(self._unreported) < _UNREPORTED_LIMIT or rollout_id in self._unreported or rollout_id in self._reported
        )

    async def put(self, call: ModelCall) -> None:
        """Queue a call that was begun, and wait while the queue is full.

        The call is queued even if the wait is cancelled, which `stop` does.
        """
        try:
            while len(self._queue) >= _QUEUE_LIMIT:
                self._space.clear()
                await self._space.wait()
        finally:
            self._queue.append(call)
            if len(self._queue) >= _BATCH or self._closing or (call.rollout_id, call.attempt_id) in self._waiters:
                self._ready.set()
            elif len(self._queue) == 1:
                asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._ready.set)

    async def put_durably(self, call: ModelCall) -> None:
        """Queue a call, and wait until it is in the store.

        Raise StoreError if it cannot be written. `flush` raises for it, too.
        """
        written = self._awaited[call.span_id] = asyncio.get_running_loop().create_future()
        try:
            await self.put(call)
            self._ready.set()
            await written
        finally:
            del self._awaited[call.span_id]

    def settled(self, key: AttemptKey) -> bool:
        """Return whether every call of this attempt is in the store. Safe from any thread."""
        return key not in self._pending and key not in self._failures

    @property
    def pending(self) -> int:
        """The number of calls that have begun and are not in the store yet."""
        return sum(self._pending.values())

    @property
    def remembers(self) -> bool:
        """Whether `end_attempt` may find state to drop. Safe from any thread."""
        return bool(self._prefixes)

    def end_attempt(self, key: AttemptKey) -> None:
        """Drop the state of an attempt that is over, as soon as its calls are written."""
        if key in self._pending:
            self._over.add(key)
        else:
            self._prefixes.end(key)

    async def flush(self, key: AttemptKey) -> None:
        """Wait until every call that was begun for this attempt is in the store.

        Raise StoreError if the store has been away for 30 seconds: the records stay queued, and a later flush waits for
        them again. Raise it once for a record that could not be written at all.
        """
        while key in self._pending:
            written = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(key, []).append(written)
            self._ready.set()
            while not (await asyncio.wait({written}, timeout=_AGAIN_SECONDS))[0]:
                if (
                    self._unavailable_since is not None
                    and time.monotonic() - self._unavailable_since > _PATIENCE_SECONDS
                ):
                    raise StoreError(
                        f"the record of rollout {key[0]!r}, attempt {key[1]!r} is not complete, because {self._trouble}; what "
                        "is missing waits and is delivered when the store takes it"
                    )
        if failure := self._failures.pop(key, None):
            raise failure

    async def run(self) -> None:
        """Write calls until `close`, then the queued ones. Records that an earlier process left in the spool are
        delivered first.
        """
        self._deliver()
        trying_again = None if self.dead_letters is None else asyncio.create_task(self.dead_letters.run())
        while not (self._closing and not self._queue):
            await self._ready.wait()
            self._ready.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                self._space.set()
                await self._write(batch)
        await self._end_delivery()
        if trying_again is not None:
            trying_again.cancel()
            await asyncio.gather(trying_again, return_exceptions=True)

    def close(self) -> None:
        """Let `run` end as soon as all calls are written."""
        self._closing = True
        self._ready.set()

    async def _write(self, batch: list[ModelCall]) -> None:
        """Write the records of calls to the store, or spool them while the store is unavailable. Resolve the futures of
        those that were written.
        """
        spans: list[Span] = []
        for call in batch:
            try:
                spans.append(self._span_of(call))
            except Exception as error:  # noqa: BLE001 -- an unforeseen answer must not stop all other records
                self._fail(call, error)
        waiting = await self._add(spans)
        for call in batch:
            if call.span_id in waiting:
                continue
            if (written := self._awaited.get(call.span_id)) and not written.done():
                written.set_result(None)
            self._settle((call.rollout_id, call.attempt_id))

    async def _add(self, spans: list[Span]) -> set[str]:
        """Write spans to the store, or put them in the spool while the store is unavailable. Return the ids of the
        spans that wait in the spool.
        """
        if self._spool is not None and len(self._spool):
            return self._spool_up(spans)
        writing = asyncio.ensure_future(self._deliver_spans(spans))
        try:
            while not (await asyncio.wait({writing}, timeout=_SLOW_SECONDS))[0]:
                if self._spool is not None and not await replies(self._store):  # the store's client tries for a minute
                    self._trouble = f"{self._store.url} is away"
                    return self._spool_up(spans)
            writing.result()
        except Exception as error:  # noqa: BLE001 -- tried again one by one, which reports each
            if self._spool is not None and await self._takes_nothing(error):
                return self._spool_up(spans)
            return await self._write_one_by_one(spans)
        finally:
            writing.cancel()
        return set()

    async def _deliver_spans(self, spans: list[Span]) -> None:
        """Write spans to the store, and first the live rollouts that it may not have yet."""
        claims = {
            span.rollout_id: claim
            for span in spans
            if span.rollout_id not in self._reported
            and isinstance(said := span.attributes.get(semconv.LIVE_CLAIM), str)
            and (claim := parse_claim(said))
        }
        if claims:
            await self._store.record_live_rollouts([claim.rollout() for claim in claims.values()])
            self._reported.update(dict.fromkeys(claims))
            self._unreported.difference_update(claims)
            while len(self._reported) > _MAX_REPORTED:
                del self._reported[next(iter(self._reported))]
        await self._store.add_many_spans(spans)

    # ---- while the store is unavailable or full --------------------------------------------------

    async def _takes_nothing(self, error: Exception) -> bool:
        """Return whether a write failed because the store is unavailable or full, and note which."""
        self._trouble = str(error) if isinstance(error, StoreFull) else f"{self._store.url} is away"
        return await takes_nothing(self._store, error)

    def _spool_up(self, spans: list[Span]) -> set[str]:
        """Put spans in the spool, and return the ids of the spans that fit."""
        assert self._spool is not None
        if self._unavailable_since is None:
            self._unavailable_since = time.monotonic()
            logger.warning("records of model calls wait until the store takes them: %s", self._trouble)
        problem = "too many records wait already (LLMProxy's spool_bytes)"
        try:
            n_kept = self._spool.append(spans)
        except ConfigError as error:  # a store would refuse the span, too
            if len(spans) == 1:
                self._fail(spans[0], error)
                return set()
            return set[str]().union(*(self._spool_up([span]) for span in spans))
        except GatewayError as error:
            n_kept, problem = 0, str(error)
        for span in spans[n_kept:]:
            self._fail(span, StoreError(f"{self._trouble}, and {problem}"))
        self._deliver()
        return {span.span_id for span in spans[:n_kept]}

    def _deliver(self) -> None:
        """Start to deliver the records in the spool, unless that is under way or the spool is empty."""
        if self._spool is not None and len(self._spool) and self._delivering is None:
            self._delivering = asyncio.create_task(self._empty_spool(self._spool))

    async def _empty_spool(self, spool: Spool[Span]) -> None:
        """Deliver the records in the spool, in order, until it is empty, and resume the callers of `flush`."""
        try:
            n_together = _BATCH
            while spans := spool.first(n_together):
                try:
                    await self._deliver_spans(spans)
                except Exception as error:  # noqa: BLE001 -- tried again later, or in a smaller batch
                    if await self._takes_nothing(error):
                        await asyncio.sleep(_AGAIN_SECONDS)
                        continue
                    if n_together := len(spans) // 2:
                        continue
                    self._fail_to_write(spans[0], error)
                n_together = min(2 * n_together + 1, _BATCH)
                spool.drop(len(spans))
                for span in spans:
                    self._settle((span.rollout_id, span.attempt_id))
            if self._unavailable_since is not None:
                seconds = time.monotonic() - self._unavailable_since
                logger.warning(
                    "%s took nothing for %.0f s; the records that waited have been delivered", self._store.url, seconds
                )
            self._unavailable_since = None
        finally:
            self._delivering = None

    async def _end_delivery(self) -> None:
        """Wait a few seconds until the spool is empty. Records that are left stay in a named file; without one they are
        lost, and their attempts' `flush` raises.
        """
        if self._spool is None:
            return
        if self._delivering is not None:
            delivering = self._delivering
            await asyncio.wait({delivering}, timeout=_LAST_SECONDS)
            delivering.cancel()
            await asyncio.wait({delivering})
        if len(self._spool) and self._spool.path is not None:
            logger.warning(
                "%d records of model calls wait in %s; the next gateway with this spool delivers them to the store",
                len(self._spool),
                self._spool.path,
            )
        elif len(self._spool):
            for span in self._spool.first(len(self._spool)):
                self._fail(span, StoreError(f"{self._store.url} was away until the gateway ended"))
                self._settle((span.rollout_id, span.attempt_id))

    def _span_of(self, call: ModelCall) -> Span:
        """Return the call's span. It names the earlier call of the attempt that the prompt continues, and how many
        tokens they share.
        """
        span = span_of(call)
        if (tokens := span.tokens) is not None:
            known, earlier = self._prefixes.add(
                (call.rollout_id, call.attempt_id), call.span_id, tokens.prompt_ids, tokens.response_ids
            )
            span.attributes[semconv.KNOWN_PREFIX] = known
            if earlier is not None:
                span.attributes[semconv.GOES_ON_FROM] = earlier
        if logger.isEnabledFor(logging.DEBUG):
            _log(span)
        return span

    async def _write_one_by_one(self, spans: list[Span]) -> set[str]:
        """Write each span by itself, so that one bad span does not take its siblings along. Return the ids of the spans
        that wait in the spool, because the store has gone away.
        """
        for at, span in enumerate(spans):
            try:
                await self._deliver_spans([span])
            except Exception as error:  # noqa: BLE001 -- the siblings must be written; flush tells of this one
                if self._spool is not None and await self._takes_nothing(error):
                    return self._spool_up(spans[at:])
                self._fail_to_write(span, error)
        return set()

    async def _retry(self, span: Span) -> bool:
        """Write a dead letter. Return False: it need not be kept, because it is written, or because the store has
        refused it. Raise any other error of the store.
        """
        try:
            await self._deliver_spans([span])
        except Exception as error:
            if not is_refusal(error):
                raise
            self._fail(span, error)
        return False

    def _fail_to_write(self, span: Span, error: Exception) -> None:
        """Let `flush` raise for a span, and keep it as a dead letter unless the store has refused it."""
        self._fail(span, error)
        if self.dead_letters is not None and not is_refusal(error):
            self.dead_letters.append([span], f"{self._store.url} fails on a call of rollout {span.rollout_id!r}", error)

    def _fail(self, call: ModelCall | Span, error: Exception) -> None:
        """Log that a call could not be recorded, and keep the error for `flush`, and for a durable call that waits for
        its record.
        """
        message = (
            f"a model call of rollout {call.rollout_id!r}, attempt {call.attempt_id!r} could not be recorded in "
            f"{self._store.url}: {type(error).__name__}: {error}"
        )
        logger.error(message, exc_info=error)
        failure = StoreError(message)
        failure.__cause__ = error
        self._failures.setdefault((call.rollout_id, call.attempt_id), failure)
        if (written := self._awaited.get(call.span_id)) and not written.done():
            written.set_exception(StoreError(message))

    def _settle(self, key: AttemptKey) -> None:
        """Count one record of an attempt as written or failed. After the last one, resume the callers of `flush`, and
        drop the attempt's state if it is over.
        """
        if key not in self._pending:  # a record of an earlier process
            return
        left = self._pending[key] - 1
        if left:
            self._pending[key] = left
            return
        del self._pending[key]
        self._unreported.discard(key[0])
        if key in self._over:
            self._over.remove(key)
            self._prefixes.end(key)
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)


def _log(span: Span) -> None:
    """Log one line about a model call: index, status, duration, token counts, and the start of prompt and response."""
    said, milliseconds = span.attributes, 1000 * ((span.end_time or 0.0) - (span.start_time or 0.0))
    logger.debug(
        "rollout %s: call %s of model %s, %s, %.0f ms, %s + %s tokens%s: %s -> %s",
        span.rollout_id,
        said.get(semconv.CALL_INDEX),
        said.get(semconv.GEN_AI_REQUEST_MODEL),
        span.status.status_code if span.status.description is None else Preview(span.status.description),
        milliseconds,
        said.get(semconv.GEN_AI_INPUT_TOKENS),
        said.get(semconv.GEN_AI_OUTPUT_TOKENS),
        "" if span.tokens is not None else f" (refused: {said.get(semconv.TOKENS_REFUSED, 'none asked for')})",
        Preview(said.get(semconv.GEN_AI_INPUT_MESSAGES, "")),
        Preview(said.get(semconv.GEN_AI_OUTPUT_MESSAGES, "")),
    )
