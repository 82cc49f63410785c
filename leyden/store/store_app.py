"""The store as an ASGI application: each request calls one method of the store and replies with its result or its
error.

It knows HTTP and the table of `wire.py`; no socket, no thread, no database. A reply never holds a
traceback: an unexpected error is logged under a number, and the reply names that number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar, cast, runtime_checkable

from leyden._lib import ids
from leyden._lib.aio import Latch
from leyden._lib.host import pages
from leyden._lib.host.http import (
    JSON,
    MAX_BODY_BYTES,
    ClientGone,
    Handler,
    HttpReply,
    Receive,
    Refusal,
    RequestHeaders,
    Scope,
    Send,
    SiteGuard,
    bearer_token,
    check_method,
    content_type,
    disconnected,
    is_secret,
    parsed,
    read_body,
    send_reply,
)
from leyden.errors import ConfigError, LeydenError, StoreError
from leyden.store.base import LightningStore
from leyden.store.openapi import openapi_json
from leyden.store.otlp import PROTOBUF, TRACES
from leyden.store.request_metrics import RequestMetrics
from leyden.store.wire import LEYDEN_JSON, PREFIX, Route, find_route, status_of, verbs_at
from leyden.types import AttemptedRollout, current_run_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PACKED: Final = LEYDEN_JSON.encode()
_COMPRESS_FROM: Final = 16 * 1024
"""Bytes of a reply from which compression, if the client accepts it, costs less than it saves."""
_THREAD_FROM: Final = 1024 * 1024
"""Bytes of a reply from which another thread compresses it."""
_UNDONE: Final = 256
"""The number of undone claims that are kept in memory."""
_PUBLIC: Final[Mapping[str, Callable[[], bytes]]] = {
    pages.HEALTH: lambda: pages.health().body,
    f"{PREFIX}/health": lambda: pages.health().body,
    "/openapi.json": openapi_json,
}
"""Paths that need no token, because they show nothing of the store, and the JSON that a GET returns."""
_CLAIM: Final = "dequeue_many_rollouts"
"""The method whose result must be undone if no client receives it."""
_FOR_OPERATORS: Final = frozenset(
    ("set_label", "remove_label", "move_labels", "freeze_resources", "create_release", "advance_release")
)
"""Methods that decide which version serves users. They need the operators' token."""

View = Callable[[RequestMetrics], Awaitable[HttpReply]]
"""Handles a GET, given the server's request metrics."""


@runtime_checkable
class JsonStore(Protocol):
    """A store that writes the results of some methods as JSON directly, which costs less than objects in between."""

    @property
    def json_methods(self) -> Container[str]:
        """The names of the methods whose result `json_of` writes."""
        ...

    def json_of(self, method: str, arguments: Mapping[str, Any], *, packed: bool) -> Awaitable[bytes]:
        """Return the result of a method as JSON. Raise what the method raises.

        packed: write tokens as base64 of their arrays, for Leyden's client (LEYDEN_JSON).
        """
        ...


