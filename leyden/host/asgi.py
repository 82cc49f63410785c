"""Serve an ASGI application on a listening socket, with uvicorn's HTTP protocol and without its effects on the process.

`uvicorn.Server` sets the levels and handlers of the process's loggers, installs signal handlers and wakes ten times a
second to see whether to stop. That is right for a program, but wrong for a library in another
program.

uvicorn waits for its clients without limit. `ConnectionLimits` says how long a client of ours may take. One timer for each server
looks at all its connections, so that a request costs nothing more. This module knows no routes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from leyden.host.listening import loop_factory

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.005
_HEAD_BYTES = 64 * 2**10
"""The most of a request's first line and headers, which are held until they are complete. h11 has the same limit."""
_HEADER_FIELDS = 1000
"""The most header fields of a request whose body is coming in, the trailers behind a chunked body included."""
_PIPELINED = 100
"""The most requests that wait for their turn on one connection. Each takes 2 kB and only 20 bytes to send."""
_LOOKS = 8
"""How often the connections are checked within the shortest limit."""
_SPARE_DESCRIPTORS = 64
"""File descriptors that clients leave to the rest of the process, or an eighth of its limit if that is less."""
_COMPLAINT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the time a client may take. The server closes slower connections and logs how many."""

    head_seconds: float = 30.0
    """Time for the whole head of a request, from the opening of a connection, later from the first
    byte.
    """
    stall_seconds: float = 60.0
    """In each such period a body must bring `stall_bytes` or its end, and a waiting answer must be fetched as fast. The time in which
    the server does not read, or has nothing to send, does not count."""
    stall_bytes: int = 64 * 2**10


class AsgiServer:
    """Serves `app` between `start` and `stop`, both called in the event loop that it runs in."""

    def __init__(
        self,
        app: Any,
        *,
        keep_alive_seconds: int,
        limits: ConnectionLimits | None = None,
        http: Literal["auto", "h11"] = "auto",
    ) -> None:
        """
        keep_alive_seconds: how long an idle connection stays open.
        http: the parser; "auto" takes httptools where it is installed (the `fast` extra).
        """
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
        self._watch = _Watch(self._state, limits or ConnectionLimits())
        self._protocol_class: Any = _H11Protocol if http == "h11" else _Protocol
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Take connections from `listener`, which belongs to the server from here on."""
        self._config.load()
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(self._protocol, sock=listener, backlog=2048)
        else:
            self._server = await loop.create_server(self._protocol, sock=listener, backlog=2048)
        self._watch.start(loop, listener)

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
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
        self._watch.stop()

    async def _idle_within(self, seconds: float) -> bool:
        """uvicorn has no event for its last connection; this is asked only while stopping."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._state.connections or self._state.tasks:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        return True

    def _protocol(self) -> asyncio.Protocol:
        protocol = self._protocol_class(config=self._config, server_state=self._state, app_state={})
        protocol.access_log = False
        protocol.watch = self._watch
        return protocol


class _Awaited(Enum):
    """The next action that the server expects from a client."""

    HEAD = "did not send the whole head of a request"
    BODY = "did not send the body of a request"
    FETCH = "did not fetch an answer"


_Untyped: Any = object  # the mixin's `super()` is one of uvicorn's protocols, which are not typed


class _Limited(_Untyped):
    """A protocol of uvicorn's that reports the action it waits for, so that `_Watch` can time it."""

    watch: _Watch
    _body_bytes = 0
    """Bytes received on this connection so far."""
    _pauses = 0
    """How often the client did not read fast enough."""
    _opened_at = 0.0
    _seen: tuple[_Awaited, object] | None = None
    """The action awaited at the watch's last check: its kind, and which request or pause it
    concerns.
    """
    _seen_since = 0.0
    _seen_progress = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Joined(transport))  # pyright: ignore[reportUnknownMemberType] -- see _Untyped
        self._opened_at = self.loop.time()
        self.watch.make_room(self)

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()  # pyright: ignore[reportUnknownMemberType] -- see _Untyped

    def overdue(self, now: float, limits: ConnectionLimits) -> _Awaited | None:
        """Return the action that the client is late with; None if it is in time."""
        found = self._awaited()
        if found is None:
            self._seen = None
            return None
        kind, subject, progress = found
        if self._seen is None or self._seen != (kind, subject):
            self._seen, self._seen_since, self._seen_progress = (kind, subject), now, progress
            return None
        head = kind is _Awaited.HEAD
        if now - self._seen_since < (limits.head_seconds if head else limits.stall_seconds):
            return None
        if not head and progress - self._seen_progress >= limits.stall_bytes:
            self._seen_since, self._seen_progress = now, progress
            return None
        return kind

    def _awaited(self) -> tuple[_Awaited, object, int] | None:
        """Return the client's next action, its request and its progress; None if the server acts
        next.
        """
        transport, flow, cycle = self.transport, self.flow, self.cycle
        if transport.is_closing() or flow.write_paused:
            return _Awaited.FETCH, self._pauses, -transport.get_write_buffer_size()
        if cycle is None or cycle.response_complete:
            # uvicorn's own timer runs while the connection is idle, and any byte stops it.
            return None if self.timeout_keep_alive_task is not None else (_Awaited.HEAD, cycle, 0)
        if cycle.more_body and not flow.read_paused and not cycle.waiting_for_100_continue:
            return _Awaited.BODY, cycle, self._body_bytes
        return None

    @property
    def idle(self) -> bool:
        """Whether no request of this client is under way."""
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    @property
    def idle_order(self) -> tuple[bool, float]:
        """Return the order of closing: connections without a request first, then the oldest."""
        return self.cycle is not None, self._opened_at

    def end(self, late: _Awaited) -> None:
        """Close the connection. A client whose request is half sent gets the reason."""
        if late is _Awaited.FETCH:
            self.transport.abort()
            return
        if late is _Awaited.BODY and not self.cycle.response_started:
            self.transport.write(_TIMED_OUT)
        self.transport.close()


