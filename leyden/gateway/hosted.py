"""Run the gateway in the process of the run's engine, which it then calls without HTTP.

The main process opens the port and serves its store to the engine's process (`Reservation`). The engine's process runs
the gateway there (`serve`), and the main process controls it (`HostedGateway`). The port stays open while no process
serves it, so that calls wait instead of failing. The module knows no engine: the engine's process calls `serve`.
"""

from __future__ import annotations

import asyncio
import http.client
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import TypeAdapter
from pydantic_core import to_json

from leyden._lib.aio import look_for_cycles_rarely
from leyden.errors import GatewayError
from leyden.gateway.control import PREFIX, error_message
from leyden.gateway.gate import Gate
from leyden.gateway.proxy import LLMProxy, ModelList, RunningGateway
from leyden.gateway.remote import RemoteRecorder
from leyden.gateway.transport import AppTransport, Transport
from leyden.gateway.upstream import UpstreamModel
from leyden.gateway.upstream_metrics import UpstreamStatus
from leyden.store.base import LightningStore
from leyden.store.client import LightningStoreClient
from leyden.store.postgres import PostgresLightningStore
from leyden.store.server import LightningStoreServer

FUNCTION = f"{__name__}:serve"
"""The import path of the function that the engine's process calls."""
_STATUSES = TypeAdapter(list[UpstreamStatus])
_SECONDS = 600.0
"""Seconds that a control request may take. `drain` waits for the models."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The argument of `serve`, which is pickled for the engine's process."""

    store: Any
    """The run's store or a server of it, which is unpickled as a client of the store."""
    options: Mapping[str, Any]
    """Options of `LLMProxy`."""
    models: Sequence[UpstreamModel]
    policy_versions: Mapping[str, int]
    """The version of the weights by model name."""
    control_key: str
    """The secret under which the main process controls the gateway."""


class Reservation:
    """The port and the store of a gateway that another process will run."""

    def __init__(self, listener: socket.socket, store: LightningStore) -> None:
        """listener: the listening socket, which this object closes."""
        self.listener = listener
        self._store = store
        self._folder: Path | None = None
        self._server: LightningStoreServer | None = None

    async def open(self) -> None:
        """Serve the store on a Unix socket, unless other processes can open it by its URL."""
        if not isinstance(self._store, LightningStoreClient | PostgresLightningStore):
            self._folder = Path(tempfile.mkdtemp(prefix="leyden-"))  # only this user can enter it
            self._server = LightningStoreServer(self._store, socket_path=self._folder / "store.sock")
            await self._server.start()

    async def close(self) -> None:
        self.listener.close()
        if self._server is not None:
            await self._server.stop()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def shared_store(self) -> Any:
        """The store in a form that can be pickled for another process."""
        return self._server or self._store


class HostedGateway(RunningGateway):
    """A gateway in another process, which this process controls over HTTP under its control key."""

    def __init__(self, root: str, control_key: str, end: Callable[[], Awaitable[None]]) -> None:
        """end: ends the process that runs the gateway."""
        parts = urlsplit(root)
        self._host, self._port = parts.hostname or "", parts.port
        self._headers = {"Authorization": f"Bearer {control_key}"}
        self._recorder = RemoteRecorder(root, control_key)
        self._end = end

    def is_alive(self) -> bool:
        """Return True: the end of the process ends the run."""
        return True

    def keep(self, servers: Sequence[UpstreamModel]) -> None:
        self._ask("POST", "models", [_written(server) for server in servers])

    def set_policy_version(self, model_name: str, version: int | None) -> None:
        self._ask("POST", "policy_version", {"model_name": model_name, "version": version})

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Do nothing: `flush`, which follows at once, ends the attempt, too."""

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        await self._recorder.flush(rollout_id, attempt_id)

    def upstreams(self) -> list[UpstreamStatus]:
        return _STATUSES.validate_json(self._ask("GET", "upstreams"))

    async def gate(self, command: str) -> None:
        await asyncio.to_thread(self._ask, "POST", command)

    async def end(self) -> None:
        await self._end()
        await self._recorder.close()

    def _ask(self, verb: str, command: str, body: Any = None) -> bytes:
        """Send a control request and return the reply's body. Blocks the calling thread.

        Raise GatewayError if the gateway cannot be reached or refuses.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        try:
            connection.request(verb, f"/{PREFIX}{command}", to_json(body), self._headers)
            reply = connection.getresponse()
            answer = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayError(
                f"the gateway in the engine's process cannot be reached for {command}: {error}; has the engine died?"
            ) from error
        finally:
            connection.close()
        if reply.status != 200:
            raise GatewayError(f"the gateway in the engine's process refused {command}: {error_message(answer)}")
        return answer


def _written(server: UpstreamModel) -> dict[str, Any]:
    """Return a server's fields as JSON for the command `models`, with the login in the endpoint."""
    written = {each.name: getattr(server, each.name) for each in fields(server) if each.init}
    if server.price is not None:
        written["price_per_million"] = asdict(server.price)
    if server.login is not None:
        parts = urlsplit(server.endpoint)
        login = ":".join(quote(each, safe="") for each in server.login)
        written["endpoint"] = urlunsplit(parts._replace(netloc=f"{login}@{parts.netloc}"))
    return written


# ---- in the engine's process ---------------------------------------------------------------------


@asynccontextmanager
async def serve(settings: Settings, descriptor: int, app: Any, url: str) -> AsyncGenerator[None]:
    """Run the gateway in the running event loop, which is the engine's.

    descriptor: the listening socket.
    app: the engine's endpoint, as an ASGI application.
    url: the base URL of that endpoint.
    """
    look_for_cycles_rarely()
    async with settings.store as store:
        proxy = _HostedProxy(socket.socket(fileno=descriptor), {url: AppTransport(app)}, settings)
        proxy.set_store(store)
        async with proxy:
            yield


class _HostedProxy(LLMProxy):
    """A gateway in the running event loop, on a socket that is open already.

    Calls wait until the main process has set the models, because until then the policy is missing, or has the address
    that it had in an earlier process.
    """

    def __init__(self, listener: socket.socket, transports: Mapping[str, Transport], settings: Settings) -> None:
        """transports: how to reach servers of this process, by endpoint."""
        super().__init__(port=listener.getsockname()[1], model_list=settings.models, **settings.options)
        self._listener = listener
        self._transports = transports
        self._control_key = settings.control_key
        self._policy_versions.update(settings.policy_versions)
        self._first_gate: Gate | None = None

    def update_model_list(self, model_list: ModelList) -> None:
        super().update_model_list(model_list)
        if self._first_gate is not None:
            self._first_gate.open()
            self._first_gate = None

    def _new_gate(self) -> Gate:
        self._first_gate = Gate(self._pause_wait_seconds, closed=True)
        return self._first_gate

    def _listen(self) -> socket.socket:
        return self._listener

    async def start(self) -> None:
        assert self._store is not None
        ready: Future[RunningGateway] = Future()
        self._serving = asyncio.create_task(self._serve(self._store, self._listen(), ready, Future()))
        started = asyncio.ensure_future(asyncio.wrap_future(ready))
        await asyncio.wait({self._serving, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            await self._serving  # raises its error
        self._running = await started

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()
            await self._serving
