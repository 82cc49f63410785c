"""An ASGI application on a listening socket, with uvicorn's HTTP protocol and without its effects on the process.

`uvicorn.Server` sets the levels and handlers of the process's loggers, installs signal handlers and wakes ten times a
second to see whether to stop: right for a program, wrong for one part of somebody's program. It knows no routes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

__all__ = ["AsgiServer"]

_LOOK_AGAIN_SECONDS = 0.005


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
        self._server = await asyncio.get_running_loop().create_server(self._protocol, sock=listener, backlog=2048)

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
        protocol_class: Any = AutoHTTPProtocol  # uvicorn types it as a bare asyncio.Protocol
        protocol = protocol_class(config=self._config, server_state=self._state, app_state={})
        protocol.access_log = False
        return protocol


class _Config(uvicorn.Config):
    def configure_logging(self) -> None:
        """The loggers belong to the program that the gateway runs in."""
