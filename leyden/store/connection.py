"""Send requests to a store server, on pooled connections, with compression and retries.

The module knows HTTP and the server's address, and no method of the store.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from leyden._lib.host.listening import UNIX_SCHEME, is_loopback, socket_path_of, unix_url
from leyden._lib.per_loop import PerLoop
from leyden.errors import ConfigError, StoreAway, StoreClosed, StoreError
from leyden.store.wire import LEYDEN_JSON

logger = logging.getLogger(__name__)

_COMPRESS_FROM: Final = 16 * 1024
"""The size in bytes from which compressing a body saves more time than it costs."""
_LARGE: Final = 2**20
"""Bytes from which a body is sent only after the server has accepted its head (100-continue)."""
_KEEP_ALIVE_SECONDS: Final = 15.0
"""The seconds for which an idle connection is kept. Servers keep it longer, so that both ends never
close it at once."""
_CONNECT_SECONDS: Final = 5.0
_READ_SECONDS: Final = 60.0
"""A server that sends nothing for this long counts as dead."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.02, 0.5
"""The pauses between two tries, which double from the first to the longest."""
_TROUBLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
"""Errors that a broken connection raises."""


@dataclass(frozen=True, slots=True)
class ServerReply:
    """The server's reply: status, unpacked body, and ETag if it has one."""

    status: int
    body: bytes
    etag: str | None


class Connection:
    """Sends requests to the server at `url`, from any thread and any event loop."""

    def __init__(
        self, url: str, *, token: str | None, retry_seconds: float, connections: int, compress: bool | None
    ) -> None:
        parts = urlsplit(url)
        self._socket_path = socket_path_of(url)
        if self._socket_path is not None:
            parts = urlsplit("http://localhost")
        elif parts.scheme == UNIX_SCHEME:
            raise ConfigError(
                f"a store server on a Unix socket is at {unix_url(Path('/path'))}, its path quoted, got {url!r}"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"a store server is at http://host:port or https://host:port, got {url!r}")
        if parts.username or parts.password:
            raise ConfigError(f"the URL of {parts.hostname!r} holds a password; give the server's token as token=...")
        if connections < 1:
            raise ConfigError(f"connections is {connections}; at least 1 is needed")
        self.url = url.rstrip("/")
        self._base = self.url if self._socket_path is None else "http://localhost"
        self.retry_seconds = retry_seconds
        self._connections = connections
        self._compress = not is_loopback(parts.hostname) if compress is None else compress
        self._headers = {"Accept": LEYDEN_JSON, "Accept-Encoding": "gzip" if self._compress else "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._closed = False
        self._unavailable = False
        """Whether the server did not reply to the last request."""
        self._sessions = PerLoop(self._session)

    async def ask(
        self,
        verb: str,
        path: str,
        body: bytes | None = None,
        *,
        repeatable: bool = True,
        waits_seconds: float = 0.0,
        headers: Mapping[str, str] | None = None,
        retry_seconds: float | None = None,
    ) -> ServerReply:
        """Send a request and return the server's reply, whatever its status.

        A request without a reply is sent again for `retry_seconds` if that is safe: if it never reached the server, or
        if it is `repeatable`.

        repeatable: whether doing it twice does no harm.
        waits_seconds: how long the server may hold the request on purpose.
        headers: further headers.
        retry_seconds: None for those of this connection.
        Raise StoreError without a reply (StoreAway if the request never reached the server), and StoreClosed after
        `close`.
        """
        started, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        patience = self.retry_seconds if retry_seconds is None else retry_seconds
        headers = headers or {}
        if body is not None:
            headers = {"Content-Type": "application/json", **headers}
            if self._compress and len(body) >= _COMPRESS_FROM:
                headers, body = headers | {"Content-Encoding": "gzip"}, gzip.compress(body, 1)
        while True:
            self._check_open()
            try:
                if repeatable:
                    session = await self._sessions.get()
                    answer, retry_after = await self._once(session, verb, path, body, headers, waits_seconds)
                else:  # on a new connection, since a pooled one may have been lost unnoticed
                    async with self._session() as session:
                        answer, retry_after = await self._once(session, verb, path, body, headers, waits_seconds)
                if not retry_after and answer.status not in (408, 502, 504):
                    self._unavailable = False
                    return answer
                # 408: the server did not get all of the request in time, so it has done nothing.
                trouble, sent = f"status {answer.status}", not retry_after and answer.status != 408
            except _TROUBLE as error:
                trouble = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            except aiohttp.ClientError as error:
                raise StoreError(f"{self.url} did not answer in HTTP: {error}; is it a Leyden store?") from error
            self._check_open()
            if sent and not repeatable:
                raise StoreError(
                    f"{self.url} broke off during {verb} {path} ({trouble}); the outcome is unknown: look before you repeat it"
                )
            waited = time.monotonic() - started - waits_seconds
            if waited >= patience:
                kind = StoreError if sent else StoreAway
                raise kind(f"{self.url} does not answer, for {waited:.0f} s now ({trouble}); does it run?")
            if not self._unavailable:  # warn once, not for each request under way
                self._unavailable = True
                logger.warning("%s does not answer (%s); trying again for %.0f s", self.url, trouble, patience)
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    async def close(self) -> None:
        """Close the connections. Requests under way and later ones raise StoreClosed. Safe to repeat."""
        self._closed = True
        await self._sessions.close()

    async def _once(
        self,
        session: aiohttp.ClientSession,
        verb: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        waits_seconds: float,
    ) -> tuple[ServerReply, bool]:
        """Send the request once. Return the reply, and whether the server asks for a retry."""
        large = body is not None and len(body) >= _LARGE
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=waits_seconds + _READ_SECONDS)
        async with session.request(
            verb,
            URL(self._base + path, encoded=True),
            data=io.BytesIO(body) if large and body is not None else body,  # sent in parts
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            expect100=large,
        ) as response:
            answer = ServerReply(response.status, await response.read(), response.headers.get("etag"))
            return answer, response.status == 503 and "retry-after" in response.headers

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"the client of {self.url} is closed; open it again")

    def _session(self) -> aiohttp.ClientSession:
        """Return a new session with its own connection pool."""
        limits: dict[str, Any] = {"limit": self._connections, "keepalive_timeout": _KEEP_ALIVE_SECONDS}
        path = self._socket_path
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(**limits) if path is None else aiohttp.UnixConnector(path, **limits),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
        )
