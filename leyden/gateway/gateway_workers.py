"""Run the gateway in several processes behind one port.

Each attempt belongs to one worker, which the attempt's ids determine. That worker holds the whole state of the attempt:
the numbers of its calls, its server, its limits, its retries. All workers accept connections on the same socket. A
worker that receives a call of another worker's attempt forwards it over a Unix socket, and returns the response as it
arrives. The module knows processes, sockets and which attempt a request names; the rest is `LLMProxy`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import unquote

import aiohttp
import yarl

from leyden._lib.aio import look_for_cycles_rarely
from leyden._lib.attempt_key import named_by
from leyden._lib.host import pages
from leyden._lib.host.child import Backoff, Child, ChildFailure, Parent, describe_exit
from leyden._lib.host.http import (
    JSON,
    ClientGone,
    HttpReply,
    Receive,
    Refusal,
    Scope,
    Send,
    header,
    on_disconnect,
    raw_path,
    send_reply,
)
from leyden._lib.host.listening import UNIX_SCHEME, listen, listen_unix, netloc, reachable
from leyden.dialects import dump
from leyden.errors import ConfigError, GatewayError, LeydenError
from leyden.gateway.asgi import (
    as_text,
    attempt_of_headers,
    client_dialect,
    end_to_end,
    given_key,
    read_request,
    send_refusal,
    sent_time,
)
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.control import PREFIX, join_states
from leyden.gateway.gateway_app import GatewayApp
from leyden.gateway.proxy import LLMProxy
from leyden.gateway.remote import ControlSecret
from leyden.gateway.transport import Arriving
from leyden.store.opening import open_store
from leyden.types import LIVE_KEY_PREFIX, parse_claim

logger = logging.getLogger(__name__)

_SHARED = ("http://", "https://", f"{UNIX_SCHEME}://", "postgresql://", "postgres://")
"""Schemes of stores that several processes can open."""
_UNAVAILABLE_SECONDS = 15.0
"""Seconds that a call waits for a worker that is being restarted."""
_RECONNECT_SECONDS = 0.05
"""The pause between two tries to reach such a worker."""
_READY_SECONDS = 60.0
"""The seconds within which all workers must take calls after `start`."""
_STOP_SECONDS = 10.0
"""The seconds that a worker may take to write its records at the end, before it is killed."""
_RESTART_SECONDS = 1.0
"""The pause before a worker that died at once is started again the first time."""


class GatewayWorkers:
    """A gateway of several processes, which run from `start` to `stop` (or in `async with`)."""

    def __init__(
        self, n_workers: int, *, store_url: str, control_secret: str | None, host: str, port: int, **options: Any
    ) -> None:
        """Check the options; `start` starts the processes.

        store_url: where calls are recorded: the URL of a store server, or of a PostgreSQL.
        control_secret: signs control commands; all processes have the same one. None: the gateway's token, or without
            one a `ControlSecret`.
        options: options of `LLMProxy`.
        Raise ConfigError for an option that `LLMProxy` refuses.
        """
        if n_workers < 1:
            raise ConfigError(f"n_workers is {n_workers}; it must be at least 1")
        if not store_url.startswith(_SHARED):
            raise ConfigError(
                f"{store_url!r} belongs to one process, and {n_workers} workers need a store that each can open: start "
                "`leyden store` and give its URL (http://127.0.0.1:4747), or give a postgresql://... URL"
            )
        LLMProxy(host=host, **options)  # only to raise ConfigError now, not in a worker
        self._n_workers = n_workers
        self._host, self._port = host, port
        self._control_secret = None if control_secret or options.get("token") else ControlSecret()
        if self._control_secret is not None:
            control_secret = self._control_secret.text
        self._given = {"store_url": store_url, "control_secret": control_secret, "options": {**options, "host": host}}
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    @property
    def endpoint(self) -> str:
        """The gateway's base URL, without an attempt."""
        return f"http://{netloc(reachable(self._host), self._port)}/v1"

    async def start(self) -> None:
        """Open the port, start the workers, and return when all of them take calls.

        Raise GatewayError if a worker cannot start, or if the port is taken.
        """
        try:
            self._listener = listen(self._host, self._port)
        except OSError as error:
            raise GatewayError(
                f"the gateway cannot listen on {self._host}, port {self._port}: {error.strerror or error}; give another port, or "
                "0 for a free one"
            ) from error
        self._port = self._listener.getsockname()[1]
        if self._control_secret is not None:
            try:
                self._control_secret.publish(self._port)
            except GatewayError:
                self._listener.close()
                raise
        self._folder = Path(tempfile.mkdtemp(prefix="leyden-gateway-"))  # only this user can enter it
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._n_workers)]
        self._workers = [asyncio.create_task(self._keep(index, ready[index])) for index in range(self._n_workers)]
        try:
            async with asyncio.timeout(_READY_SECONDS):
                results = await asyncio.gather(*ready, return_exceptions=True)
            for failure in filter(None, results):
                raise failure
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise GatewayError(f"the gateway's workers are not ready after {_READY_SECONDS:g} s") from error
            raise

    async def stop(self) -> None:
        """Refuse further calls, end those under way, and write every record. Calling it again does nothing."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        if self._workers:
            self._workers = []
            self._listener.close()
            if self._control_secret is not None:
                self._control_secret.withdraw()
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _keep(self, index: int, ready: asyncio.Future[None]) -> None:
        """Run one worker, and start another one when it dies, until cancelled.

        ready: done when the first process takes calls, or has failed to start.
        """
        backoff, loop = Backoff(first_seconds=_RESTART_SECONDS), asyncio.get_running_loop()
        while True:
            started = loop.time()
            args = (self._listener, self._folder, index, self._n_workers, self._given)
            worker = Child(_work, args, name=f"leyden-gateway-{index}")
            ended = worker.attend(lambda message: _settle(ready, message))
            try:
                code = await asyncio.shield(ended)
            except asyncio.CancelledError:
                await asyncio.shield(worker.stop(_STOP_SECONDS))
                raise
            if not ready.done():
                ready.set_exception(GatewayError(f"a worker of the gateway {describe_exit(code)}"))
            if ready.exception() is not None:
                return
            logger.warning(
                "worker %d of the gateway %s; its calls under way are lost unless their clients retry them. Starting another",
                index,
                describe_exit(code),
            )
            await asyncio.sleep(backoff.pause_after(loop.time() - started))


def _settle(ready: asyncio.Future[None], message: ChildFailure | None) -> None:
    """Handle a worker's only message: None when it takes calls, else why it cannot."""
    if not ready.done():
        ready.set_result(None) if message is None else ready.set_exception(GatewayError(message.headline))


