"""The store as an ASGI application: a request in, a method of the store, its answer or its error out.

It knows HTTP and the table of `wire.py`; no socket, no thread, no database. It never answers with a traceback: an error
that nobody foresaw is written to the log under a number, and the answer says that number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from leyden.errors import ConfigError, LeydenError, StoreError
from leyden.host.asgi import Receive, Scope, Send
from leyden.host.http import MAX_BODY_BYTES, ClientGone, RequestRefused, SiteGuard, read_body
from leyden.store.base import LightningStore
from leyden.store.traffic import Traffic
from leyden.store.wire import LEYDEN_JSON, PREFIX, Route, find_route, status_of, verbs_at
from leyden.types import AttemptedRollout, current_run_id
from leyden.utils import ids
from leyden.utils.latch import Latch

logger = logging.getLogger(__name__)

T = TypeVar("T")

Headers = Mapping[bytes, bytes]
_JSON: Final = (b"content-type", b"application/json")
_OURS: Final = LEYDEN_JSON.encode()
_COMPRESS_FROM: Final = 16 * 1024
"""Bytes of an answer from which compression, where the client takes it, costs less than it saves."""
_ASIDE_FROM: Final = 1024 * 1024
"""Bytes from which an answer is compressed on another thread."""
_UNDONE: Final = 256


class Reply:
    """An answer: status, body, headers."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status = status
        self.body = body
        self.headers = headers


Mount = Callable[[bytes, str], Awaitable[Reply]]
"""What answers a POST at a path of its own: given the body (unpacked) and its content type."""

View = Callable[[Traffic], Awaitable[Reply]]
"""What answers a GET at a path of its own: given what the server was asked so far."""


@runtime_checkable
class InJson(Protocol):
    """A store that can say some answers in JSON, at less than it costs to make objects and write those."""

    @property
    def answered_in_json(self) -> Container[str]:
        """The names of those methods."""
        ...

    def json_of(self, method: str, arguments: Mapping[str, Any], *, packed: bool) -> Awaitable[bytes]:
        """The answer of one of them; packed: as LEYDEN_JSON. Raises what the method raises."""
        ...


class _Refusal(Exception):
    """A request that does not reach the store."""

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.reply = _error(status, ConfigError(message), *headers)


class _Gone(Exception):
    """The client went away; nobody wants the answer."""


