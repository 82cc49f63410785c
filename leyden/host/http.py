"""Check the sender of an HTTP request, and read its body within limits.

`SiteGuard` refuses what the page of another web site made a browser send; `read_body` refuses what is too large. They raise
`RequestRefused`, and the application gives the refusal the form that its clients read. This module knows no routes and no sockets.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from leyden.host.listening import is_loopback

if TYPE_CHECKING:
    from leyden.host.asgi import Receive

MAX_BODY_BYTES: Final = 64 * 2**20
"""The default limit of one request's body, as sent and unpacked."""
_DRAIN: Final = 8
"""A body that is refused is read, and forgotten, up to so many times the limit, so that the client reads the answer."""
_GZIP_MEMBERS: Final = 2000
"""The most gzip members of one body. An empty one takes 20 bytes, and costs as much as 64 KiB."""
_OWN_PAGE: Final = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for a page of this server, and for the user (a typed address, a
bookmark).
"""


MAX_JSON_PARTS: Final = 500_000
"""The most objects and lists in one JSON body. Each takes two bytes to send and some 500 bytes of memory once it is parsed."""
_JSON_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string of JSON, or what begins one and never ends. It never backtracks, so it reads each byte once."""


class RequestRefused(Exception):
    """The server refuses a request."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """status: the HTTP status of the answer. code: a word for programs. message: what is wrong and what the client can do."""
        super().__init__(message)
        self.status = status
        self.code = code


class ClientGone(Exception):
    """The client went away before its request was complete, so that no answer is wanted."""


class SiteGuard:
    """Refuses requests that a web page of another site may have made.

    A page can send a POST without a body, or with one of plain text, to any address that its browser reaches, without asking that
    server first. The browser names the page in `Origin` or `Sec-Fetch-Site`, which no page can change or leave out. Programs send
    neither header. A correct token makes no difference: no answer of ours allows other origins (CORS), so a browser never sends
    the token of another site's page.
    """

    def __init__(self, *, local_only: bool, also: Iterable[str] = ()) -> None:
        """
        local_only: refuse every `Host` that is not a name of this machine, because another site can
            point its own name to 127.0.0.1 (DNS rebinding). Servers without a token need this.
        also: further host names that a server with `local_only` is called by.
        """
        self._names = frozenset(name.lower() for name in also) if local_only else None

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise RequestRefused: 403 for a request of another site's page, 400 for two `Host`
        headers.
        """
        host = origin = fetched_by = None
        for name, value in scope["headers"]:
            if name == b"host":
                if host is not None:
                    raise RequestRefused(400, "two_hosts", "the request has two Host headers; send one")
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                fetched_by = value
        if self._names is not None:
            called, is_local = _called(host or b"")
            if not is_local and called not in self._names:
                raise RequestRefused(
                    403,
                    "foreign_request",
                    f"the host {called!r} is not this machine: a server without a token serves the names 127.0.0.1 and localhost only; "
                    "use one of these names, or start the server with a token",
                )
        if fetched_by is not None:
            foreign = fetched_by not in _OWN_PAGE and not _follows_a_link(scope)
        else:
            foreign = origin is not None and not _same_place(origin, host)
        if foreign:
            page = "another site" if origin is None else repr(origin.decode("latin-1"))
            raise RequestRefused(
                403,
                "foreign_request",
                f"the request comes from a web page of {page}: this server takes requests of programs and of its own pages only; "
                "send it from a program, or serve the page at this server's address through a reverse proxy",
            )


def _follows_a_link(scope: Mapping[str, Any]) -> bool:
    """Whether the browser opens a page of this server by a link elsewhere.

    The other page cannot read it.
    """
    headers = dict(scope["headers"])
    opens = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return opens and scope["method"] == "GET"


def _same_place(origin: bytes, host: bytes | None) -> bool:
    """Whether an origin (`http://localhost:4747`) is at `host` (`localhost:4747`). A proxy may have changed the scheme."""
    return host is not None and origin.lower().partition(b"://")[2] == host.lower()


