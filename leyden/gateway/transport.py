"""Send a request to a model's server, and return the response in one form (`UpstreamResponse`).

To reach servers in another way, write a `Transport`. The module knows neither attempts nor records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, Self, cast

import aiohttp

from leyden._lib.host.http import Message, Refusal, Scope
from leyden.dialects import Translation
from leyden.gateway.asgi import Headers, downstream, upstream_headers
from leyden.gateway.upstream import UpstreamModel

MAX_ANSWER_BYTES = 256 * 2**20
"""The most bytes of one response of a server, unpacked.

A stream of 200,000 tokens with their ids and log-probabilities has a third of it.
"""
_IS_UP_SECONDS = 5.0
"""The seconds after which a server that does not reply to `is_up` counts as busy."""


class UpstreamResponse(Protocol):
    """A server's response whose head has arrived."""

    status: int
    content_type: str
    """The content type in lower case, without parameters."""

    @property
    def headers(self) -> Headers:
        """The response's headers as they are passed on to the agent."""
        ...

    async def read(self) -> bytes:
        """Return the whole body. Raise ServerGone, with the part that came (`got`), if the server disconnects."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces of any size, as they arrive. Raise ServerGone after the last one if the server
        disconnects.
        """
        ...


class Transport(Protocol):
    """Sends calls to model servers: over HTTP, or to an application in this process."""

    def ask(
        self, model: UpstreamModel, translation: Translation, body: bytes, scope: Scope, *, route: str | None = None
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send `body` to the server of `model`, and yield its response once the head has arrived.

        translation: the call's translation, which names the route.
        scope: the ASGI scope of the agent's request, whose headers are passed on.
        route: another route, as in `UpstreamModel.url`.
        Raise ServerGone or TimeoutError, also while the response is read.
        """
        ...

    async def is_up(self, model: UpstreamModel) -> bool:
        """Return whether the server accepts requests. It is called after a connection was lost."""
        ...


class ServerGone(Exception):
    """Raised when a server could not be reached, or went away during its response.

    The message says what happened.
    """

    def __init__(self, error: Exception, *, began: bool) -> None:
        """began: whether the server had begun to answer."""
        super().__init__(f"{type(error).__name__}: {error}".rstrip(": "))
        self.began = began
        self.timed_out = isinstance(error, TimeoutError)
        self.got = b""
        """The part of the body that came, if the whole of it was awaited (`read`)."""


async def joined(pieces: AsyncIterator[bytes]) -> bytes:
    """Return the pieces of a body as one, or raise ServerGone with those that came (`got`)."""
    came: list[bytes] = []
    try:
        async for piece in pieces:
            came.append(piece)
    except ServerGone as gone:
        gone.got = b"".join(came)
        raise
    return b"".join(came)


class Arriving:
    """A body as it arrives, which raises aiohttp's error if the connection breaks.

    aiohttp itself drops the bytes that came just before the break, and takes the reset of a connection for the end of a
    body that has no length.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content, connection = response.content, response.connection
        self._closed: asyncio.Future[None] | None = None
        """How the connection ends, if that is the only end of the body."""
        has_its_own_end = "content-length" in response.headers or "transfer-encoding" in response.headers
        if not has_its_own_end and connection is not None and connection.protocol is not None:
            self._closed = connection.protocol.closed
        if self._closed is not None:  # an agent may leave before
            self._closed.add_done_callback(lambda closed: closed.cancelled() or closed.exception())
        self._error: Exception | None = None
        """The error of a broken connection, to raise after the last bytes that came; None while it holds."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._error is not None:
            raise self._error
        try:
            piece = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self._content.set_exception(cast(Any, None))  # else it gives out nothing more
            rest = b""
            with contextlib.suppress(TimeoutError):  # its clock may have run out
                rest = self._content.read_nowait()
            if not rest:
                raise
            self._error = error
            return rest
        if piece:
            return piece
        if self._closed is not None and self._closed.done():
            self._closed.result()
        raise StopAsyncIteration


class HttpTransport:
    """Reach servers over HTTP, with connections that are kept open."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @asynccontextmanager
    async def ask(
        self, model: UpstreamModel, translation: Translation, body: bytes, scope: Scope, *, route: str | None = None
    ) -> AsyncGenerator[UpstreamResponse]:
        began = False
        try:
            async with self._session.post(
                model.url(route or translation.upstream.path),
                data=body,
                headers=upstream_headers(scope, model.api_key, translation.upstream),
                auth=model.login and aiohttp.BasicAuth(*model.login, encoding="utf-8"),
                allow_redirects=False,
            ) as response:
                began = True
                yield _HttpResponse(response, model)
        except aiohttp.ClientError as error:
            raise ServerGone(error, began=began) from error
        except TimeoutError:
            raise
        except OSError as error:
            raise ServerGone(error, began=began) from error

    async def is_up(self, model: UpstreamModel) -> bool:
        """Any reply counts as up, and a silent server as busy."""
        try:
            async with self._session.get(model.url("models"), timeout=aiohttp.ClientTimeout(total=_IS_UP_SECONDS)):
                return True
        except TimeoutError:
            return True
        except (aiohttp.ClientError, OSError):
            return False


class _HttpResponse:
    """An HTTP response of a server, as an `UpstreamResponse`."""

    def __init__(self, response: aiohttp.ClientResponse, model: UpstreamModel) -> None:
        self._response = response
        self._model = model
        self.status = response.status
        self.content_type = response.content_type

    @property
    def headers(self) -> Headers:
        return downstream(self._response.raw_headers)

    async def read(self) -> bytes:
        """Return the body. In an error body the server's key is replaced by `***`, because agents read errors, and some
        servers quote the key.
        """
        try:
            body = await joined(self.pieces())
        except ServerGone as gone:
            if self.status >= 300:
                gone.got = b""  # the end may cut the key in two
            raise
        return body if self.status < 300 else self._model.without_key(body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raise Refusal (502) for one of more than `MAX_ANSWER_BYTES`."""
        n_bytes = 0
        try:
            async for piece in Arriving(self._response):
                n_bytes += len(piece)
                if n_bytes > MAX_ANSWER_BYTES:
                    raise Refusal(
                        502,
                        "upstream_too_large",
                        f"{self._model.address} sent more than {MAX_ANSWER_BYTES:,} bytes in answer to one call, and the rest was "
                        "dropped; is the model's endpoint right?",
                    )
                yield piece
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(error, began=True) from error


class AppTransport:
    """Reach a server in this process: call its ASGI application in the gateway's event loop."""

    def __init__(self, app: Any) -> None:
        self._app = app

    @asynccontextmanager
    async def ask(
        self, model: UpstreamModel, translation: Translation, body: bytes, scope: Scope, *, route: str | None = None
    ) -> AsyncGenerator[UpstreamResponse]:
        """Send the request to the engine's application in this process, without a socket.

        Leaving the context before the end of the response cancels the call.
        """
        answer = _AppResponse()
        headers = upstream_headers(scope, model.api_key, translation.upstream)
        request = {
            "type": "http",
            "method": "POST",
            "path": route if route and route.startswith("/") else f"/v1/{route or translation.upstream.path}",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), *((name.lower().encode(), value.encode()) for name, value in headers)],
        }
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await asyncio.get_running_loop().create_future()  # waits for ever: this client never disconnects
            raise AssertionError

        call = asyncio.create_task(self._app(request, receive, answer.send))
        call.add_done_callback(lambda _: answer.end())
        try:
            await answer.begin()
            yield answer
        finally:
            call.cancel()

    async def is_up(self, model: UpstreamModel) -> bool:
        """Return True: calling a function needs no connection that could be lost."""
        return True


class _AppResponse:
    """The response of an application in this process, as an `UpstreamResponse`. The application writes it by `send`."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.status = 0
        self.content_type = ""
        self.headers: Headers = []

    async def send(self, message: Message) -> None:
        self._messages.put_nowait(message)

    def end(self) -> None:
        self._messages.put_nowait(None)

    async def begin(self) -> None:
        """Wait for the head of the response. Raise ServerGone if the application ends without one."""
        message = await self._messages.get()
        if message is None:
            raise ServerGone(RuntimeError("the server ended the call without an answer"), began=False)
        self.status, self.headers = message["status"], downstream(message["headers"])
        content_type = next((value for name, value in self.headers if name == b"content-type"), b"")
        self.content_type = content_type.decode("latin-1").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        return await joined(self.pieces())

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives.

        Raise ServerGone if the application ends before its last piece.
        """
        more = True
        while more:
            message = await self._messages.get()
            if message is None:
                raise ServerGone(RuntimeError("the server ended the call in the middle of its answer"), began=True)
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece
