"""The queue between the answer and the store.

Calls are queued before the last byte of their answer is sent and written behind it, in batches. The queue is bounded:
when the store cannot keep up, answers wait, and nothing is dropped. It knows the store's `add_many_spans`, and nothing
of HTTP.

All of it runs in the gateway's event loop, but for `settled`. A crash of the process loses the calls that were not
written yet, the last few hundredths of a second, more on a busy machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from leyden import semconv
from leyden.errors import StoreError
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.prefixes import Prefixes
from leyden.gateway.record import ModelCall, span_of
from leyden.store.base import LightningStore
from leyden.types import Span
from leyden.utils.logs import Preview

logger = logging.getLogger(__name__)

Failures = dict[AttemptKey, StoreError]
"""The first thing that went wrong when an attempt's calls were written, until `flush` raises it."""

_BATCH = 256
_QUEUE_LIMIT = 4096
_LINGER_SECONDS = 0.01
"""How long the first call of a batch waits for company when nobody asks for a flush."""


class Recorder:
    """Writes calls to the store, behind their answers."""

    def __init__(self, store: LightningStore, failures: Failures) -> None:
        self._store = store
        self._failures = failures
        self._queue: deque[ModelCall] = deque()
        self._pending: dict[AttemptKey, int] = {}
        self._waiters: dict[AttemptKey, list[asyncio.Future[None]]] = {}
        self._awaited: dict[str, asyncio.Future[None]] = {}
        """By span id: who waits until one call is written."""
        self._ready = asyncio.Event()
        self._space = asyncio.Event()
        self._closing = False
        self._prefixes = Prefixes()
        self._over: set[AttemptKey] = set()
        """Attempts that are to be forgotten once what is pending is written."""

    def begin(self, key: AttemptKey) -> None:
        """From now on `flush` waits for one more call of this attempt, which must be `put` in the end."""
        self._pending[key] = self._pending.get(key, 0) + 1

    async def put(self, call: ModelCall) -> None:
        """Queue a call that was begun; waits while the queue is full. It is queued also if that is cancelled, as `stop` does."""
        try:
            while len(self._queue) >= _QUEUE_LIMIT:
                self._space.clear()
                await self._space.wait()
        finally:
            self._enqueue(call)

    def _enqueue(self, call: ModelCall) -> None:
        self._queue.append(call)
        if len(self._queue) >= _BATCH or self._closing or (call.rollout_id, call.attempt_id) in self._waiters:
            self._ready.set()
        elif len(self._queue) == 1:
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._ready.set)

    async def put_durably(self, call: ModelCall) -> None:
        """`put`, and wait until it is in the store. Raises StoreError if it cannot be written; `flush` tells of that too."""
        written = self._awaited[call.span_id] = asyncio.get_running_loop().create_future()
        try:
            await self.put(call)
            self._ready.set()
            await written
        finally:
            del self._awaited[call.span_id]

    def settled(self, key: AttemptKey) -> bool:
        """Whether everything of this attempt is in the store. May be asked from any thread."""
        return key not in self._pending and key not in self._failures

    @property
    def pending(self) -> int:
        """How many calls have begun and are not in the store yet."""
        return sum(self._pending.values())

    @property
    def remembers(self) -> bool:
        """Whether `forget` may have something to do. May be asked from any thread."""
        return bool(self._prefixes)

    def forget(self, key: AttemptKey) -> None:
        """An attempt is over."""
        if key in self._pending:
            self._over.add(key)
        else:
            self._prefixes.end(key)

    async def flush(self, key: AttemptKey) -> None:
        """Wait until everything begun for this attempt is in the store. Raises StoreError, once, if something could not
        be written."""
        while key in self._pending:
            written = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(key, []).append(written)
            self._ready.set()
            await written
        if failure := self._failures.pop(key, None):
            raise failure

    async def run(self) -> None:
        """Write until `close`, then write what is left."""
        while not (self._closing and not self._queue):
            await self._ready.wait()
            self._ready.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                self._space.set()
                await self._write(batch)

    def close(self) -> None:
        """Let `run` end once everything is written."""
        self._closing = True
        self._ready.set()

    async def _write(self, batch: list[ModelCall]) -> None:
        spans: list[Span] = []
        for call in batch:
            try:
                spans.append(self._span_of(call))
            except Exception as error:  # noqa: BLE001 -- an answer nobody foresaw must not stop all other records
                self._fail(call.rollout_id, call.attempt_id, call.span_id, error)
        try:
            await self._store.add_many_spans(spans)
        except Exception:  # noqa: BLE001 -- tried again one by one, where each is told
            await self._write_one_by_one(spans)
        for call in batch:
            if (written := self._awaited.get(call.span_id)) and not written.done():
                written.set_result(None)
            self._settle((call.rollout_id, call.attempt_id))

    def _span_of(self, call: ModelCall) -> Span:
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

    async def _write_one_by_one(self, spans: list[Span]) -> None:
        """One bad span must not take its siblings along: a batch is written whole or not at all."""
        for span in spans:
            try:
                await self._store.add_many_spans([span])
            except Exception as error:  # noqa: BLE001 -- the siblings must be written; flush tells of this one
                self._fail(span.rollout_id, span.attempt_id, span.span_id, error)

    def _fail(self, rollout_id: str, attempt_id: str, span_id: str, error: Exception) -> None:
        message = (
            f"a model call of rollout {rollout_id!r}, attempt {attempt_id!r} could not be recorded in "
            f"{self._store.url}: {type(error).__name__}: {error}"
        )
        logger.error(message, exc_info=error)
        failure = StoreError(message)
        failure.__cause__ = error
        self._failures.setdefault((rollout_id, attempt_id), failure)
        if (written := self._awaited.get(span_id)) and not written.done():
            written.set_exception(StoreError(message))

    def _settle(self, key: AttemptKey) -> None:
        left = self._pending[key] - 1
        if left:
            self._pending[key] = left
            return
        del self._pending[key]
        if key in self._over:
            self._over.remove(key)
            self._prefixes.end(key)
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)


def _log(span: Span) -> None:
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