@lru_cache(maxsize=64)
def _called(host: bytes) -> tuple[str, bool]:
    """Return the name in a `Host` header, in lower case without its port, and whether it always
    means this machine.
    """
    text = host.decode("latin-1")
    try:
        name = urlsplit(f"//{text}").hostname or ""
    except ValueError:
        name = text
    return name, is_loopback(name)


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, *, max_bytes: int, option: str | None = None, unpack: bool = True
) -> bytes:
    """Return the body of a request, holding at most the limit in memory.

    max_bytes: of the body, as sent and unpacked. option: the option that raises this limit, for the
        message.
    unpack: read gzip; without it a body is returned as it came.
    Raises RequestRefused (413 for a body that is too large, 400 and 415 for one that cannot be unpacked) and ClientGone.
    """
    encoding = headers.get(b"content-encoding", b"identity").lower() if unpack else b"identity"
    if encoding not in (b"identity", b"gzip"):
        raise RequestRefused(
            415, "unknown_encoding", f"content-encoding {encoding.decode('latin-1')!r} is not supported; use gzip"
        )
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        if headers.get(b"expect", b"").lower() != b"100-continue":  # a client that waits for it has sent nothing yet
            await _drain(receive, _DRAIN * max_bytes)
        raise _too_large(max_bytes, option)
    if encoding == b"gzip":
        return await _unzip(receive, max_bytes, option)
    parts: list[bytes] = []
    size = 0
    async for part in _parts(receive):
        size += len(part)
        if size > max_bytes:
            parts.clear()
            await _drain(receive, _DRAIN * max_bytes)
            raise _too_large(max_bytes, option)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _unzip(receive: Receive, max_bytes: int, option: str | None) -> bytes:
    unpacker, parts, size, members = zlib.decompressobj(zlib.MAX_WBITS | 16), list[bytes](), 0, 1
    try:
        async for part in _parts(receive):
            while part:
                if unpacker.eof:  # gzip files may stand one behind the other
                    unpacker, members = zlib.decompressobj(zlib.MAX_WBITS | 16), members + 1
                    if members > _GZIP_MEMBERS:
                        raise RequestRefused(
                            413,
                            "body_too_large",
                            f"the body has more than {_GZIP_MEMBERS:,} gzip members; compress it as one",
                        )
                parts.append(unpacker.decompress(part, max_bytes - size + 1))
                size += len(parts[-1])
                if size > max_bytes:
                    raise _too_large(max_bytes, option)
                part = unpacker.unconsumed_tail or unpacker.unused_data
    except zlib.error as error:
        raise RequestRefused(400, "bad_encoding", f"the body is not gzip: {error}") from None
    if not unpacker.eof:
        raise RequestRefused(400, "bad_encoding", "the body ends in the middle of its gzip data")
    return b"".join(parts)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        yield message["body"]
        if not message.get("more_body"):
            return


async def _drain(receive: Receive, most: int) -> None:
    read = 0
    async for part in _parts(receive):
        read += len(part)
        if read > most:
            return


def _too_large(max_bytes: int, option: str | None) -> RequestRefused:
    larger = "" if option is None else f", or start it with a larger {option}"
    return RequestRefused(
        413,
        "body_too_large",
        f"the body is larger than the {max_bytes:,} bytes that this server accepts in one request; send less at a time{larger}",
    )


def has_too_many_parts(body: bytes) -> bool:
    """Whether a JSON body has more than `MAX_JSON_PARTS` objects and lists. It is counted before anything is parsed."""
    if len(body) <= MAX_JSON_PARTS or body.count(b"{") + body.count(b"[") <= MAX_JSON_PARTS:
        return False
    outside = _JSON_STRING.sub(b"", body)  # a text may have as many as it likes
    return outside.count(b"{") + outside.count(b"[") > MAX_JSON_PARTS