class StoreApplication(Protocol):
    """An ASGI application whose waiting requests can be ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def stop_waiting(self) -> None:
        """Reply to every waiting request now. Call it in the loop that serves."""
        ...


class StoreApp:
    """Serves `store` in any event loop."""

    def __init__(
        self,
        store: LightningStore,
        *,
        token: str | None = None,
        operator_token: str | None = None,
        guard: SiteGuard | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        handlers: Mapping[str, Handler] | None = None,
        claims_from: Latch | None = None,
        views: Mapping[str, View] | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        """Make the application.

        token: the secret that a client must send as `Authorization: Bearer`; None admits every client.
        operator_token: the only secret that moves labels, freezes versions and advances releases. It admits to
            everything else too. None: `token` does all of this.
        guard: refuses requests of other sites' pages; None: a guard that accepts any host name.
        max_body_bytes: the limit of one request, as sent and unpacked; a larger one is refused with 413.
        handlers: further handlers of POST, by path; they need the token.
        claims_from: until this latch opens, the queue looks empty; None: it is open.
        views: further handlers of GET, by path; they need the token.
        metrics: counts the requests; views are given it.
        """
        self._store = store
        self._in_json = store if isinstance(store, JsonStore) else None
        self._token = None if token is None else token.encode()
        self._operator_token = None if operator_token is None else operator_token.encode()
        self._guard = guard or SiteGuard(local_only=False)
        self._max_body_bytes = max_body_bytes
        self._handlers = handlers or {}
        self._claims_from = claims_from
        self._views = views or {}
        self._metrics = metrics or RequestMetrics()
        self._waiting: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._undone: deque[str] = deque(maxlen=_UNDONE)
        """Ids of the claims that clients have undone lately."""

    def stop_waiting(self) -> None:
        self._stopping = True
        for task in self._waiting:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request. Every error becomes a JSON reply with its status; an unexpected error is logged.

        A request whose client has gone gets no reply. Requests that wait for news are counted in the metrics without a
        duration.
        """
        current_run_id.set(None)  # the run of a request is the sender's, never one of this process
        headers: RequestHeaders = dict(scope["headers"])
        started = time.perf_counter()
        try:
            reply = await self._reply(scope, headers, receive)
        except ClientGone:
            return
        except Refusal as refusal:
            reply = _error(refusal.status, ConfigError(refusal.message), *refusal.headers)
            if refusal.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # the rest of the body may not have been read
                reply.headers = (*reply.headers, (b"connection", b"close"))
        except LeydenError as error:
            reply = _error(status_of(error), error)
        except Exception as error:
            incident = secrets.token_hex(4)
            logger.error("incident %s: %s %s failed", incident, scope["method"], scope["path"], exc_info=error)
            reply = _error(500, StoreError(f"the server failed unexpectedly; its log has the details: {incident}"))
        seconds = None if scope.get("waits") else time.perf_counter() - started
        self._metrics.add(scope.get("asked", "other"), reply.status, seconds)
        if len(reply.body) >= _COMPRESS_FROM and b"gzip" in headers.get(b"accept-encoding", b""):
            body = reply.body
            body = await asyncio.to_thread(_gzip, body) if len(body) >= _THREAD_FROM else _gzip(body)
            packed = ((b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))
            reply = HttpReply(reply.status, body, *reply.headers, *packed)
        await send_reply(send, reply.body, status=reply.status, headers=reply.headers)

    async def _reply(self, scope: Scope, headers: RequestHeaders, receive: Receive) -> HttpReply:
        """Check, route and run one request, and return its reply.

        The order matters: public pages need no token; then come the mounted handlers and views; then the routes of the
        store's methods. Raise Refusal or LeydenError for a request that is refused.
        """
        self._guard.check(scope)
        path: str = scope["raw_path"].decode("latin-1")
        verb: str = scope["method"]
        public = _PUBLIC.get(path)
        if public is not None and verb == "GET":
            return HttpReply(200, public(), JSON)
        self._check_token(headers)
        handler = self._handlers.get(path)
        if handler is not None and verb == "POST":
            scope["asked"] = path
            if path != TRACES:
                _check_content_type(headers)
            is_json = content_type(headers) != PROTOBUF.encode()
            return await handler(await self._read(headers, receive, is_json=is_json), headers)
        view = self._views.get(path)
        if view is not None and verb == "GET":
            scope["asked"] = path
            return await view(self._metrics)
        found = find_route(verb, path)
        if found is None:
            raise self._no_such_route(scope, path)
        route, in_path = found
        scope["asked"] = route.method
        self._check_operator(headers, route)
        body = await self._read(headers, receive)
        if body and verb == "POST":
            _check_content_type(headers)
        arguments = await parsed(body, lambda body: self.read_arguments(route, in_path, scope["query_string"], body))
        scope["waits"] = route.waits is not None and _may_wait(route.waits, arguments)
        packed = headers.get(b"accept") == _PACKED
        if self._in_json is not None and route.method in self._in_json.json_methods:
            payload = await _fitting(route, self._in_json.json_of(route.method, arguments, packed=packed))
        else:
            result = await self._call(route, arguments, receive)
            payload = self.write_result(route, arguments, result, body, packed=packed)
        if not route.cached:
            return HttpReply(route.status, payload, JSON)
        tag = f'"{hashlib.blake2b(payload, digest_size=12).hexdigest()}"'.encode()
        if headers.get(b"if-none-match") == tag:
            return HttpReply(304, b"", (b"etag", tag))
        return HttpReply(200, payload, JSON, (b"etag", tag), (b"cache-control", b"no-cache"))

    def read_arguments(self, route: Route, in_path: Sequence[str], query: bytes, body: bytes) -> dict[str, Any]:
        """Return the method's arguments by name. Override it to read the requests of other clients.

        Raise ConfigError for a request that cannot be read.
        """
        return route.read(in_path, query, body)

    def write_result(
        self, route: Route, arguments: Mapping[str, Any], result: Any, body: bytes, *, packed: bool
    ) -> bytes:
        """Return the method's result as JSON, `packed` for Leyden's client. Override it for other clients' replies."""
        return route.encode_result(arguments, result, body, packed=packed)

    async def _call(self, route: Route, arguments: dict[str, Any], receive: Receive) -> Any:
        """Return the method's result.

        Raise what the method raises; ClientGone if the client leaves a method that waits.
        """
        if route.method == _CLAIM:
            return await self._claim(route, arguments, receive)
        if route.method == "undo_claim" and not arguments.get("unless_repeated"):
            self._undone.append(arguments["claim_id"])
        return await self._run(route, arguments, receive)

    async def _claim(self, route: Route, arguments: dict[str, Any], receive: Receive) -> Any:
        """Claim rollouts, and undo the claim if its reply reaches no client.

        A client that chose the claim's id may repeat the request on another connection, whose reply counts. Its request
        to undo the claim may arrive before the claim does.
        """
        chosen = arguments.get("claim_id")
        claim_id = arguments["claim_id"] = ids.claim_id() if chosen is None else chosen
        try:
            claimed = await self._run(route, arguments, receive)
            if not claimed or chosen not in self._undone:
                return claimed
        except ClientGone:
            is_final = chosen is None or chosen in self._undone
            await self._store.undo_claim(claim_id, unless_repeated=not is_final)
            raise
        await self._store.undo_claim(claim_id)
        return []

    async def _run(self, route: Route, arguments: dict[str, Any], receive: Receive) -> Any:
        """Call the method. If it may wait, cancel it when its client leaves or the server stops."""
        method = self._dequeue if route.method == _CLAIM else getattr(self._store, route.method)
        if route.waits is not None and _may_wait(route.waits, arguments):
            return await _fitting(route, self._while_connected(method(**arguments), receive))
        return await _fitting(route, method(**arguments))

    async def _dequeue(self, *, timeout_seconds: float = 0.0, **arguments: Any) -> Sequence[AttemptedRollout]:
        """Claim rollouts once the server admits claims. Waiting for that counts as waiting in the queue."""
        if self._claims_from is not None and not self._claims_from.is_set():
            until = asyncio.get_running_loop().time() + timeout_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._claims_from.wait_async()
            if not self._claims_from.is_set():
                return []
            timeout_seconds = max(0.0, until - asyncio.get_running_loop().time())
        return await self._store.dequeue_many_rollouts(timeout_seconds=timeout_seconds, **arguments)

    async def _while_connected(self, operation: Awaitable[Any], receive: Receive) -> Any:
        """Return the operation's result.

        If the client leaves first, cancel the operation and raise ClientGone. If the server stops first, cancel it and
        raise Refusal (503).
        """
        working, gone = asyncio.ensure_future(operation), asyncio.ensure_future(disconnected(receive))
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._waiting.add(task)
        try:
            if self._stopping:
                raise asyncio.CancelledError
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            return working.result()
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            if working.done():
                return working.result()
            raise Refusal(503, "stopping", "the server stops; send the request again", retry_after_seconds=1) from None
        finally:
            self._waiting.discard(task)
            gone.cancel()
            if not working.done():
                working.cancel()
            await asyncio.wait({working})  # a claim that is cancelled is undone by then
            if not working.cancelled():
                working.exception()  # retrieved, so that asyncio does not log it if it was not raised above

    def _check_token(self, headers: RequestHeaders) -> None:
        """Raise Refusal (401) if the server has a token and the request bears neither that token nor the operators'."""
        if self._token is None:
            return
        given = bearer_token(headers.get(b"authorization"))
        if not is_secret(given, self._token) and not self._is_operator(given):
            wrong = "this token is not the store's" if given else "this store asks for a token"
            raise Refusal(
                401,
                "invalid_token",
                f"{wrong}: send 'Authorization: Bearer ...' (a Leyden client: token=..., or LEYDEN_STORE_TOKEN)",
                headers=[(b"www-authenticate", b"Bearer")],
            )

    def _check_operator(self, headers: RequestHeaders, route: Route) -> None:
        """Raise Refusal (403) for a method that needs the operators' token if the request lacks it. A server without
        such a token lets every admitted client call these methods.
        """
        if self._operator_token is None or route.method not in _FOR_OPERATORS:
            return
        if not self._is_operator(bearer_token(headers.get(b"authorization"))):
            raise Refusal(
                403,
                "operators_only",
                f"{route.method} needs this store's operators' token: set LEYDEN_OPERATOR_TOKEN, as `leyden resources` reads it",
            )

    def _is_operator(self, given: bytes) -> bool:
        return self._operator_token is not None and is_secret(given, self._operator_token)

    def _no_such_route(self, scope: Scope, path: str) -> Refusal:
        """Return the refusal (404) of an unknown path. Raise Refusal (405) if the path takes another verb."""
        if path in _PUBLIC or path in self._views:
            check_method(scope, "GET")
        verbs = ["POST"] if path in self._handlers else verbs_at(path)
        if verbs:
            check_method(scope, *verbs)
        return Refusal(404, "no_such_path", f"there is nothing at {path}; /openapi.json lists what there is")

    async def _read(self, headers: RequestHeaders, receive: Receive, *, is_json: bool = True) -> bytes:
        return await read_body(
            headers, receive, max_bytes=self._max_body_bytes, option="max_body_bytes", is_json=is_json
        )


async def _fitting(route: Route, result: Awaitable[T]) -> T:
    """Return the store's result. Raise ConfigError for an argument that no database can hold."""
    try:
        return await result
    except (OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(f"{route}: a value does not fit into the store: {error}") from None


def _may_wait(parameter: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether the method may wait: its parameter is not 0. None, the default of `timeout`, is no limit."""
    seconds = arguments.get(parameter, None if parameter == "timeout" else 0.0)
    return seconds is None or seconds > 0


def _check_content_type(headers: RequestHeaders) -> None:
    """Raise Refusal (415) for anything but JSON: other sites' pages can send other types without a preflight."""
    if content_type(headers) != b"application/json":
        given = headers.get(b"content-type", b"").decode("latin-1")
        raise Refusal(415, "wrong_content_type", f"content-type must be application/json, got {given!r}")


def _error(status: int, error: LeydenError, *headers: tuple[bytes, bytes]) -> HttpReply:
    body = json.dumps({"error": type(error).__name__, "message": str(error)}).encode()
    return HttpReply(status, body, JSON, *headers)


def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | 16)
    return packer.compress(body) + packer.flush()
