"""`LightningStoreClient`: a store behind a server, used like one in this process.

It knows the table of routes in `wire.py` and the connection to the server (`connection.py`), and no database. Each
method is a request. Callers that wait for rollouts or spans share one long poll in each event loop. To add a method,
add its route to `wire.py` and a line to the class.
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

from leyden._lib import ids
from leyden._lib.options import check_number
from leyden._lib.per_loop import PerLoop
from leyden.errors import LeydenError, StoreError
from leyden.store.base import LightningStore, StoreCapabilities
from leyden.store.connection import Connection, ServerReply
from leyden.store.ending import END, EndReply, WaitForEnd
from leyden.store.notify import Signals, check_wait
from leyden.store.waiting import WaitingStore
from leyden.store.wire import BY_METHOD, Route, error_from
from leyden.types import AttemptedRollout, Rollout, SpanPage, current_run_id

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_VARIABLE: Final = "LEYDEN_STORE_TOKEN"
"""The environment variable that is the default of `token`."""
_POLL_SECONDS: Final = 30.0
"""The longest time that one request waits at the server."""
_WATCH_SECONDS: Final = 5.0
"""The longest time that one request for the end of a run waits. The client notices the death of a server that much
later."""
_PACE_SECONDS: Final = 0.005
"""The shortest time between two requests for news. Changes in between arrive together."""
_CLAIMS_AT_ONCE: Final = 8
"""The most claims of one event loop that wait at the server. Further ones wait in this process."""
_UNDO_SECONDS: Final = 2.0
"""How long a cancelled claim may take to be undone."""
_AFTER_FAILURE_SECONDS: Final = 0.2
"""The pause after a failed request for news, before each waiter reads for itself."""
_CACHED_REPLIES: Final = 32
"""How many replies `_Cache` keeps."""

_MADE_HERE: dict[str, dict[str, Callable[[], str]]] = {
    "start_rollout": {"rollout_id": ids.rollout_id, "attempt_id": ids.attempt_id},
    "start_attempt": {"attempt_id": ids.attempt_id},
    "dequeue_many_rollouts": {"claim_id": ids.claim_id},
    "add_resources": {"resources_id": ids.resources_id},
}
"""Ids that a caller may leave to the store. They are made here, so that a repeated request adds no second row."""


def _remote(method: F) -> F:
    route = BY_METHOD[method.__name__]

    @wraps(method, updated=())
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ask(route, route.bind(args, kwargs))

    return cast(F, ask)


class LightningStoreClient(WaitingStore):
    """The store that a server serves at `url`. Every method is safe from any thread and any event loop. A pickled
    client holds its URL and token.

    A request that does not reach the server, or whose reply is lost, is sent again for `retry_seconds`, so that a
    server may be restarted meanwhile. The client makes the ids, so that nothing is done twice. A request that is not
    safe to repeat (`release_claims`, a rollout requeued by hand) raises StoreError, which says that the outcome is
    unknown. A failure is never reported as an empty result.
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
        retry_seconds: how long a server may be unavailable; 0: not at all.
        connections: the most open connections for each event loop.
        compress: whether to compress large requests and to accept compressed replies; None: if the server is on another
            machine.
        Raise ConfigError for a URL that is not a store server's.
        """
        check_number("retry_seconds", retry_seconds, at_least=0)
        check_number("connections", connections, at_least=1, whole=True)
        super().__init__(Signals())
        self._token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        self._options = {"retry_seconds": retry_seconds, "connections": connections, "compress": compress}
        self._connection = Connection(
            url, token=self._token, retry_seconds=retry_seconds, connections=connections, compress=compress
        )
        self._loop_states = PerLoop(lambda: _LoopState(self, self._signals))
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
        """Finish undoing this loop's cancelled claims, and close. Safe to repeat. Later calls raise StoreClosed."""
        here = asyncio.get_running_loop()
        if undoing := {task for task in self._undoing.copy() if task.get_loop() is here}:
            await asyncio.wait(undoing)
        await self._connection.close()
        self._signals.close()
        await self._loop_states.close()

    statistics = _remote(LightningStore.statistics)
    start_rollout = _remote(LightningStore.start_rollout)
    enqueue_many_rollouts = _remote(LightningStore.enqueue_many_rollouts)
    undo_claim = _remote(LightningStore.undo_claim)
    start_attempt = _remote(LightningStore.start_attempt)
    add_many_spans = _remote(LightningStore.add_many_spans)
    get_many_span_sequence_ids = _remote(LightningStore.get_many_span_sequence_ids)
    query_spans = _remote(LightningStore.query_spans)
    query_spans_of = _remote(LightningStore.query_spans_of)
    index_span_attribute = _remote(LightningStore.index_span_attribute)
    query_rollouts = _remote(LightningStore.query_rollouts)
    summarise_rollouts = _remote(LightningStore.summarise_rollouts)
    sum_spending = _remote(LightningStore.sum_spending)
    get_rollout_by_id = _remote(LightningStore.get_rollout_by_id)
    query_attempts = _remote(LightningStore.query_attempts)
    get_latest_attempt = _remote(LightningStore.get_latest_attempt)
    get_attempt_by_id = _remote(LightningStore.get_attempt_by_id)
    update_rollout = _remote(LightningStore.update_rollout)
    update_attempt = _remote(LightningStore.update_attempt)
    update_many_attempts = _remote(LightningStore.update_many_attempts)
    sweep = _remote(LightningStore.sweep)
    next_deadline = _remote(LightningStore.next_deadline)
    release_claims = _remote(LightningStore.release_claims)
    get_news = _remote(LightningStore.get_news)
    pin = _remote(LightningStore.pin)
    prune = _remote(LightningStore.prune)
    add_resources = _remote(LightningStore.add_resources)
    update_resources = _remote(LightningStore.update_resources)
    get_resources_by_id = _remote(LightningStore.get_resources_by_id)
    set_label = _remote(LightningStore.set_label)
    get_labelled_resources = _remote(LightningStore.get_labelled_resources)
    get_labels = _remote(LightningStore.get_labels)
    remove_label = _remote(LightningStore.remove_label)
    move_labels = _remote(LightningStore.move_labels)
    freeze_resources = _remote(LightningStore.freeze_resources)
    query_audit = _remote(LightningStore.query_audit)
    create_release = _remote(LightningStore.create_release)
    advance_release = _remote(LightningStore.advance_release)
    get_release = _remote(LightningStore.get_release)
    query_releases = _remote(LightningStore.query_releases)
    record_live_rollouts = _remote(LightningStore.record_live_rollouts)
    add_many_feedback = _remote(LightningStore.add_many_feedback)
    query_feedback = _remote(LightningStore.query_feedback)
    set_endpoint = _remote(LightningStore.set_endpoint)
    get_latest_resources = _remote(LightningStore.get_latest_resources)
    query_resources = _remote(LightningStore.query_resources)
    query_workers = _remote(LightningStore.query_workers)
    get_worker_by_id = _remote(LightningStore.get_worker_by_id)
    update_worker = _remote(LightningStore.update_worker)
    pause_worker = _remote(LightningStore.pause_worker)
    add_many_samples = _remote(LightningStore.add_many_samples)
    query_samples = _remote(LightningStore.query_samples)
    start_run = _remote(LightningStore.start_run)
    update_run = _remote(LightningStore.update_run)
    get_run_by_id = _remote(LightningStore.get_run_by_id)
    query_runs = _remote(LightningStore.query_runs)
    add_metrics = _remote(LightningStore.add_metrics)
    query_metrics = _remote(LightningStore.query_metrics)
    cut_metrics = _remote(LightningStore.cut_metrics)

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
        state = await self._loop_states.get()
        deadline = time.monotonic() + timeout_seconds
        try:
            if timeout_seconds <= 0 or state.claims.locked():
                claimed = await self._claim(limit, worker_id, claim_id)
                if claimed or timeout_seconds <= 0:
                    return claimed
            try:
                async with asyncio.timeout(timeout_seconds):
                    await state.claims.acquire()
            except TimeoutError:
                return []
            try:
                while True:
                    seconds = min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
                    claimed = await self._claim(limit, worker_id, claim_id, timeout_seconds=seconds)
                    if claimed or time.monotonic() >= deadline:
                        return claimed
            finally:
                state.claims.release()
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._undo(claim_id), name="leyden-store-undo")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)  # a second cancellation does not interrupt it
            raise

    async def _undo(self, claim_id: str) -> None:
        """Undo a claim that was cancelled while the server may have granted it."""
        with suppress(LeydenError, TimeoutError):  # if it fails, the attempt's timeout requeues the rollout
            async with asyncio.timeout(_UNDO_SECONDS):
                await self._ask(BY_METHOD["undo_claim"], {"claim_id": claim_id}, retry_seconds=0.0)

    async def wait_for_end(self) -> None:
        """Wait until the run that the server runs for has ended (`LightningStoreServer.announce_end`).

        A server that serves no particular run (`leyden store`) never reports an end. Raise StoreError when the server
        has been unavailable for `retry_seconds`.
        """
        watcher = ids.claim_id()
        while True:
            request = WaitForEnd(watcher=watcher, timeout_seconds=_WATCH_SECONDS)
            body = request.model_dump_json().encode()
            reply = await self._connection.ask("POST", END, body, waits_seconds=_WATCH_SECONDS)
            if reply.status != 200:
                raise error_from(reply.status, reply.body, self.url)
            if EndReply.model_validate_json(reply.body).ended:
                return

    # ---- the requests behind the methods that wait -----------------------------------------------

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
        (await self._loop_states.get()).watch()

    # ---- requests --------------------------------------------------------------------------------

    async def _ask(self, route: Route, arguments: dict[str, Any], *, retry_seconds: float | None = None) -> Any:
        """Send a call and parse its reply.

        Raise what the server's store raised, and StoreError for a missing or unreadable reply.
        """
        _make_ids(route.method, arguments)
        # A repeat of a rollout requeued by hand could take it from the worker that has claimed it since.
        requeues = arguments.get("status") in ("queuing", "requeuing")
        path = route.path_of(arguments)
        reply = await self._connection.ask(
            route.verb,
            path,
            route.body_of(arguments) if route.verb == "POST" else None,
            repeatable=route.repeatable and not requeues,
            waits_seconds=float(arguments.get(route.waits, 0.0)) if route.waits else 0.0,
            headers=self._cache.headers(path) if route.cached else None,
            retry_seconds=retry_seconds,
        )
        if route.cached:
            reply = self._cache.update(path, reply)
        if reply.status != route.status:
            raise error_from(reply.status, reply.body, self.url)
        try:
            return route.result_from(arguments, reply.body)
        except ValueError as error:
            raise StoreError(
                f"{self.url} replied to {route} in a form that this version of Leyden cannot read; "
                f"run the same version on both sides. {error}"
            ) from error