# ---- in a worker ---------------------------------------------------------------------------------


def _work(
    parent: Parent,
    listener: socket.socket,
    folder: Path,
    index: int,
    n_workers: int,
    given: Mapping[str, Any],
) -> None:
    """Run a gateway until the parent closes the pipe or ends. The entry point of a worker process.

    folder: where each worker has its Unix socket.
    index: this process's number among `n_workers`.
    given: the options and secrets that all the processes share.
    """
    from leyden._lib.logs import setup_logging

    async def serve() -> None:
        paths = [folder / f"{number}.sock" for number in range(n_workers)]
        proxy = _WorkerGateway(listener, paths, index, **given["options"])
        proxy.share_control(given["control_secret"])
        async with open_store(given["store_url"]) as store:
            proxy.set_store(store)
            async with proxy:
                parent.send(None)
                await parent.gone()

    setup_logging("WARNING")
    look_for_cycles_rarely()
    try:
        asyncio.run(serve())
    except (LeydenError, OSError) as error:
        parent.send(ChildFailure(f"worker {index} of the gateway cannot start: {error}", ""))
        os._exit(1)


class _WorkerGateway(LLMProxy):
    """The gateway of one worker. It serves the common socket, and its own Unix socket for calls that other workers
    forward.
    """

    def __init__(self, listener: socket.socket, paths: list[Path], index: int, **options: Any) -> None:
        if options.get("spool") is not None:
            options["spool"] = f"{options['spool']}.{index}"  # one file for each worker
        super().__init__(port=listener.getsockname()[1], **options)
        self._common = listener
        self._paths = paths
        self._index = index

    @property
    def _reported_as(self) -> str:
        return f"{super()._reported_as}/{self._index}"

    def _listen(self) -> socket.socket:
        return self._common

    @asynccontextmanager
    async def _listening_apps(
        self, app: GatewayApp, listener: socket.socket
    ) -> AsyncGenerator[list[tuple[Any, socket.socket]]]:
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(_session(path)) for path in self._paths]
            own = listen_unix(self._paths[self._index])
            yield [(app, own), (_Dispatch(app, sessions, self._index, self.max_body_bytes), listener)]


