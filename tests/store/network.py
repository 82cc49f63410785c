"""A way to a server, through a TCP proxy that a test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

__all__ = ["Network"]


class Network:
    """Whole, until it is told otherwise."""

    def __init__(self, port: int) -> None:
        """port: of the server, on this machine."""
        self.port = 0
        """Where clients reach it while it is open."""
        self._server_port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._refuses = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """The URL at which clients reach the server."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            server.close()
            await self._break_all()

    async def cut(self) -> None:
        """Break every connection, and each new one at once."""
        self._refuses = True
        await self._break_all()

    def hold(self) -> None:
        """Let nothing through; connections stay open and what is sent waits."""
        self._passes.clear()

    def mend(self) -> None:
        """Be whole again."""
        self._refuses = False
        self._passes.set()

    def limits(self) -> tuple[float, float]:
        """How many bytes of a new connection get through, to the server and back, before it is cut."""
        return float("inf"), float("inf")

    def was_cut(self) -> None:
        """A connection has reached its limit."""

    async def _break_all(self) -> None:
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        left = self.limits()
        ways = [
            asyncio.create_task(self._pass(reader, to_server, left[0])),
            asyncio.create_task(self._pass(there, writer, left[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, to_server):
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: float) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                await self._passes.wait()
                writer.write(data if left >= len(data) else data[: int(left)])
                await writer.drain()
                left -= len(data)
                if left <= 0:
                    self.was_cut()
                    return