class _LoopState:
    """State of one event loop's callers: a semaphore for claims that wait at the server, and a task for news."""

    def __init__(self, store: LightningStore, signals: Signals) -> None:
        self.claims = asyncio.Semaphore(_CLAIMS_AT_ONCE)
        self._store = store
        self._signals = signals
        self._after: str | None = None
        self._reads_spans = False
        self._watching: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Start the task that reads news, unless it runs already. News of spans are read only if a caller waits for
        spans.
        """
        spans = self._signals.spans_wanted
        if self._watching is not None and not self._watching.done():
            if self._reads_spans or not spans:
                return
            self._watching.cancel()
        self._reads_spans = spans
        self._watching = asyncio.create_task(self._watch(spans), name="leyden-store-news")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self, spans: bool) -> None:
        """Read news and publish them to the waiters, until no caller waits or a request fails."""
        try:
            while self._signals.wanted:
                news = await self._store.get_news(after=self._after, spans=spans, timeout_seconds=_POLL_SECONDS)
                begins, self._after = self._after is None, news.after
                if begins or news.gap:
                    self._signals.wake_all()  # there may be news since the waiters have read
                else:
                    self._signals.publish(news.claimable, news.finished, news.spans)
                await asyncio.sleep(_PACE_SECONDS)
        except LeydenError:
            await asyncio.sleep(_AFTER_FAILURE_SECONDS)
            self._signals.wake_all()  # each waiter reads for itself and gets the error


class _Cache:
    """Replies by path, which the server need not send again if they are unchanged (ETag)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: OrderedDict[str, tuple[str, bytes]] = OrderedDict()

    def headers(self, path: str) -> dict[str, str]:
        with self._lock:
            known = self._replies.get(path)
        return {} if known is None else {"If-None-Match": known[0]}

    def update(self, path: str, reply: ServerReply) -> ServerReply:
        """Store a new reply and return it; for "not modified" (304), return the stored reply."""
        with self._lock:
            if reply.status == 304 and path in self._replies:
                self._replies.move_to_end(path)
                return ServerReply(200, self._replies[path][1], reply.etag)
            if reply.status == 200 and reply.etag is not None:
                self._replies[path] = reply.etag, reply.body
                if len(self._replies) > _CACHED_REPLIES:
                    self._replies.popitem(last=False)
        return reply


def _make_ids(method: str, arguments: dict[str, Any]) -> None:
    """Add the ids and the run that the caller left to the store, in place."""
    for name, make in _MADE_HERE.get(method, {}).items():
        if arguments.get(name) is None:
            arguments[name] = make()
    if method == "start_rollout":
        arguments.setdefault("run_id", current_run_id.get())
    if method == "enqueue_many_rollouts":
        arguments["rollouts"] = [
            request if request.rollout_id is not None else request.model_copy(update={"rollout_id": ids.rollout_id()})
            for request in arguments["rollouts"]
        ]


def reconnect(url: str, token: str | None, options: dict[str, Any]) -> LightningStoreClient:
    """Return a new client of the store at `url`. Unpickling a client or a server calls it."""
    return LightningStoreClient(url, token=token, **options)
