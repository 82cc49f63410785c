"""Wait for the servers that a command needs, and report which of them do not answer.

A check opens a TCP or Unix connection and sends nothing. The first report comes within 2 seconds, because a single try
takes `_TRY_SECONDS` at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from leyden._lib.host.listening import socket_path_of
from leyden.cli.output import echo
from leyden.errors import StoreError, redact

if TYPE_CHECKING:
    from leyden.store import LightningStore

T = TypeVar("T")

_TRY_SECONDS = 1.5
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.2, 2.0
_PORTS = {"http": 80, "https": 443}


async def connect(what: str, url: str, *, wait_seconds: float | None = None, meanwhile: str = "waiting") -> None:
    """Wait until the server at `url` accepts connections, and report on standard error.

    what: the server in words, such as "the store at http://127.0.0.1:4747".
    wait_seconds: raise StoreError if the server does not answer for this many seconds; None waits for ever, and reports
        the connection in any case.
    meanwhile: what happens until the server answers, for the report.
    """
    started, pause, reported = time.monotonic(), _FIRST_PAUSE_SECONDS, ""
    while (trouble := await _trouble_with(url)) is not None:
        waited = time.monotonic() - started
        if wait_seconds is not None and waited >= wait_seconds:
            raise StoreError(
                f"{what} does not answer ({trouble}), for {waited:.0f} s now; start it, or give another address"
            )
        if trouble != reported:
            echo(f"{what} does not answer ({trouble}); {meanwhile}, retrying ...", err=True)
            reported = trouble
        await asyncio.sleep(pause if wait_seconds is None else min(pause, wait_seconds - waited))
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    if reported or wait_seconds is None:
        echo(f"connected to {what}", err=True)


async def answer_of(what: str, question: Awaitable[T]) -> T:
    """Await a call to a server and return its result. Report on standard error if it takes long.

    what: the server in words.
    """
    asking = asyncio.ensure_future(question)
    try:
        if not (await asyncio.wait({asking}, timeout=_TRY_SECONDS))[0]:
            echo(f"{what} accepted the connection and has not answered yet; waiting ...", err=True)
        return await asking
    finally:
        asking.cancel()


@asynccontextmanager
async def store_to_read(url: str, token: str | None, wait_seconds: float) -> AsyncGenerator[LightningStore]:
    """Open a store that is only read, a server's after it has accepted a connection.

    token: what the server asks for.
    wait_seconds: how long to wait for a server.
    """
    from leyden.store import LightningStoreClient, open_store

    if not is_remote(url):
        opened = open_store(url, read_only=not url.startswith("postgres"))
    else:
        opened = LightningStoreClient(url, token=token, retry_seconds=wait_seconds)
        await connect(store_in_words(url), url, wait_seconds=wait_seconds)
    async with opened as store:
        yield store


def is_remote(url: str) -> bool:
    """Return whether an address names a store server."""
    return url.startswith(("http://", "https://", "http+unix://"))


def store_in_words(url: str) -> str:
    """Return a name of the store for messages, without passwords."""
    return f"the store at {redact(url)}"


async def _trouble_with(url: str) -> str | None:
    """Return why a connection to `url` cannot be opened; None if it can."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_TRY_SECONDS):
            if (path := socket_path_of(url)) is not None:
                _, writer = await asyncio.open_unix_connection(path)
            else:
                port = parts.port or _PORTS.get(parts.scheme, 80)
                _, writer = await asyncio.open_connection(parts.hostname, port)
    except TimeoutError:
        return f"no answer within {_TRY_SECONDS:g} s"
    except OSError as error:
        if isinstance(error, ConnectionRefusedError) or "refused" in str(error).lower():
            return "connection refused"
        text = error.strerror or str(error)
        return text[:1].lower() + text[1:]
    writer.close()
    return None
