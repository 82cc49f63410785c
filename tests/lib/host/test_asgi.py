"""What a client sees of an ASGI application that `AsgiThread` serves: its bytes, and when they come."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from leyden._lib.host.asgi import AsgiThread, _JoiningTransport  # pyright: ignore[reportPrivateUsage] -- no client can tell
from leyden._lib.host.http import Receive, Scope, Send
from leyden._lib.host.listening import listen

LARGE = b"x" * 3_000_000


class App:
    """Answers by path: `/small`, `/large`, or `/parts`, whose second part waits until it is told."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = {"/small": b"small", "/large": LARGE, "/parts": b"first,"}[scope["path"]]
        last = scope["path"] != "/parts"
        headers = [(b"content-length", str(len(body)).encode())] if last else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})
        if not last:
            await asyncio.to_thread(self.go_on.wait)
            await send({"type": "http.response.body", "body": b"second"})


@contextmanager
def asked(app: App, path: str, *headers: str) -> Iterator[socket.socket]:
    """A connection over which `path` was asked for."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    thread = AsgiThread(app, name="test")
    thread.start(listener)
    try:
        with closing(socket.create_connection(address, timeout=10)) as connection:
            connection.sendall("\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode())
            yield connection
    finally:
        app.go_on.set()
        thread.stop()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    read = b""
    while not read.endswith(end):
        part = connection.recv(2**20)
        assert part, f"the connection ended behind {read[-100:]!r}"
        read += part
    return read


async def test_what_is_written_in_one_turn_is_sent_together():
    sent: list[str] = []

    class Transport(asyncio.Transport):
        def writelines(self, list_of_data: Any) -> None:
            sent.append(b" ".join(list_of_data).decode())

        def close(self) -> None:
            sent.append("close")

        def is_closing(self) -> bool:
            return "close" in sent

    transport = _JoiningTransport(Transport())
    transport.write(b"head")
    transport.write(b"body")
    assert sent == ["head body"]
    await asyncio.sleep(0)
    transport.write(b"alone")
    await asyncio.sleep(0)
    assert sent == ["head body", "alone"]
    transport.write(b"last")
    transport.close()
    await asyncio.sleep(0)
    assert sent == ["head body", "alone", "last", "close"]
    transport.write(b"to nobody")  # the connection is gone: uvloop's transport would raise, where nobody can catch it
    await asyncio.sleep(0)
    assert sent[-1] == "close"


def test_the_first_part_of_an_answer_does_not_wait_for_the_second():
    app = App()
    with asked(app, "/parts") as connection:
        assert b"first," in read_until(connection, b"first,\r\n")
        app.go_on.set()
        assert read_until(connection, b"0\r\n\r\n") == b"6\r\nsecond\r\n0\r\n\r\n"


@pytest.mark.parametrize(("path", "body"), [("/small", b"small"), ("/large", LARGE)])
def test_an_answer_is_whole_when_the_connection_is_closed_behind_it(path: str, body: bytes):
    with asked(App(), path, "Connection: close") as connection:
        read = b""
        while part := connection.recv(2**20):
            read += part
    assert read.partition(b"\r\n\r\n")[2] == body
