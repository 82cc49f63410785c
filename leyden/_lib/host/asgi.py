"""Serve an ASGI application on a listening socket, with uvicorn's HTTP protocol and without the effects that uvicorn's
server has on the process.

`uvicorn.Server` configures the process's loggers, installs signal handlers and wakes ten times a second to see whether
to stop. That is right for a program, but wrong for a library in another program.

uvicorn waits for its clients without limit. `ConnectionLimits` bounds the time that a client may take. One timer for
each server checks all its connections, so that a request costs nothing more. This module knows no routes; `http` is the
kit of applications.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import os
import resource
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from leyden._lib.host.listening import BACKLOG, loop_factory
from leyden._lib.options import check_number

logger = logging.getLogger(__name__)

_IDLE_POLL_SECONDS = 0.005
"""How often a server that stops looks whether its connections have closed."""
_HEAD_BYTES = 64 * 2**10
"""The most bytes of a request's first line and headers, which are buffered until they are complete; as in h11."""
_HEADER_FIELDS = 1000
"""The most header fields of a request, including the trailers of a chunked body."""
_PIPELINED = 100
"""The most requests that wait for their turn on one connection. Each takes 2 kB of memory and 20 bytes to send."""
_CHECKS_PER_LIMIT = 8
"""The number of checks of the connections within the shortest limit."""
_ACCEPTED_AT_ONCE = 32
"""Connections that asyncio accepts in one turn of its loop. It tries again as often when no file descriptors are left.
"""
_SPARE_DESCRIPTORS = 64
"""File descriptors kept for the rest of the process; an eighth of its limit if that is less."""
_REPORT_SECONDS = 60.0
"""The least time between two reports of closed connections in the log."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the time a client may take. The server closes slower connections and logs how many."""

    head_seconds: float = 30.0
    """Time for the whole head of a request, from the opening of the connection, or later from the head's first byte."""
    stall_seconds: float = 60.0
    """A client that sends a body must send `stall_bytes` of it, or its end, in each such period; one that receives a
    reply must fetch as much. Time in which the server does not read, or has nothing to send, does not count.
    """
    stall_bytes: int = 64 * 2**10
    """The fewest bytes that a client must send or take in each `stall_seconds`."""

    def __post_init__(self) -> None:
        check_number("head_seconds", self.head_seconds, above=0)
        check_number("stall_seconds", self.stall_seconds, above=0)
        check_number("stall_bytes", self.stall_bytes, at_least=1, whole=True)


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
        """Make the server without starting it.

        keep_alive_seconds: how long an idle connection stays open.
        limits: how long a client may take; None: the defaults of ConnectionLimits.
        http: the parser; "auto" chooses httptools if it is installed (the `fast` extra).
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
        self._slow_clients = _SlowClients(self._state, limits or ConnectionLimits())
        self._protocol_class: Any = _H11Protocol if http == "h11" else _Protocol
        self._log = _CountingLog(self._slow_clients)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from `listener`, which belongs to the server from here on."""
        self._config.load()
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(self._protocol, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        else:
            self._server = await loop.create_server(self._protocol, sock=listener, backlog=_ACCEPTED_AT_ONCE)
        listener.listen(BACKLOG)
        self._slow_clients.start(loop, listener)

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    async def stop(self, *, grace_seconds: float, cancel: Callable[[], object] = lambda: None) -> None:
        """Accept no more connections and close the open ones.

        Requests under way have `grace_seconds`. Then `cancel` is called, which must end them, and a second later the
        remaining connections are aborted.
        """
        if self._server is None:
            return
        self._slow_clients.stop_accepting()
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await self._idle_within(grace_seconds):
            cancel()
            if not await self._idle_within(1.0):
                for connection in list(self._state.connections):
                    connection.transport.abort()
                await asyncio.sleep(0)  # one turn of the loop, in which asyncio closes them
        self._slow_clients.stop()

    async def _idle_within(self, seconds: float) -> bool:
        """Wait until all connections have closed. Return False if `seconds` pass before that. It polls, because uvicorn
        has no event for its last connection.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while self._state.connections or self._state.tasks:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_IDLE_POLL_SECONDS)
        return True

    def _protocol(self) -> asyncio.Protocol:
        protocol = self._protocol_class(config=self._config, server_state=self._state, app_state={})
        protocol.access_log = False
        protocol.slow_clients = self._slow_clients
        protocol.logger = self._log
        return protocol


class _Awaited(Enum):
    """The next action that the server expects from a client."""

    HEAD = "did not send the whole head of a request"
    BODY = "did not send the body of a request"
    FETCH = "did not fetch an answer"


if TYPE_CHECKING:

    class _UvicornProtocol:
        """The members of uvicorn's protocols that are used here. uvicorn does not type them."""

        loop: asyncio.AbstractEventLoop
        transport: asyncio.Transport
        client: tuple[str, int] | None
        flow: Any
        cycle: Any
        headers: list[tuple[bytes, bytes]] | None
        pipeline: deque[Any]
        timeout_keep_alive_task: asyncio.TimerHandle | None

        def connection_made(self, transport: Any) -> None: ...
        def data_received(self, data: bytes) -> None: ...
        def pause_writing(self) -> None: ...
        def send_400_response(self, msg: str) -> None: ...
        def on_message_begin(self) -> None: ...
        def on_headers_complete(self) -> None: ...
        def on_body(self, body: bytes) -> None: ...
else:
    _UvicornProtocol = object


class _Limited(_UvicornProtocol):
    """A mixin of uvicorn's protocols: tells `_SlowClients` which action of the client the server awaits."""

    slow_clients: _SlowClients
    _body_bytes = 0
    """Bytes received on this connection so far."""
    _pauses = 0
    """How often writing paused because the client did not read fast enough."""
    opened_at = 0.0
    """When the connection was opened, by the loop's clock."""
    _seen: tuple[_Awaited, object] | None = None
    """The action awaited at the last check: its kind, and the request or pause that it concerns."""
    _seen_since = 0.0
    """The time from which that action is timed, by the clock of `_SlowClients`."""
    _seen_progress = 0
    """The bytes that the client had sent or fetched at that time."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_JoiningTransport(transport))
        self.opened_at = self.loop.time()
        self.slow_clients.make_room(self)

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()

    def overdue(self, now: float, limits: ConnectionLimits) -> _Awaited | None:
        """Return the action that the client is late with, or None. `now` is by the clock of `_SlowClients`."""
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
        """Return the awaited action of the client, the request or pause that it concerns, and how many bytes of it are
        done; None if the server awaits nothing.
        """
        transport, flow, cycle = self.transport, self.flow, self.cycle
        if transport.is_closing() or flow.write_paused:
            # a buffer that shrinks is progress, hence the minus
            return _Awaited.FETCH, self._pauses, -transport.get_write_buffer_size()
        if cycle is None or cycle.response_complete:
            # uvicorn's own timer runs while the connection is idle, and any byte stops it.
            return None if self.timeout_keep_alive_task is not None else (_Awaited.HEAD, cycle, 0)
        if cycle.more_body and not flow.read_paused and not cycle.waiting_for_100_continue:
            return _Awaited.BODY, cycle, self._body_bytes
        return None

    @property
    def is_idle(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing()

    def end(self, late: _Awaited) -> None:
        """Close the connection of a late client. One that has sent part of a body is sent a 408."""
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
    """The protocol on h11, which limits heads and trailers and parses one request at a time."""

    def data_received(self, data: bytes) -> None:
        self._body_bytes += len(data)
        super().data_received(data)


class _HttpToolsProtocol(_Limited, _AutoBase):
    """The protocol on httptools, which limits neither heads nor trailers nor pipelines by itself."""

    _head_bytes: int | None = None
    """Bytes of the head that is being received; None between heads."""

    def data_received(self, data: bytes) -> None:
        """Pass the data to the parser. Refuse a head or trailers that are too long (400)."""
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                self._head_bytes = None
                self.send_400_response(f"The head of the request is longer than {_HEAD_BYTES} bytes.")
        elif self.headers is not None and len(self.headers) > _HEADER_FIELDS and not self.transport.is_closing():
            self.send_400_response(f"The request has more than {_HEADER_FIELDS} header fields.")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if len(self.pipeline) >= _PIPELINED:
            raise _TooManyRequests  # the parser stops, and uvicorn answers 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)


_Protocol = _H11Protocol if AutoHTTPProtocol is H11Protocol else _HttpToolsProtocol


class _TooManyRequests(Exception):
    """A client sent more than `_PIPELINED` requests on one connection without waiting for replies."""


class _CountingLog:
    """uvicorn's logger, whose warnings, one for each malformed request, are counted."""

    def __init__(self, slow_clients: _SlowClients) -> None:
        self._logger = logging.getLogger("uvicorn.error")
        self._slow_clients = slow_clients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def warning(self, msg: object, *args: object, **_: Any) -> None:
        self._slow_clients.count(f"uvicorn: {str(msg) % args if args else msg}".rstrip("."))

    def error(self, msg: object, *args: object, **options: Any) -> None:
        """Log the error. An application that returns before the end of its reply breaks it off on purpose and reports
        why, so that uvicorn's line is for debugging.
        """
        broke_off = "without completing" in str(msg)
        self._logger.log(logging.DEBUG if broke_off else logging.ERROR, msg, *args, **options)


class _SlowClients:
    """Closes connections of one server whose clients take too long, and logs how many."""

    def __init__(self, state: ServerState, limits: ConnectionLimits) -> None:
        self._connections = cast("set[_Limited]", state.connections)
        self._limits = limits
        self._interval = min(limits.head_seconds, limits.stall_seconds) / _CHECKS_PER_LIMIT
        self._timer: asyncio.TimerHandle | None = None
        self._clock = 0.0
        """Seconds in which this server could have read from clients. It stands still while the process is suspended."""
        self._checked_at = 0.0
        """The loop's time at the last check."""
        self._counts: dict[str, tuple[int, str]] = {}
        """Events since the last report: how many of each kind, and the last client."""
        self._reported_at = float("-inf")
        self._listener: socket.socket | None = None
        """None if the server accepts no connections any more."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle_error: Any = None
        """The loop's handler of errors before this one."""

    def start(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        self._loop, self._listener, self._checked_at = loop, listener, loop.time()
        self._handle_error = loop.get_exception_handler()
        loop.set_exception_handler(self._on_error)
        self._timer = loop.call_later(self._interval, self._check, loop, listener)

    def stop(self) -> None:
        if self._timer is not None and self._loop is not None:
            self._timer.cancel()
            self._report()
            if self._loop.get_exception_handler() == self._on_error:
                self._loop.set_exception_handler(self._handle_error)

    def stop_accepting(self) -> None:
        self._listener = None

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count an error of accepting, of which asyncio reports many a second with a traceback. Pass any other error to
        the handler that was there before.
        """
        error = context.get("exception")
        failed, ours = context.get("socket"), self._listener
        is_ours = failed is not None and ours is not None and failed.fileno() == ours.fileno()
        if is_ours and isinstance(error, OSError) and "accept" in context["message"]:
            self._cannot_accept(error)
        elif self._handle_error is None:
            loop.default_exception_handler(context)
        else:
            self._handle_error(loop, context)

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            self.count(f"turned new clients away because all {_max_descriptors()} files are open (ulimit -n)")
        else:
            self.count(f"accepts no new clients: {os.strerror(error.errno or 0)}")

    def make_room(self, newcomer: _Limited) -> None:
        """Close idle connections if file descriptors run short; if none is idle, close the new one."""
        opened, limit = newcomer.transport.get_extra_info("socket"), _max_descriptors()
        spare = min(_SPARE_DESCRIPTORS, limit // 8)
        if opened is None or opened.fileno() < limit - spare:
            return
        idle = [one for one in self._connections if one is not newcomer and one.is_idle]
        idle.sort(key=lambda one: (one.cycle is not None, one.opened_at))  # first those that never had a request
        for connection in idle[:spare] or [newcomer]:
            connection.transport.abort()
            which = "an idle connection" if idle else "a new connection, while all others are busy,"
            self.count(
                f"closed {which} because this process may open no more than {limit} files (ulimit -n)", connection
            )

    def _check(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Close connections that keep the server waiting too long, and report them now and then. It also tries to open
        one more descriptor, because a server that has none left turns clients away without an error.
        """
        now = loop.time()
        self._timer = loop.call_later(self._interval, self._check, loop, listener)
        self._clock += min(now - self._checked_at, 2 * self._interval)  # a longer gap was a suspension
        self._checked_at = now
        limits = self._limits
        for connection in list(self._connections):
            if late := connection.overdue(self._clock, limits):
                connection.end(late)
                within = limits.head_seconds if late is _Awaited.HEAD else limits.stall_seconds
                self.count(f"closed a connection that {late.value} within {within:g} s", connection)
        if self._listener is not None:
            try:
                os.close(os.dup(listener.fileno()))
            except OSError as error:
                self._cannot_accept(error)
        if self._counts and now - self._reported_at >= _REPORT_SECONDS:
            self._reported_at = now
            self._report()

    def count(self, event: str, connection: _Limited | None = None) -> None:
        """Count an event for the next report.

        connection: the client that it concerns, if one.
        """
        client = None if connection is None else connection.client
        times = self._counts.get(event, (0, ""))[0]
        self._counts[event] = times + 1, "" if client is None else f", the last of {client[0]}:{client[1]}"

    def _report(self) -> None:
        for event, (times, last) in self._counts.items():
            logger.warning("%s (%d times%s)", event, times, last)
        self._counts.clear()


def _max_descriptors() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


class _JoiningTransport:
    """A transport that sends the head of a reply together with the first part of its body. uvicorn writes them one
    after the other. Two sends would wake the client twice, and a send is a third of the cost of a small reply.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] = []
        self._call_soon = asyncio.get_running_loop().call_soon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send the data together with the next write, or alone if this turn of the event loop has no other write."""
        self._held.append(data)
        if len(self._held) == 1:
            self._call_soon(self._send)
        else:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._held:
            held, self._held = self._held, []
            if not self._transport.is_closing():  # the client may have left meanwhile, and uvloop raises then
                self._transport.writelines(held)


class AsgiThread:
    """Serves `app` on its own thread and event loop, beside a busy program.

    With the `fast` extra it uses uvloop and httptools.
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
        """Make the server without starting it.

        keep_alive_seconds: how long an idle connection stays open.
        grace_seconds: how long requests under way may take when the server stops; a second later their connections are
            aborted.
        on_stop: called in the thread's loop when the server stops, to end requests that only wait.
        lifespan: a context that is entered in that loop before the first request and left after the last.
        limits: how long a client may take; None: the defaults of ConnectionLimits.
        http: the parser; "auto" chooses httptools if it is installed (the `fast` extra).
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
        """Start the thread and return when it serves on `listener`, which belongs to it from then on. Raise the error
        that kept the server from starting.
        """
        ready: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name=self._name, daemon=True)
        self._thread.start()
        self._stop = ready.result()

    @property
    def connections(self) -> int:
        """The number of open connections. Safe in any thread."""
        return 0 if self._server is None else self._server.connections

    def stop(self) -> None:
        """Accept no more requests, end those under way, and join the thread. Safe to repeat."""
        if self._thread is not None:
            self._stop()
            self._thread.join()

    def _run(self, listener: socket.socket, ready: concurrent.futures.Future[Callable[[], object]]) -> None:
        """Run the thread. `start` raises an error that comes before the server listens."""
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner, listener:
                runner.run(self._serve(listener, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def _serve(self, listener: socket.socket, ready: concurrent.futures.Future[Callable[[], object]]) -> None:
        """Serve in this thread's loop until stopped.

        ready: when the server listens, it receives the function that stops the server.
        """
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
            await server.stop(grace_seconds=self._grace_seconds)


class _Config(uvicorn.Config):
    """uvicorn's configuration, without its effect on loggers."""

    def configure_logging(self) -> None:
        """Do nothing: the loggers belong to the program that serves."""