class StoreApp:
    """Answers for `store`, in any event loop."""

    def __init__(
        self,
        store: LightningStore,
        *,
        token: str | None = None,
        guard: SiteGuard | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        pages: Mapping[str, Callable[[], Reply]] | None = None,
        mounts: Mapping[str, Mount] | None = None,
        claims_from: Latch | None = None,
        views: Mapping[str, View] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """
        token: the secret that a client must send as `Authorization: Bearer`; None: no secret.
        guard: refuses requests of other sites' pages; None: a guard that accepts any host name.
        max_body_bytes: of one request, as sent and unpacked; a larger one is refused with 413.
        pages: the responses to GET at these paths. They need no token, because they show nothing of
            the store.
        mounts: handlers of POST at these paths.
        claims_from: until it is open the queue looks empty; None: it is open.
        views: handlers of GET at these paths; they need the token.
        traffic: counts the requests; views get it.
        """
        self._store = store
        self._in_json = store if isinstance(store, InJson) else None
        self._token = None if token is None else token.encode()
        self._guard = guard or SiteGuard(local_only=False)
        self._max_body_bytes = max_body_bytes
        self._pages = {f"{PREFIX}/health": self._health, **(pages or {})}
        self._mounts = mounts or {}
        self._claims_from = claims_from
        self._views = views or {}
        self._traffic = traffic or Traffic()
        self._waiting: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._undone: deque[str] = deque(maxlen=_UNDONE)
        """The claims that clients said are undone."""

    def stop_waiting(self) -> None:
        """Answer everyone who waits, now: the server stops. Call it in the loop that serves."""
        self._stopping = True
        for task in self._waiting:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        current_run_id.set(None)  # the run of a request is the sender's, never one of this process
        headers: Headers = dict(scope["headers"])
        started = time.perf_counter()
        try:
            reply = await self._answer(scope, headers, receive)
        except (_Gone, ClientGone):
            return
        except _Refusal as refusal:
            reply = refusal.reply
        except RequestRefused as refused:
            close = [(b"connection", b"close")] if refused.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else []
            reply = _error(refused.status, ConfigError(str(refused)), *close)
        except LeydenError as error:
            reply = _error(status_of(error), error)
        except Exception as error:  # noqa: BLE001 -- the boundary: the client hears of it, the log has the details
            reply = _unforeseen(scope, error)
        seconds = None if scope.get("waits") else time.perf_counter() - started
        self._traffic.add(scope.get("asked", "other"), reply.status, seconds)
        await _send(reply, headers, send)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive) -> Reply:
        self._guard.check(scope)
        path: str = scope["raw_path"].decode("latin-1")
        verb: str = scope["method"]
        page = self._pages.get(path) if verb == "GET" else None
        if page is not None:
            return page()
        self._check_token(headers)
        mount = self._mounts.get(path)
        if mount is not None and verb == "POST":
            scope["asked"] = path
            body = await self._read(headers, receive)
            return await mount(body, headers.get(b"content-type", b"").decode("latin-1"))
        view = self._views.get(path)
        if view is not None and verb == "GET":
            scope["asked"] = path
            return await view(self._traffic)
        found = find_route(verb, path)
        if found is None:
            raise self._no_such_route(verb, path)
        route, in_path = found
        scope["asked"] = route.method
        body = await self._read(headers, receive)
        if body and verb == "POST":
            _check_content_type(headers)
        arguments = route.read(in_path, scope["query_string"], body)
        scope["waits"] = route.waits is not None and _may_wait(route.waits, arguments)
        packed = headers.get(b"accept") == _OURS
        if self._in_json is not None and route.method in self._in_json.answered_in_json:
            payload = await _fitting(route, self._in_json.json_of(route.method, arguments, packed=packed))
        else:
            answer = await self._call(route, arguments, receive)
            payload = route.written(arguments, answer, body, packed=packed)
        return _cached(headers, payload) if route.cached else Reply(route.status, payload, _JSON)

    async def _call(self, route: Route, arguments: dict[str, Any], receive: Receive) -> Any:
        """The method's answer. Raises what the method raises; _Gone when the client leaves before a method that waits."""
        if route.method == "dequeue_many_rollouts":
            return await self._claim(route, arguments, receive)
        if route.method == "undo_claim" and not arguments.get("unless_repeated"):
            self._undone.append(arguments["claim_id"])
        return await self._run(route, arguments, receive)

    async def _claim(self, route: Route, arguments: dict[str, Any], receive: Receive) -> Any:
        """A claim; it is undone where its answer reaches nobody.

        A client that chose the id may be asking again on another connection, whose answer counts; its word that the claim is undone
        may come in before the claim does.
        """
        chosen = arguments.get("claim_id")
        claim_id = arguments["claim_id"] = ids.claim_id() if chosen is None else chosen
        try:
            claimed = await self._run(route, arguments, receive)
            if not claimed or chosen not in self._undone:
                return claimed
        except _Gone:
            for_certain = chosen is None or chosen in self._undone
            await self._store.undo_claim(claim_id, unless_repeated=not for_certain)
            raise
        await self._store.undo_claim(claim_id)
        return []

    async def _run(self, route: Route, arguments: dict[str, Any], receive: Receive) -> Any:
        claims = route.method == "dequeue_many_rollouts"
        method = self._dequeue if claims else getattr(self._store, route.method)
        if route.waits is not None and _may_wait(route.waits, arguments):
            return await _fitting(route, self._while_wanted(method(**arguments), receive))
        return await _fitting(route, method(**arguments))

    async def _dequeue(self, *, timeout_seconds: float = 0.0, **arguments: Any) -> Sequence[AttemptedRollout]:
        if self._claims_from is not None and not self._claims_from.is_set():
            until = asyncio.get_running_loop().time() + timeout_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._claims_from.wait_async()
            if not self._claims_from.is_set():
                return []
            timeout_seconds = max(0.0, until - asyncio.get_running_loop().time())
        return await self._store.dequeue_many_rollouts(timeout_seconds=timeout_seconds, **arguments)

    async def _while_wanted(self, operation: Awaitable[Any], receive: Receive) -> Any:
        """The operation's answer. Raises _Gone when the client leaves first, and cancels what waits."""
        working, gone = asyncio.ensure_future(operation), asyncio.ensure_future(receive())
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            if self._stopping:
                raise asyncio.CancelledError
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise _Gone
            return working.result()
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            if working.done():
                return working.result()
            raise _Refusal(503, "the server stops; ask again", (b"retry-after", b"1")) from None
        finally:
            self._waiting.discard(task)
            gone.cancel()
            if not working.done():
                working.cancel()
            await asyncio.wait({working})  # a claim that is cancelled is undone by then
            if not working.cancelled():
                working.exception()  # seen, if it was not raised above: nobody is there to hear it

    # ---- what the HTTP part asks ---------------------------------------------------------------------------------------

    def _check_token(self, headers: Headers) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            what = "this token is not the store's" if given else "this store asks for a token"
            raise _Refusal(
                401,
                f"{what}: send 'Authorization: Bearer ...' (a Leyden client: token=..., or LEYDEN_STORE_TOKEN)",
                (b"www-authenticate", b"Bearer"),
            )

    def _no_such_route(self, verb: str, path: str) -> _Refusal:
        shown = path in self._pages or path in self._views
        verbs = verbs_at(path) or (["POST"] if path in self._mounts else []) or (["GET"] if shown else [])
        if verbs:
            allowed = ", ".join(verbs)
            return _Refusal(405, f"{path} takes {allowed}, not {verb}", (b"allow", allowed.encode()))
        return _Refusal(404, f"there is nothing at {path}; what there is: /docs")

    def _health(self) -> Reply:
        return Reply(200, b'{"status":"ok"}', _JSON)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        return await read_body(headers, receive, max_bytes=self._max_body_bytes, option="max_body_bytes")


