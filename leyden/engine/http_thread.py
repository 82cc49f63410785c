"""An ASGI application served by uvicorn on a thread and an event loop of its own.

With the `fast` extra installed it uses uvloop and httptools. It knows nothing of what it serves.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import uvicorn

from leyden.errors import EngineError

__all__ = ["HttpThread"]


class HttpThread:
    """Serves from `start` to `stop`."""

    def __init__(self, app: Any, *, host: str, port: int) -> None:
        """port: 0 takes a free one."""
        self._app = app
        self._host = host
        self._port = port
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen and serve; returns the port. Raises EngineError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=2048)
        except OSError as error:
            raise EngineError(
                f"the engine cannot listen on host={self._host!r}, port={self._port}: {error.strerror}; "
                "port=0 takes a free port"
            ) from error
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            date_header=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
        )
        self._server = _Server(config, self._ready)
        self._thread = threading.Thread(
            target=self._serve, args=(self._server, listener, self._ready), name="leyden-engine-http", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if not self._server.started:
            raise EngineError(f"the engine's HTTP server on {self._host}:{self._port} did not start; see the log")
        return int(listener.getsockname()[1])

    def stop(self) -> None:
        """Close the connections and end the thread."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()

    @staticmethod
    def _serve(server: uvicorn.Server, listener: socket.socket, ready: threading.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner, listener:
                runner.run(server.serve(sockets=[listener]))
        finally:
            ready.set()  # whatever happened, nobody is left waiting


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