class _Dispatch:
    """The ASGI application at the common socket. It serves the calls of its worker's attempts, and forwards all others
    to their workers.
    """

    def __init__(
        self, app: GatewayApp, sessions: Sequence[aiohttp.ClientSession], index: int, max_body_bytes: int
    ) -> None:
        """sessions: an HTTP session to each worker, by index.
        index: this worker's own.
        """
        self._app = app
        self._sessions = sessions
        self._index = index
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or forward it to the process that owns its attempt. Control commands and requests for
        metrics go to every process.
        """
        path = raw_path(scope)
        try:
            if path.strip("/").startswith(PREFIX):
                return await self._ask_all(scope, receive, send, _joint_control)
            if path.rstrip("/") == pages.METRICS:
                return await self._ask_all(scope, receive, send, pages.joined_metrics)
            key = _attempt_of(scope)
            if key is None:
                owner = self._index
            else:
                owner = zlib.crc32("\x1f".join(key).encode("utf-8", "surrogatepass")) % len(self._sessions)
            if owner == self._index:
                return await self._app(scope, receive, send)
            await self._forward(owner, scope, receive, send)
        except ClientGone:
            return
        except Refusal as refusal:
            await send_refusal(send, refusal, client_dialect(scope))

    async def _ask_all(
        self, scope: Scope, receive: Receive, send: Send, join: Callable[[list[str]], HttpReply]
    ) -> None:
        """Send a request to every worker. Reply with what `join` makes of their replies, or with the first refusal."""
        body = await read_request(scope, receive, self._max_body_bytes, is_json=False)
        asked = (self._ask(owner, scope, body) for owner in range(len(self._sessions)))
        replies = [(reply.status, await reply.read()) for reply in await asyncio.gather(*asked)]
        refused = next((reply for reply in replies if reply[0] != 200), None)
        if refused is not None:
            return await send_reply(send, refused[1], status=refused[0])
        joint = join([reply.decode() for _, reply in replies])
        await send_reply(send, joint.body, headers=joint.headers)

    async def _forward(self, owner: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the worker that owns the attempt, and pass its response on. If the client leaves, the
        connection to that worker is closed, too.
        """
        body = await read_request(scope, receive, self._max_body_bytes, is_json=False)
        task = cast("asyncio.Task[None]", asyncio.current_task())
        with on_disconnect(receive, task.cancel) as watcher:
            try:
                response = await self._ask(owner, scope, body)
                async with response:
                    headers = end_to_end(response.raw_headers)
                    if length := response.headers.get("content-length"):
                        headers.append((b"content-length", length.encode()))
                    await send({"type": "http.response.start", "status": response.status, "headers": headers})
                    async for piece in Arriving(response):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except aiohttp.ClientError:  # the client's reply breaks off, too; the worker logs why
                logger.debug("a reply of worker %d of the gateway broke off", owner)
            except asyncio.CancelledError:
                if not watcher.done():
                    raise  # the gateway stops
                task.uncancel()  # the client has left

    async def _ask(self, owner: int, scope: Scope, body: bytes) -> aiohttp.ClientResponse:
        """Send a request to another worker and return its response. Retry while that worker restarts.

        Raise Refusal if the worker stays unavailable (503) or ends during the call (502).
        """
        query = scope["query_string"].decode("latin-1")
        url = yarl.URL(f"http://worker{raw_path(scope)}" + (f"?{query}" if query else ""), encoded=True)
        # `end_to_end` drops the host, which the other worker checks.
        hosts = [(name, value) for name, value in scope["headers"] if name == b"host"]
        headers = as_text([*hosts, *end_to_end(scope["headers"])])
        if header(scope, b"x-leyden-sent") is None and (sent := sent_time(scope, time.time())) is not None:
            headers.append(("x-leyden-sent", repr(sent)))  # the other worker does not see the client's address
        deadline = time.monotonic() + _UNAVAILABLE_SECONDS
        while True:
            try:
                return await self._sessions[owner].request(
                    scope["method"], url, data=body, headers=headers, allow_redirects=False
                )
            except aiohttp.ClientConnectorError as error:  # the worker restarts, and has not seen the call
                if time.monotonic() > deadline:
                    raise Refusal(
                        503,
                        "worker_away",
                        f"worker {owner} of the gateway has been away for {_UNAVAILABLE_SECONDS:g} s; try again, and see its log",
                    ) from error
                await asyncio.sleep(_RECONNECT_SECONDS)
            except aiohttp.ClientError as error:
                raise Refusal(
                    502, "worker_lost", f"worker {owner} of the gateway ended during the call; send the call again"
                ) from error


def _joint_control(replies: list[str]) -> HttpReply:
    """Return one reply to a control command: the servers' statuses of all workers, or their joint state."""
    parsed: list[Any] = [json.loads(reply) for reply in replies]
    joint = [each for one in parsed for each in one] if isinstance(parsed[0], list) else join_states(parsed)
    return HttpReply(200, dump(joint), JSON)


def _session(path: Path) -> aiohttp.ClientSession:
    """Return a session to the worker at this socket. It neither adds headers nor decompresses bodies."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(path), limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _attempt_of(scope: Scope) -> AttemptKey | None:
    """Return the attempt that a request names by its URL, its key or its headers; None without one. Nothing is
    verified: the attempt's worker checks the key.
    """
    match raw_path(scope).strip("/").split("/", 4):
        case ["rollout", rollout_id, "attempt", attempt_id, _]:
            return unquote(rollout_id), unquote(attempt_id)
        case ["live", text, *_]:
            return _named_by_claim(text)
        case _ if (given := given_key(scope).decode("latin-1")).startswith(LIVE_KEY_PREFIX):
            return _named_by_claim(given.removeprefix(LIVE_KEY_PREFIX))
        case _:
            return named_by(given_key(scope).decode("latin-1")) or attempt_of_headers(scope)


def _named_by_claim(text: str) -> AttemptKey | None:
    """Return the attempt of a live rollout's claim; None if the text is no claim."""
    claim = parse_claim(text)
    return None if claim is None else (claim.rollout_id, claim.attempt_id)
