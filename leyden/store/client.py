"""`LightningStoreClient`: a store behind a server, used like one in this process.

It knows the table of `wire.py` and the connection to the server (`connection.py`), no database.
Each method is a request. Callers that wait for rollouts or spans share one long poll for each event
loop. To add a method, see `wire.py`; here it is a line in the class.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Final, Self, TypeVar, cast

from leyden.errors import LeydenError, StoreError
from leyden.options import check_number
from leyden.store.base import LightningStore, StoreCapabilities
from leyden.store.connection import Connection, ServerReply
from leyden.store.ending import END, EndAnswer, WaitForEnd
from leyden.store.notify import Signals, check_wait
from leyden.store.waiting import WaitingStore
from leyden.store.wire import BY_METHOD, Route, error_from
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, News, Rollout, SpanPage, current_run_id
from leyden.utils import ids
from leyden.utils.per_loop import PerLoop

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_VARIABLE: Final = "LEYDEN_STORE_TOKEN"
"""The environment variable that is the default of `token`."""
_POLL_SECONDS: Final = 30.0
"""The longest time that one request waits at the server."""
_WATCH_SECONDS: Final = 5.0
"""The longest that one question for the end of a run waits: the death of a server is noticed so
much later."""
_PACE_SECONDS: Final = 0.005
"""The shortest time between two requests for news. Changes in between arrive together."""
_CLAIMS_AT_ONCE: Final = 8
"""The most claims of one event loop that wait at the server. Further ones wait in this process."""
_UNDO_SECONDS: Final = 2.0
_AFTER_FAILURE_SECONDS: Final = 0.2
"""Before those who wait look for themselves, and perhaps have news asked for again."""
_CACHED_ANSWERS: Final = 32

_MADE_HERE: dict[str, dict[str, Callable[[], str]]] = {
    "start_rollout": {"rollout_id": ids.rollout_id, "attempt_id": ids.attempt_id},
    "start_attempt": {"attempt_id": ids.attempt_id},
    "dequeue_many_rollouts": {"claim_id": ids.claim_id},
    "add_resources": {"resources_id": ids.resources_id},
}
"""Ids that a caller may leave to the store. They are made here, so that a repeated request adds no
second row."""


def _asks(method: F) -> F:
    """Return the protocol's `method` as a request to the server."""
    route = BY_METHOD[method.__name__]

    @wraps(method, updated=())
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ask(route, route.bind(args, kwargs))

    return cast(F, ask)