_TIMED_OUT_TEXT = b"The body of the request did not come in time.\n"
_TIMED_OUT = b"".join(
    (
        b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n",
        f"content-length: {len(_TIMED_OUT_TEXT)}\r\n\r\n".encode(),
        _TIMED_OUT_TEXT,
    )
)
_H11Base: Any = H11Protocol
_AutoBase: Any = AutoHTTPProtocol  # uvicorn types it as a bare asyncio.Protocol


class _H11Protocol(_Limited, _H11Base):
    """h11 bounds heads and trailers itself, and parses one request at a time."""

    def data_received(self, data: bytes) -> None:
        self._body_bytes += len(data)
        super().data_received(data)  # pyright: ignore[reportUnknownMemberType] -- see _Untyped


class _HttpToolsProtocol(_Limited, _AutoBase):
    """httptools leaves it to its users to bound heads, trailers and pipelines."""

    _unfinished: int | None = None
    """Bytes of the head under way; None outside of one."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # pyright: ignore[reportUnknownMemberType] -- see _Untyped
        if self._unfinished is not None:
            self._unfinished += len(data)
            if self._unfinished > _HEAD_BYTES:
                self._unfinished = None
                self.send_400_response(f"The head of the request is longer than {_HEAD_BYTES} bytes.")
        elif self.headers is not None and len(self.headers) > _HEADER_FIELDS and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {_HEADER_FIELDS} header fields.")

    def on_message_begin(self) -> None:
        self._unfinished = 0
        super().on_message_begin()  # pyright: ignore[reportUnknownMemberType] -- see _Untyped

    def on_headers_complete(self) -> None:
        self._unfinished = None
        if len(self.pipeline) >= _PIPELINED:
            raise _TooManyRequests  # the parser stops, and uvicorn answers 400
        super().on_headers_complete()  # pyright: ignore[reportUnknownMemberType] -- see _Untyped

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)  # pyright: ignore[reportUnknownMemberType] -- see _Untyped


_Protocol = _H11Protocol if AutoHTTPProtocol is H11Protocol else _HttpToolsProtocol


class _TooManyRequests(Exception):
    """More requests wait on one connection than a client has reason to send ahead."""


class _Watch:
    """Close connections of one server whose clients take too long, and count them in the log."""

    def __init__(self, state: ServerState, limits: ConnectionLimits) -> None:
        self._state = state
        self._limits = limits
        self._interval = min(limits.head_seconds, limits.stall_seconds) / _LOOKS
        self._timer: asyncio.TimerHandle | None = None
        self._clock = 0.0
        """Seconds in which this server could have read from clients.

        It stops while the process stands still.
        """
        self._looked_at = 0.0
        self._complaints: dict[str, tuple[int, str]] = {}
        """Each complaint, how often it occurred, and the last client that caused it."""
        self._complained_at = float("-inf")

    def start(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Watch the connections until `stop`."""
        self._looked_at = loop.time()
        self._timer = loop.call_later(self._interval, self._look, loop, listener)

    def stop(self) -> None:
        """End the timer, and log the counts not yet reported."""
        if self._timer is not None:
            self._timer.cancel()
            self._complain()

    def make_room(self, newcomer: Any) -> None:
        """Close idle connections, or else the new one, when the process runs short of file
        descriptors.
        """
        opened, most = newcomer.transport.get_extra_info("socket"), _most_descriptors()
        spare = min(_SPARE_DESCRIPTORS, most // 8)
        if opened is None or opened.fileno() < most - spare:
            return
        connections: Any = self._state.connections
        idle = [one for one in connections if one is not newcomer and one.idle]
        idle.sort(key=lambda one: one.idle_order)
        for connection in idle[:spare] or [newcomer]:
            connection.transport.abort()
            which = "an idle connection" if idle else "a new connection, while all others are busy,"
            self._count(
                f"closed {which} because this process may open no more than {most} files (ulimit -n)", connection
            )

    def _look(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        now = loop.time()
        self._timer = loop.call_later(self._interval, self._look, loop, listener)
        self._clock += min(now - self._looked_at, 2 * self._interval)
        self._looked_at = now
        limits = self._limits
        connections: Any = list(self._state.connections)
        for connection in connections:
            if late := connection.overdue(self._clock, limits):
                connection.end(late)
                within = limits.head_seconds if late is _Awaited.HEAD else limits.stall_seconds
                self._count(f"closed a connection that {late.value} within {within:g} s", connection)
        try:
            os.close(os.dup(listener.fileno()))
        except OSError:
            self._count(f"turned new clients away because all {_most_descriptors()} files are open (ulimit -n)")
        if self._complaints and now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            self._complain()

    def _count(self, complaint: str, connection: Any = None) -> None:
        client = None if connection is None else connection.client
        times = self._complaints.get(complaint, (0, ""))[0]
        self._complaints[complaint] = times + 1, "" if client is None else f", the last of {client[0]}:{client[1]}"

    def _complain(self) -> None:
        for complaint, (times, last) in self._complaints.items():
            logger.warning("%s (%d times%s)", complaint, times, last)
        self._complaints.clear()


def _most_descriptors() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


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
        on_stop: Callable[[], object] = lambda: None,
        lifespan: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
        limits: ConnectionLimits | None = None,
        http: Literal["auto", "h11"] = "auto",
    ) -> None:
        """
        name: of the thread.
        limits, http: as of AsgiServer.
        grace_seconds: how long answers under way may take when it stops; a second later their connections are broken.
        on_stop: called in the thread's loop before that, to end requests that only wait.
        lifespan: a context that is entered in that loop before the first request and left after the last.
        """
        self._app = app
        self._name = name
        self._keep_alive_seconds = keep_alive_seconds
        self._grace_seconds = grace_seconds
        self._on_stop = on_stop
        self._lifespan = lifespan
        self._limits = limits
        self._http: Literal["auto", "h11"] = http
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
        """Return how many connections are open. Safe from any thread."""
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
        server = self._server = AsgiServer(
            self._app, keep_alive_seconds=self._keep_alive_seconds, limits=self._limits, http=self._http
        )

        def stop() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ending.set)

        async with self._lifespan():
            await server.start(listener)
            ready.set_result(stop)
            await ending.wait()
            self._on_stop()
            await server.stop(grace_seconds=self._grace_seconds, give_up=lambda: None)


class _Config(uvicorn.Config):
    def configure_logging(self) -> None:
        """The loggers belong to the program that this runs in."""
