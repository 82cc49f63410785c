"""An ASGI application on a listening socket, with uvicorn's HTTP protocol and without its effects on the process.

`uvicorn.Server` sets the levels and handlers of the process's loggers, installs signal handlers and wakes ten times a
second to see whether to stop: right for a program, wrong for one part of somebody's program. It knows no routes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from leyden.utils.listening import loop_factory

__all__ = ["AsgiServer", "AsgiThread", "Message", "Receive", "Scope", "Send"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_LOOK_AGAIN_SECONDS = 0.005
_HEAD_BYTES = 64 * 2**10
"""Of a request's first line and headers, which are held until they are whole; what h11 grants too."""


class AsgiServer:
    """Serves `app` between `start` and `stop`, both called in the event loop that it runs in."""

    def __init__(self, app: Any, *, keep_alive_seconds: int) -> None:
        """keep_alive_seconds: how long an idle connection stays open."""
        self._config = _Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=keep_alive_seconds,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Take connections from `listener`, which belongs to the server from here on."""
        self._config.load()
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(self._protocol, sock=listener, backlog=2048)
        else:
            self._server = await loop.create_server(self._protocol, sock=listener, backlog=2048)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._state.connections)

    async def stop(self, *, grace_seconds: float, give_up: Callable[[], object]) -> None:
        """Take no more connections and end those there are.

        Answers under way have `grace_seconds`; then `give_up` is called, which must end them, and a second later the
        connections that still hold on are broken.
        """
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await self._idle_within(grace_seconds):
            give_up()
            if not await self._idle_within(1.0):
                for connection in list(self._state.connections):
                    connection.transport.abort()
                await asyncio.sleep(0)

    async def _idle_within(self, seconds: float) -> bool:
        """uvicorn has no event for its last connection; this is asked only while stopping."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._state.connections or self._state.tasks:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return True

    def _protocol(self) -> asyncio.Protocol:
        protocol = _Protocol(config=self._config, server_state=self._state, app_state={})
        protocol.access_log = False
        return protocol


_AutoProtocol: Any = AutoHTTPProtocol  # uvicorn types it as a bare asyncio.Protocol


class _Protocol(_AutoProtocol):
    """uvicorn's, which sends an answer at once; and what httptools leaves to its users: no head is collected for ever."""

    _unfinished: int | None = None
    """Bytes of the head under way; None outside of one."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Joined(transport))  # pyright: ignore[reportUnknownMemberType] -- see above

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # pyright: ignore[reportUnknownMemberType] -- see above
        if self._unfinished is not None:
            self._unfinished += len(data)
            if self._unfinished > _HEAD_BYTES:
                self._unfinished = None
                self.send_400_response(f"The head of the request is longer than {_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._unfinished = 0
        super().on_message_begin()  # pyright: ignore[reportUnknownMemberType] -- see above

    def on_headers_complete(self) -> None:
        self._unfinished = None
        super().on_headers_complete()  # pyright: ignore[reportUnknownMemberType] -- see above


class _Joined:
    """A transport that sends what is written in one turn of the event loop together.

    uvicorn writes the head of an answer and then its body. To send each of them wakes the client twice, and a send is a third of
    what a small answer costs.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] = []
        self._call_soon = asyncio.get_running_loop().call_soon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it with the next, or by itself when this turn is over."""
        self._held.append(data)
        if len(self._held) == 1:
            self._call_soon(self._send)
        else:
            self._send()

    def close(self) -> None:
        """Send the rest, then close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._held:
            held, self._held = self._held, []
            if not self._transport.is_closing():  # the client may have gone meanwhile, and uvloop's raises then
                self._transport.writelines(held)


class AsgiThread:
    """Serves `app` on a thread and an event loop of its own, so that a busy program never holds an answer up.

    With the `fast` extra installed it uses uvloop and httptools.
    """

    def __init__(
        self,
        app: Any,
        *,
        name: str,
        keep_alive_seconds: int = 75,
        grace_seconds: float = 1.0,
        stopping: Callable[[], object] = lambda: None,
        beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """
        name: of the thread.
        grace_seconds: how long answers under way may take when it stops; a second later their connections are broken.
        stopping: called in the thread's loop before that, to end at once what only waits.
        beside: what is entered in that loop before the first request, and left after the last.
        """
        self._app = app
        self._name = name
        self._keep_alive_seconds = keep_alive_seconds
        self._grace_seconds = grace_seconds
        self._stopping = stopping
        self._beside = beside
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None
        self._server: AsgiServer | None = None

    def start(self, listener: socket.socket) -> None:
        """Serve on `listener`, which belongs to the thread from here on. Raises what kept it from starting."""
        ready: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name=self._name, daemon=True)
        self._thread.start()
        self._stop = ready.result()

    @property
    def connections(self) -> int:
        """How many connections are open. From any thread."""
        return 0 if self._server is None else self._server.connections

    def stop(self) -> None:
        """Take no more requests, end those under way, end the thread. Blocks until then; safe to repeat."""
        if self._thread is not None:
            self._stop()
            self._thread.join()

    def _run(self, listener: socket.socket, ready: concurrent.futures.Future[Callable[[], object]]) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner, listener:
                runner.run(self._serve(listener, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, listener: socket.socket, ready: concurrent.futures.Future[Callable[[], object]]) -> None:
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        server = self._server = AsgiServer(self._app, keep_alive_seconds=self._keep_alive_seconds)

        def stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ending.set)

        async with self._beside():
            await server.start(listener)
            ready.set_result(stop)
            await ending.wait()
            self._stopping()
            await server.stop(grace_seconds=self._grace_seconds, give_up=lambda: None)


class _Config(uvicorn.Config):
    def configure_logging(self) -> None:
        """The loggers belong to the program that this runs in."""
