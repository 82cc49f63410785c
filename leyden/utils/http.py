"""What every HTTP server here checks before it answers: who sends the request.

`SiteGuard` refuses what the page of another web site made a browser send. It raises `RequestRefused`, and the application gives
the refusal the form that its clients read. This module knows no routes and no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from leyden.utils.listening import is_loopback

Headers = Iterable[tuple[bytes, bytes]]
"""Headers as ASGI gives them: names in lower case, in the order of the request."""

_OWN_PAGE: Final = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site: a page of this server sent the request, or the user did (an address typed, a bookmark)."""


class RequestRefused(Exception):
    """A request that the server does not take."""

    def __init__(self, status: int, message: str) -> None:
        """status: the HTTP status of the answer. message: what is wrong and what the client can do."""
        super().__init__(message)
        self.status = status


class SiteGuard:
    """Refuses requests that a web page of another site may have made.

    A page can send a POST without a body, or with one of plain text, to any address that its browser reaches, without asking that
    server first. The browser names the page in `Origin` or `Sec-Fetch-Site`, which no page can change or leave out. Programs send
    neither header. A correct token makes no difference: no answer of ours allows other origins (CORS), so a browser never sends
    the token of another site's page.
    """

    def __init__(self, *, local_only: bool, also: Iterable[str] = ()) -> None:
        """
        local_only: refuse every `Host` that is not a name of this machine, because another site can let its own name stand for
        127.0.0.1 (DNS rebinding). Servers without a token need this.
        also: further host names that a server with `local_only` is called by.
        """
        self._names = frozenset(name.lower() for name in also) if local_only else None

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise RequestRefused: 403 for a request of another site's page, 400 for a request with two `Host` headers."""
        host = origin = fetched_by = None
        for name, value in scope["headers"]:
            if name == b"host":
                if host is not None:
                    raise RequestRefused(400, "the request has two Host headers; send one")
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
                    f"the host {called!r} is not this machine: a server without a token answers as 127.0.0.1 or localhost only; "
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
                f"the request comes from a web page of {page}: this server takes requests of programs and of its own pages only; "
                "send it from a program, or serve the page at this server's address through a reverse proxy",
            )


def _follows_a_link(scope: Mapping[str, Any]) -> bool:
    """Whether the browser opens a page of this server for its user, who clicked a link elsewhere. The other page sees nothing of it."""
    headers = dict(scope["headers"])
    opens = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return opens and scope["method"] == "GET"


def _same_place(origin: bytes, host: bytes | None) -> bool:
    """Whether an origin (`http://localhost:4747`) is at `host` (`localhost:4747`). A proxy may have changed the scheme."""
    return host is not None and origin.lower().partition(b"://")[2] == host.lower()


@lru_cache(maxsize=64)
def _called(host: bytes) -> tuple[str, bool]:
    """The name in a `Host` header, in lower case and without its port, and whether it always means this machine."""
    text = host.decode("latin-1")
    try:
        name = urlsplit(f"//{text}").hostname or ""
    except ValueError:
        name = text
    return name, is_loopback(name)