class LightningStoreClient(WaitingStore):
    """The store served at `url`. Every method is safe from any thread and any event loop; a pickled
    client holds its URL and token.

    A request that fails on its way is sent again for `retry_seconds`, so a server may be restarted
    meanwhile. Ids are made here, so nothing is done twice. A request that cannot be repeated
    (`release_claims`, a rollout requeued by hand) raises StoreError, which says that the outcome is
    unknown. A failure is never an empty result.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        retry_seconds: float = 60.0,
        connections: int = 64,
        compress: bool | None = None,
    ) -> None:
        """Open nothing before the first request.

        token: the server's token; None takes it from LEYDEN_STORE_TOKEN, if it is set.
        retry_seconds: how long a server may be away; 0: not at all.
        connections: the most for each event loop.
        compress: None compresses if the server is on another machine.
        Raise ConfigError for a URL that is not one.
        """
        check_number("retry_seconds", retry_seconds, at_least=0)
        check_number("connections", connections, at_least=1, whole=True)
        super().__init__(Signals())
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        self._options = {"retry_seconds": retry_seconds, "connections": connections, "compress": compress}
        self._connection = Connection(
            url, token=self._token, retry_seconds=retry_seconds, connections=connections, compress=compress
        )
        self._desks = PerLoop(lambda: _Desk(self, self._signals))
        self._cache = _Cache()
        self._undoing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=True, swept=True, otlp_traces=True, durable=True
        )

    def __reduce__(self) -> tuple[Callable[..., LightningStoreClient], tuple[Any, ...]]:
        return reconnect, (self.url, self._token, self._options)

    async def close(self) -> None:
        here = asyncio.get_running_loop()
        if undoing := {task for task in self._undoing.copy() if task.get_loop() is here}:
            await asyncio.wait(undoing)
        await self._connection.close()
        self._signals.close()
        await self._desks.close()

    statistics = _asks(LightningStore.statistics)
    start_rollout = _asks(LightningStore.start_rollout)
    enqueue_many_rollouts = _asks(LightningStore.enqueue_many_rollouts)
    undo_claim = _asks(LightningStore.undo_claim)
    start_attempt = _asks(LightningStore.start_attempt)
    add_many_spans = _asks(LightningStore.add_many_spans)
    get_many_span_sequence_ids = _asks(LightningStore.get_many_span_sequence_ids)
    query_spans = _asks(LightningStore.query_spans)
    query_spans_of = _asks(LightningStore.query_spans_of)
    index_span_attribute = _asks(LightningStore.index_span_attribute)
    query_rollouts = _asks(LightningStore.query_rollouts)
    summarise_rollouts = _asks(LightningStore.summarise_rollouts)
    get_rollout_by_id = _asks(LightningStore.get_rollout_by_id)
    query_attempts = _asks(LightningStore.query_attempts)
    get_latest_attempt = _asks(LightningStore.get_latest_attempt)
    get_attempt_by_id = _asks(LightningStore.get_attempt_by_id)
    update_rollout = _asks(LightningStore.update_rollout)
    update_attempt = _asks(LightningStore.update_attempt)
    update_many_attempts = _asks(LightningStore.update_many_attempts)
    sweep = _asks(LightningStore.sweep)
    next_deadline = _asks(LightningStore.next_deadline)
    release_claims = _asks(LightningStore.release_claims)
    get_news = _asks(LightningStore.get_news)
    pin = _asks(LightningStore.pin)
    prune = _asks(LightningStore.prune)
    add_resources = _asks(LightningStore.add_resources)
    update_resources = _asks(LightningStore.update_resources)
    get_resources_by_id = _asks(LightningStore.get_resources_by_id)
    set_label = _asks(LightningStore.set_label)
    get_labelled_resources = _asks(LightningStore.get_labelled_resources)
    get_labels = _asks(LightningStore.get_labels)
    remove_label = _asks(LightningStore.remove_label)
    move_labels = _asks(LightningStore.move_labels)
    freeze_resources = _asks(LightningStore.freeze_resources)
    query_audit = _asks(LightningStore.query_audit)
    create_release = _asks(LightningStore.create_release)
    advance_release = _asks(LightningStore.advance_release)
    get_release = _asks(LightningStore.get_release)
    query_releases = _asks(LightningStore.query_releases)
    record_live_rollouts = _asks(LightningStore.record_live_rollouts)
    add_many_feedback = _asks(LightningStore.add_many_feedback)
    query_feedback = _asks(LightningStore.query_feedback)
    set_endpoint = _asks(LightningStore.set_endpoint)
    get_latest_resources = _asks(LightningStore.get_latest_resources)
    query_resources = _asks(LightningStore.query_resources)
    query_workers = _asks(LightningStore.query_workers)
    get_worker_by_id = _asks(LightningStore.get_worker_by_id)
    update_worker = _asks(LightningStore.update_worker)
    pause_worker = _asks(LightningStore.pause_worker)
    add_many_samples = _asks(LightningStore.add_many_samples)
    query_samples = _asks(LightningStore.query_samples)
    start_run = _asks(LightningStore.start_run)
    update_run = _asks(LightningStore.update_run)
    get_run_by_id = _asks(LightningStore.get_run_by_id)
    query_runs = _asks(LightningStore.query_runs)
    add_metrics = _asks(LightningStore.add_metrics)
    query_metrics = _asks(LightningStore.query_metrics)
    cut_metrics = _asks(LightningStore.cut_metrics)

    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        timeout_seconds: float = 0.0,
        claim_id: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        check_wait(timeout_seconds)
        # The claim waits at the server, which wakes one claim for one rollout. News would wake the
        # claims of every client.
        if limit <= 0:
            return []
        claim_id = ids.claim_id() if claim_id is None else claim_id
        desk = await self._desks.get()
        deadline = time.monotonic() + timeout_seconds
        try:
            if timeout_seconds <= 0 or desk.claims.locked():
                claimed = await self._claim(limit, worker_id, claim_id)
                if claimed or timeout_seconds <= 0:
                    return claimed
            try:
                async with asyncio.timeout(timeout_seconds):
                    await desk.claims.acquire()
            except TimeoutError:
                return []
            try:
                return await self._claim_within(deadline, limit, worker_id, claim_id)
            finally:
                desk.claims.release()
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._undo(claim_id), name="leyden-store-undo")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)  # a second cancellation does not interrupt it
            raise

    async def _claim_within(
        self, deadline: float, limit: int, worker_id: str | None, claim_id: str
    ) -> Sequence[AttemptedRollout]:
        """Ask the server for rollouts until it returns some or the deadline (`time.monotonic()`)
        passes.

        Each request waits at most `_POLL_SECONDS` at the server.
        """
        while True:
            seconds = min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            claimed = await self._claim(limit, worker_id, claim_id, timeout_seconds=seconds)
            if claimed or time.monotonic() >= deadline:
                return claimed

    async def _undo(self, claim_id: str) -> None:
        """Undo a claim that was cancelled while the server may have answered it."""
        with suppress(LeydenError, TimeoutError):  # then its timeout brings it back
            async with asyncio.timeout(_UNDO_SECONDS):
                await self._ask(BY_METHOD["undo_claim"], {"claim_id": claim_id}, retry_seconds=0.0)

    async def wait_for_end(self) -> None:
        """Wait until the run that the server runs for has ended
        (`LightningStoreServer.announce_end`).

        A server that runs for no run (`leyden store`) never reports an end. Raise StoreError when
        the server has been away for `retry_seconds`.
        """
        watcher = ids.claim_id()
        while True:
            question = WaitForEnd(watcher=watcher, timeout_seconds=_WATCH_SECONDS)
            body = question.model_dump_json().encode()
            answer = await self._connection.ask("POST", END, body, waits_seconds=_WATCH_SECONDS)
            if answer.status != 200:
                raise error_from(answer.status, answer.body, self.url)
            if EndAnswer.model_validate_json(answer.body).ended:
                return

    # ---- the questions behind the methods that wait ----------------------------------------------

    async def _claim(
        self, limit: int, worker_id: str | None, claim_id: str | None, *, timeout_seconds: float = 0.0
    ) -> Sequence[AttemptedRollout]:
        arguments = {
            "limit": limit,
            "worker_id": worker_id,
            "claim_id": claim_id,
            "timeout_seconds": timeout_seconds,
        }
        return await self._ask(BY_METHOD["dequeue_many_rollouts"], arguments)

    async def _finished(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        return await self._ask(BY_METHOD["wait_for_rollouts"], {"rollout_ids": rollout_ids, "timeout": 0.0})

    async def _new_spans(self, after: str | None, rollout_ids: Sequence[str] | None, limit: int) -> SpanPage:
        arguments = {"after": after, "rollout_ids": rollout_ids, "limit": limit}
        return await self._ask(BY_METHOD["poll_new_spans"], arguments)

    async def _expect_signals(self) -> None:
        (await self._desks.get()).watch()

    # ---- requests --------------------------------------------------------------------------------

    async def _ask(self, route: Route, arguments: dict[str, Any], *, retry_seconds: float | None = None) -> Any:
        """Send a call and parse its reply. Raise what the server's store raised, and StoreError
        without a reply.
        """
        _make_ids(route.method, arguments)
        path = route.path_of(arguments)
        answer = await self._connection.ask(
            route.verb,
            path,
            route.body_of(arguments) if route.verb == "POST" else None,
            repeatable=route.repeatable and not _requeues(arguments),
            waits_seconds=float(arguments.get(route.waits, 0.0)) if route.waits else 0.0,
            headers=self._cache.headers(path) if route.cached else None,
            retry_seconds=retry_seconds,
        )
        if route.cached:
            answer = self._cache.answer(path, answer)
        if answer.status != route.status:
            raise error_from(answer.status, answer.body, self.url)
        try:
            return route.answer_from(arguments, answer.body)
        except ValueError as error:
            raise StoreError(
                f"{self.url} answered {route} with something else; is its version another? {error}"
            ) from error


class _Desk:
    """The state that callers of one event loop share: turns for waiting claims, and one task that
    reads the server's news.
    """

    def __init__(self, store: LightningStore, signals: Signals) -> None:
        self.claims = asyncio.Semaphore(_CLAIMS_AT_ONCE)
        self._store = store
        self._signals = signals
        self._after: str | None = None
        self._hears_spans = False
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Read news until no caller waits any more; of spans too, if a caller waits for those."""
        spans = self._signals.spans_wanted
        if self._watching is not None and not self._watching.done():
            if self._hears_spans or not spans:
                return
            self._watching.cancel()
        self._hears_spans = spans
        self._watching = asyncio.create_task(self._watch(spans), name="leyden-store-news")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self, spans: bool) -> None:
        try:
            while self._signals.wanted:
                news = await self._store.get_news(after=self._after, spans=spans, timeout_seconds=_POLL_SECONDS)
                self._tell(news)
                await asyncio.sleep(_PACE_SECONDS)
        except LeydenError:
            await asyncio.sleep(_AFTER_FAILURE_SECONDS)
            self._signals.look_again()  # each waiter reads for itself and gets the error

    def _tell(self, news: News) -> None:
        begins, self._after = self._after is None, news.after
        if begins or news.gap:
            self._signals.look_again()  # something may have happened between their look and this moment
        else:
            self._signals.publish(news.claimable, news.finished, news.spans)