async def _fitting(route: Route, answer: Awaitable[T]) -> T:
    """The answer of the store. Raises ConfigError for an argument that no database can hold."""
    try:
        return await answer
    except (OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(f"{route}: a value does not fit into the store: {error}") from None


def _may_wait(parameter: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the method may wait: its parameter is not 0, or is None for ever (`timeout`'s default)."""
    seconds = arguments.get(parameter, None if parameter == "timeout" else 0.0)
    return seconds is None or seconds > 0


def _check_content_type(headers: Headers) -> None:
    """Anything but JSON is refused: a web page of another site can send other types without asking."""
    given = headers.get(b"content-type", b"")
    if given.partition(b";")[0].strip().lower() != b"application/json":
        raise _Refusal(415, f"content-type must be application/json, got {given.decode('latin-1')!r}")


def _cached(headers: Headers, payload: bytes) -> Reply:
    """The answer with its ETag, or 304 where the client has it already."""
    tag = f'"{hashlib.blake2b(payload, digest_size=12).hexdigest()}"'.encode()
    if headers.get(b"if-none-match") == tag:
        return Reply(304, b"", (b"etag", tag))
    return Reply(200, payload, _JSON, (b"etag", tag), (b"cache-control", b"no-cache"))


def _error(status: int, error: LeydenError, *headers: tuple[bytes, bytes]) -> Reply:
    body = json.dumps({"error": type(error).__name__, "message": str(error)}).encode()
    return Reply(status, body, _JSON, *headers)


def _unforeseen(scope: Scope, error: Exception) -> Reply:
    incident = secrets.token_hex(4)
    logger.error("incident %s: %s %s failed", incident, scope["method"], scope["path"], exc_info=error)
    return _error(
        500, StoreError(f"the server failed in a way that nobody foresaw; its log has the details: {incident}")
    )


async def _send(reply: Reply, headers: Headers, send: Send) -> None:
    body, extra = reply.body, reply.headers
    if len(body) >= _COMPRESS_FROM and b"gzip" in headers.get(b"accept-encoding", b""):
        body = await asyncio.to_thread(_gzip, body) if len(body) >= _ASIDE_FROM else _gzip(body)
        extra = (*extra, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding"))
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": reply.status, "headers": [*extra, length]})
    await send({"type": "http.response.body", "body": body})


def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | 16)
    return packer.compress(body) + packer.flush()
