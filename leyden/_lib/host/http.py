"""The kit that HTTP applications are written with: read a request within limits, check its sender, reply or refuse.

An application is an ASGI callable. `SiteGuard`, `check_method` and `read_body` raise `Refusal`, and so do the
application's own checks, which use `bearer_token` and `is_secret`. The application catches the refusal and replies with
an error in the form that its clients read (`send_reply`). `on_disconnect` watches for a client that leaves. This module
knows no routes and no sockets; `asgi` serves an application.
"""

from __future__ import annotations

import asyncio
import hmac
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from leyden._lib.host.listening import is_loopback
from leyden._lib.json import PIECE_BYTES, JsonMeter, TooMuchJson, check_json_work
from leyden._lib.per_loop import PerLoop
from leyden.errors import redact

T = TypeVar("T")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RequestHeaders = Mapping[bytes, bytes]
"""A request's headers by name, in lower case."""
HeaderFields = Sequence[tuple[bytes, bytes]]
"""Header fields of a reply, in lower case."""

JSON: Final = (b"content-type", b"application/json")

MAX_BODY_BYTES: Final = 64 * 2**20
"""The default limit of one request's body, as sent and unpacked."""
LARGE_BYTES: Final = 64 * 2**10
"""Bytes of a body from which it is unpacked, checked and parsed in another thread."""
_DRAIN: Final = 8
"""A refused body is drained up to this many times the limit, so that the client reads the reply."""
_GZIP_MEMBERS: Final = 2000
"""The most gzip members of one body. An empty member takes 20 bytes to send and costs as much as 64 KiB."""
_OWN_PAGE: Final = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for a page of this server, and for an address that the user typed."""


class Refusal(Exception):
    """An error that an application replies with in place of a result."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        headers: HeaderFields = (),
    ) -> None:
        """Describe the error.

        status: the HTTP status of the reply.
        code: a word for programs; "" if the clients of this application read none.
        message: what is wrong and what the client can do. Secrets in it are redacted.
        param: the field of the request that is wrong.
        retry_after_seconds: when the same request may succeed; None if the reply does not say.
        headers: further header fields of the reply.
        """
        self.message = redact(message)
        super().__init__(self.message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        if retry_after_seconds is not None:
            headers = [*headers, (b"retry-after", str(retry_after_seconds).encode())]
        self.headers = headers


class ClientGone(Exception):
    """The client left before its request was complete, so no reply is wanted."""


class HttpReply:
    """The status, body and header fields of a reply."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status = status
        self.body = body
        self.headers = headers


Handler = Callable[[bytes, RequestHeaders], Awaitable[HttpReply]]
"""Handles a POST, given the body (unpacked) and the headers of the request."""


def mounted(app: Any, mounts: Mapping[str, Any]) -> Any:
    """Return an ASGI application that passes the requests below each path to the application mounted there, and all
    others to `app`.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path = raw_path(scope)
        at = next((each for each in mounts if path == each or path.startswith(f"{each}/")), None)
        await (app if at is None else mounts[at])(scope, receive, send)

    return serve if mounts else app


async def send_reply(send: Send, body: bytes, *, status: int = 200, headers: HeaderFields = (JSON,)) -> None:
    """Send a whole reply with its length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of this name (in lower case), or None."""
    fields: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for field, value in fields:
        if field == name:
            return value
    return None


def content_type(headers: RequestHeaders) -> bytes:
    """Return the type of a request's body in lower case, without parameters; empty if none is given."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def raw_path(scope: Scope) -> str:
    """Return the path as the client sent it, percent-encoded and without the query."""
    return (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")


def check_method(scope: Scope, *allowed: str) -> None:
    """Raise Refusal (405), which names the allowed methods, unless the request uses one of them."""
    if scope["method"] not in allowed:
        names = ", ".join(allowed)
        raise Refusal(
            405,
            "method_not_allowed",
            f"{raw_path(scope)} takes {names}, not {scope['method']}",
            headers=[(b"allow", names.encode())],
        )


def bearer_token(authorization: bytes | None) -> bytes:
    """Return the token of an `Authorization: Bearer` header; empty if the header is missing or of another scheme."""
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def is_secret(given: bytes, secret: bytes) -> bool:
    """Return whether a client gave the secret. The time that it takes does not depend on how much of it is right."""
    return hmac.compare_digest(given, secret)


async def disconnected(receive: Receive) -> None:
    """Return when the client has left. Call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def on_disconnect(receive: Receive, leave: Callable[[], object]) -> Generator[asyncio.Task[None]]:
    """Call `leave` once if the client disconnects during the block. Read the request's body before.

    Yield the task that waits for the disconnection. It is done once the client has left, and is cancelled at the end of
    the block.
    """

    async def watch() -> None:
        await disconnected(receive)
        leave()

    watcher = asyncio.create_task(watch())
    try:
        yield watcher
    finally:
        watcher.cancel()


class SiteGuard:
    """Refuses requests that a web page of another site may have made.

    A page can send a POST without a body, or with one of plain text, to any address that its browser reaches, without a
    preflight request. The browser names the page in `Origin` or `Sec-Fetch-Site`, which no page can change or leave
    out. Programs send neither header. A correct token makes no difference: no reply allows other origins (CORS), so a
    browser never sends the token for the page of another site.
    """

    def __init__(self, *, local_only: bool, also: Iterable[str] = ()) -> None:
        """Set the names that requests may call this server by.

        local_only: refuse every `Host` that is not a name of this machine, because another site can point its own name
            to 127.0.0.1 (DNS rebinding). Servers without a token need this.
        also: further host names that a server with `local_only` is called by.
        """
        self._names = frozenset(name.lower() for name in also) if local_only else None

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise Refusal: 403 for a request of another site's page, 400 for two `Host` headers."""
        host = origin = fetched_by = None
        for name, value in scope["headers"]:
            if name == b"host":
                if host is not None:
                    raise Refusal(400, "two_hosts", "the request has two Host headers; send one")
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                fetched_by = value
        if self._names is not None:
            called, is_local = _host_name(host or b"")
            if not is_local and called not in self._names:
                raise Refusal(
                    403,
                    "foreign_request",
                    f"the host {called!r} is not this machine: a server without a token serves the names 127.0.0.1 and localhost only; "
                    "use one of these names, or start the server with a token",
                )
        if fetched_by in _OWN_PAGE:
            foreign = False
        elif fetched_by is not None:
            # A user may open a page of this server by a link on another site, which cannot read the page.
            fields = dict(scope["headers"])
            opens = fields.get(b"sec-fetch-mode") == b"navigate" and fields.get(b"sec-fetch-dest") == b"document"
            foreign = not opens or scope["method"] != "GET"
        else:
            at = None if origin is None else origin.lower().partition(b"://")[2]  # a proxy may change the scheme
            foreign = origin is not None and (host is None or at != host.lower())
        if foreign:
            page = "another site" if origin is None else repr(origin.decode("latin-1"))
            raise Refusal(
                403,
                "foreign_request",
                f"the request comes from a web page of {page}: this server takes requests of programs and of its own pages only; "
                "send it from a program, or serve the page at this server's address through a reverse proxy",
            )


@lru_cache(maxsize=64)
def _host_name(host: bytes) -> tuple[str, bool]:
    """Return the name in a `Host` header, in lower case without its port, and whether it always means this machine."""
    text = host.decode("latin-1")
    try:
        name = urlsplit(f"//{text}").hostname or ""
    except ValueError:
        name = text
    return name, is_loopback(name)


async def read_body(
    headers: RequestHeaders,
    receive: Receive,
    *,
    max_bytes: int,
    option: str | None = None,
    unpack: bool = True,
    is_json: bool = True,
) -> bytes:
    """Return the body of a request, holding at most the limit in memory.

    max_bytes: the limit of the body, as sent and unpacked.
    option: the option that raises this limit, for the message.
    unpack: decompress gzip; False returns the body as it came.
    is_json: refuse a body that takes too much work to parse as JSON (`JsonMeter`).
    Raise Refusal (413 for a body that is too large or too much work, 400 and 415 for one that cannot be unpacked) and
    ClientGone.
    """
    encoding = headers.get(b"content-encoding", b"identity").lower() if unpack else b"identity"
    if encoding not in (b"identity", b"gzip"):
        raise Refusal(
            415, "unknown_encoding", f"content-encoding {encoding.decode('latin-1')!r} is not supported; use gzip"
        )
    body = _parts(receive)
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        if headers.get(b"expect", b"").lower() != b"100-continue":  # a client that waits for it has sent nothing yet
            await _drain(body, _DRAIN * max_bytes)
        raise _too_large(max_bytes, option)
    try:
        if encoding == b"gzip":
            return await _read_gzip(body, max_bytes, option, JsonMeter() if is_json else None)
        parts: list[bytes] = []
        size = 0
        async for part in body:
            size += len(part)
            if size > max_bytes:
                parts.clear()
                await _drain(body, _DRAIN * max_bytes)
                raise _too_large(max_bytes, option)
            parts.append(part)
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        if is_json:
            await parsed(whole, check_json_work)
    except TooMuchJson as error:
        raise Refusal(
            413, "body_too_large", f"the body is too much work to parse: {error}; send less at a time"
        ) from None
    return whole


async def parsed(body: bytes, parse: Callable[[bytes], T]) -> T:
    """Return `parse(body)`, from another thread if the body is large.

    Large bodies are parsed one at a time, so that many of them at once take no more memory, and the thread that serves
    the other requests has one competitor for the interpreter.
    """
    if len(body) < LARGE_BYTES:
        return parse(body)
    async with _parsing.get_now():
        return await asyncio.to_thread(parse, body)


_parsing: Final = PerLoop[asyncio.Lock](lambda: nullcontext(asyncio.Lock()))


async def _read_gzip(body: AsyncIterator[bytes], max_bytes: int, option: str | None, meter: JsonMeter | None) -> bytes:
    """Return a request's body unpacked. Raise Refusal (413) before more than `max_bytes` are in memory, and TooMuchJson
    at the first piece beyond the limits.
    """
    unpacker, parts, size, members = zlib.decompressobj(zlib.MAX_WBITS | 16), list[bytes](), 0, 1

    def unpack(packed: bytes) -> bytes:
        """Unpack up to `PIECE_BYTES`, and return the packed bytes that are left."""
        nonlocal unpacker, size, members
        if unpacker.eof:  # gzip files may be concatenated
            unpacker, members = zlib.decompressobj(zlib.MAX_WBITS | 16), members + 1
            if members > _GZIP_MEMBERS:
                raise Refusal(
                    413,
                    "body_too_large",
                    f"the body has more than {_GZIP_MEMBERS:,} gzip members; compress it as one",
                )
        piece = unpacker.decompress(packed, min(max_bytes - size + 1, PIECE_BYTES))
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes, option)
        if meter is not None:
            meter.add(piece)
        parts.append(piece)
        return unpacker.unconsumed_tail or unpacker.unused_data

    def unpack_all(packed: bytes) -> None:
        while packed:
            packed = unpack(packed)

    try:
        async for part in body:
            if part and (rest := unpack(part)):
                await asyncio.to_thread(unpack_all, rest)
    except zlib.error as error:
        raise Refusal(400, "bad_encoding", f"the body is not gzip: {error}") from None
    if not unpacker.eof:
        raise Refusal(400, "bad_encoding", "the body ends in the middle of its gzip data")
    return b"".join(parts)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raise ClientGone if the client leaves before its end."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        yield message["body"]
        if not message.get("more_body"):
            return


async def _drain(body: AsyncIterator[bytes], max_bytes: int) -> None:
    read = 0
    async for part in body:
        read += len(part)
        if read > max_bytes:
            return


def _too_large(max_bytes: int, option: str | None) -> Refusal:
    larger = "" if option is None else f", or start it with a larger {option}"
    return Refusal(
        413,
        "body_too_large",
        f"the body is larger than the {max_bytes:,} bytes that this server accepts in one request; send less at a time{larger}",
    )