class _Cache:
    """Replies that the server need not send again. Each use asks the server whether they are still
    valid.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[str, bytes]] = OrderedDict()

    def headers(self, path: str) -> dict[str, str]:
        """Return the headers that request a reply only if it has changed."""
        with self._lock:
            known = self._answers.get(path)
        return {} if known is None else {"If-None-Match": known[0]}

    def answer(self, path: str, answer: ServerReply) -> ServerReply:
        """Return the answer, and remember it; return the remembered one if it is unchanged."""
        with self._lock:
            if answer.status == 304 and path in self._answers:
                self._answers.move_to_end(path)
                return ServerReply(200, self._answers[path][1], answer.etag)
            if answer.status == 200 and answer.etag is not None:
                self._answers[path] = answer.etag, answer.body
                if len(self._answers) > _CACHED_ANSWERS:
                    self._answers.popitem(last=False)
        return answer


def _make_ids(method: str, arguments: dict[str, Any]) -> None:
    for name, make in _MADE_HERE.get(method, {}).items():
        if arguments.get(name) is None:
            arguments[name] = make()
    if method == "start_rollout":
        arguments.setdefault("run_id", current_run_id.get())
    if method == "enqueue_many_rollouts":
        arguments["rollouts"] = [_with_id(request) for request in arguments["rollouts"]]


def _with_id(request: EnqueueRolloutRequest) -> EnqueueRolloutRequest:
    if request.rollout_id is not None:
        return request
    return request.model_copy(update={"rollout_id": ids.rollout_id()})


def _requeues(arguments: dict[str, Any]) -> bool:
    """Return whether a rollout is requeued by hand. Repeated, this could take it from the next
    worker that claimed it.
    """
    return arguments.get("status") in ("queuing", "requeuing")


def reconnect(url: str, token: str | None, options: dict[str, Any]) -> LightningStoreClient:
    """Return a new client of the store at `url`. Pickled clients and servers unpickle by it."""
    return LightningStoreClient(url, token=token, **options)
