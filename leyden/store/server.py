"""`LightningStoreServer`: serve a store to other processes and machines over HTTP.

The module knows sockets and threads; `store_app.py` knows requests and replies, `wire.py` the routes. To serve more
than the store, give the server a view (GET), or `StoreApp` a handler (POST).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from leyden._lib.aio import Latch
from leyden._lib.host.asgi import AsgiThread, ConnectionLimits
from leyden._lib.host.http import JSON, MAX_BODY_BYTES, HttpReply, RequestHeaders, SiteGuard, mounted
from leyden._lib.host.listening import check_token, is_loopback, listen, listen_unix, netloc, reachable, unix_url
from leyden._lib.options import NamedOptions, check_number
from leyden.errors import ConfigError, StoreError
from leyden.store.base import LightningStore
from leyden.store.ending import END, End
from leyden.store.otlp import TRACES, handle_traces
from leyden.store.request_metrics import RequestMetrics
from leyden.store.sqlite import SqliteLightningStore
from leyden.store.store_app import StoreApp, StoreApplication, View
from leyden.store.sweeper import Sweeper
from leyden.types import Retention

if TYPE_CHECKING:
    from leyden.store.client import LightningStoreClient

_GRACE_SECONDS = 2.0
"""The seconds that requests under way may take after `stop`. Waiting requests get their reply at once."""


class LightningStoreServer(NamedOptions):
    """Serves `store` between `start` and `stop`, on its own thread, and sweeps and prunes it (`Sweeper`).

    `stop` leaves the store open. A pickled server is unpickled as a client of it, so that it can be passed to a child
    process.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        socket_path: str | Path | None = None,
        token: str | None = None,
        operator_token: str | None = None,
        insecure: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        retention: Retention | None = None,
        claims_from: Latch | None = None,
        views: Mapping[str, View] | None = None,
        mounts: Mapping[str, StoreApplication] | None = None,
        connection_limits: ConnectionLimits | None = None,
    ) -> None:
        """Make the server without starting it.

        host, port: the address to listen on; port 0 chooses a free one.
        socket_path: the path of a Unix socket to serve on instead of a port. Only this user reaches it, and `stop`
            removes it.
        token: the secret that clients must send; None serves this machine only.
        operator_token: the only secret that moves labels, freezes versions and advances releases. It admits to
            everything else too. None: `token` does all of this.
        insecure: serve other machines without a token.
        max_body_bytes: the limit of one request; a larger one is refused with 413.
        retention: the rule by which the store prunes finished rollouts; None keeps all.
        claims_from: until this latch opens, the queue looks empty to clients; None: it is open.
        views: further handlers of GET by path, such as `monitor.prometheus.metrics`; they need the token.
        mounts: ASGI applications by the path below which each gets all requests, such as `/dashboard`; they check
            their clients themselves.
        connection_limits: how long a client may take; None: the defaults of `ConnectionLimits`.
        Raise ConfigError for an address that other machines reach, unless there is a token or `insecure`, and for an
        empty token.
        """
        if socket_path is not None and (host, port) != ("127.0.0.1", 0):
            raise ConfigError(
                f"a server has a port or a socket: leave out host and port, or socket_path={str(socket_path)!r}"
            )
        check_number("port", port, at_least=0, at_most=65_535, whole=True)
        check_number("max_body_bytes", max_body_bytes, at_least=1, whole=True)
        check_token("token", token, host=host, or_say="insecure=True", insecure=insecure)
        self.store = store
        self._host = host
        self._port = port
        self._socket_path = None if socket_path is None else Path(socket_path).absolute()
        if operator_token is not None and not operator_token:
            raise ConfigError("operator_token is empty; give a secret, or leave it out")
        self._token = token
        self._operator_token = operator_token
        self._max_body_bytes = max_body_bytes
        self._retention = retention
        self._claims_from = claims_from
        self._views = views
        self._mounts = mounts or {}
        self._connection_limits = connection_limits
        self._end = End()
        self._lock = threading.Lock()
        """Held while starting or stopping."""
        self._thread: AsgiThread | None = None
        self._ended = Latch()

    @property
    def endpoint(self) -> str:
        """The URL for clients on this machine.

        Raise StoreError before `start` if no `port` was given.
        """
        if self._socket_path is not None:
            return unix_url(self._socket_path)
        if not self._port:
            raise StoreError("the store server has no address yet: start it first, or give it a port=")
        return f"http://{netloc(reachable(self._host), self._port)}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    async def start(self) -> None:
        """Open the port or the socket, and serve.

        Calling it again does nothing. Raise StoreError if the address cannot be bound.
        """
        await asyncio.to_thread(self._start)

    async def stop(self) -> None:
        """Finish the requests under way and close the port or the socket.

        Calling it again does nothing; `start` opens the same port again.
        """
        await asyncio.to_thread(self._stop)

    async def run_forever(self) -> None:
        """Serve until `stop` is called or this is cancelled."""
        self._ended = Latch()
        async with self:
            await self._ended.wait_async()

    async def announce_end(self, *, within_seconds: float) -> None:
        """Notify the clients that wait for it (`LightningStoreClient.wait_for_end`) that there is no more work.

        Return when all of them have been notified, or after `within_seconds`.
        """
        await self._end.announce(within_seconds=within_seconds)

    def client(self) -> LightningStoreClient:
        """Return a client of this server.

        Raise StoreError before `start` if no `port` was given.
        """
        from leyden.store.client import LightningStoreClient

        return LightningStoreClient(self.endpoint, token=self._token)

    def __reduce__(self) -> tuple[Callable[..., LightningStoreClient], tuple[Any, ...]]:
        # The client's module has the function, so that unpickling does not load the server.
        from leyden.store.client import reconnect

        return reconnect, (self.endpoint, self._token, {})

    def _start(self) -> None:
        """Listen, serve in a new thread, and record the address for other processes. Do nothing if the server runs."""
        with self._lock:
            if self._thread is not None:
                return
            listener = self._listen()
            end = self._end = End()
            app = self._make_app(
                token=self._token,
                operator_token=self._operator_token,
                guard=SiteGuard(
                    local_only=self._token is None and self._socket_path is None and is_loopback(self._host)
                ),
                max_body_bytes=self._max_body_bytes,
                handlers={TRACES: partial(handle_traces, self.store), END: self._reply_to_end},
                claims_from=self._claims_from,
                views=self._views,
                metrics=RequestMetrics(connections=lambda: thread.connections),
            )

            def stop_waiting() -> None:
                end.stop_waiting()
                for each in (app, *self._mounts.values()):
                    each.stop_waiting()

            thread = AsgiThread(
                mounted(app, self._mounts),
                name="leyden-store-http",
                grace_seconds=_GRACE_SECONDS,
                on_stop=stop_waiting,
                lifespan=lambda: Sweeper(self.store, retention=self._retention),
                limits=self._connection_limits,
            )
            thread.start(listener)
            self._thread = thread
            self._publish_address(self.endpoint)

    def _make_app(self, **options: Any) -> StoreApplication:
        """Return the application that handles the requests. Override it to serve other clients too.

        options: those of `StoreApp`.
        """
        return StoreApp(self.store, **options)

    def _listen(self) -> socket.socket:
        """Return a listening socket, on the Unix socket path or on host and port.

        A `port` of 0 is replaced by the one that the system chose. Raise StoreError if the address cannot be bound.
        """
        if self._socket_path is not None:
            try:
                return listen_unix(self._socket_path)
            except OSError as error:
                raise StoreError(
                    f"the store server cannot listen on {self._socket_path}: {error.strerror or error}; choose another socket_path, "
                    "in a directory that is there, of at most 107 bytes"
                ) from error
        try:
            listener = listen(self._host, self._port)
        except OSError as error:
            raise StoreError(
                f"the store server cannot listen on host={self._host!r}, port={self._port}: {error.strerror or error}; "
                "choose another port, or port=0 for a free one"
            ) from error
        self._port = int(listener.getsockname()[1])
        return listener

    def _stop(self) -> None:
        """Stop the thread, remove the socket and the recorded address, and end `run_forever`."""
        with self._lock:
            if self._thread is not None:
                if self._socket_path is not None:
                    self._socket_path.unlink(missing_ok=True)  # it still listens, so the path is its own
                self._thread.stop()
                self._thread = None
                self._publish_address(None)
            self._ended.set()

    async def _reply_to_end(self, body: bytes, headers: RequestHeaders) -> HttpReply:
        return HttpReply(200, (await self._end.answer(body)).model_dump_json().encode(), JSON)

    def _publish_address(self, endpoint: str | None) -> None:
        # The lock file of a store names its owner; other processes find the server by it.
        if isinstance(self.store, SqliteLightningStore):
            self.store.record_server(endpoint)
