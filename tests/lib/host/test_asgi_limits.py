"""Clients that take too long, or send what has no end, lose their connection; all others are left alone."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from leyden._lib.host.asgi import AsgiServer, AsgiThread, ConnectionLimits
from leyden._lib.host.http import Receive, Scope, Send
from leyden._lib.host.listening import listen

LIMITS = ConnectionLimits(head_seconds=0.2, stall_seconds=0.2, stall_bytes=2000)
LATE = 5.0
LARGE = bytes(30_000_000)
Connect = Callable[[], socket.socket]


class App:
    """Reads the body of `/read`, waits a while for `/slow`, and answers with 30 MB for `/large`."""

    def __init__(self) -> None:
        self.asked = 0
        self.read: list[int] = []
        self.left_alone = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        body = b"ok"
        if scope["path"] == "/read":
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.left_alone.set()
                    return
                size, more = size + len(message["body"]), message["more_body"]
            self.read.append(size)
        elif scope["path"] == "/slow":
            await asyncio.sleep(2 * LIMITS.stall_seconds)
        elif scope["path"] == "/large":
            body = LARGE
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(app: App, http: Literal["auto", "h11"] = "auto", limits: ConnectionLimits = LIMITS) -> Iterator[Connect]:
    """A function that connects to a server of `app`."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    thread = AsgiThread(app, name="test", limits=limits, http=http, grace_seconds=0.1)
    thread.start(listener)
    try:
        yield lambda: socket.create_connection(address, timeout=LATE)
    finally:
        thread.stop()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture(params=["auto", "h11"])
def connect(app: App, request: pytest.FixtureRequest) -> Iterator[Connect]:
    with serving(app, request.param) as connect:
        yield connect


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection; times out if it does not."""
    read = b""
    try:
        while part := connection.recv(2**20):
            read += part
    except ConnectionResetError:
        pass
    return read


def seconds_until_closed(connection: socket.socket) -> float:
    started = time.monotonic()
    rest_of(connection)
    return time.monotonic() - started


def answer_of(connection: socket.socket) -> bytes:
    read = b""
    while not read.endswith(b"\r\n\r\nok"):
        part = connection.recv(2**20)
        assert part, f"the connection ended behind {read!r}"
        read += part
    return read


def dribble(connection: socket.socket, part: bytes) -> bytes:
    """Send `part` every few milliseconds until the server closes the connection; returns what it says."""
    connection.setblocking(False)
    read, deadline = b"", time.monotonic() + LATE
    while time.monotonic() < deadline:
        try:
            connection.send(part)
            said = connection.recv(2**16)
            if not said:
                return read
            read += said
        except BlockingIOError:
            pass
        except OSError:
            return read
        time.sleep(0.02)
    pytest.fail("the connection is still open")


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /read HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("earlier", [b"", GET])
@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_end_is_closed(connect: Connect, earlier: bytes, sent: bytes):
    with closing(connect()) as connection:
        if earlier:
            connection.sendall(earlier)
            answer_of(connection)
        connection.sendall(sent)
        assert LIMITS.head_seconds / 2 < seconds_until_closed(connection) < LATE / 2


def test_a_connection_over_which_nothing_is_sent_is_closed(connect: Connect):
    with closing(connect()) as connection:
        assert LIMITS.head_seconds / 2 < seconds_until_closed(connection) < LATE / 2


@pytest.mark.parametrize("part", [b"x", b"x: y\r\n"])
def test_a_head_that_grows_byte_by_byte_is_closed(connect: Connect, part: bytes):
    with closing(connect()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        dribble(connection, part)


def test_blank_lines_between_requests_keep_no_connection_open(connect: Connect):
    with closing(connect()) as connection:
        connection.sendall(GET)
        answer_of(connection)
        dribble(connection, b"\r\n")


@pytest.mark.parametrize("head", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhe"])
def test_a_body_that_does_not_come_is_told_so_and_closed(connect: Connect, app: App, head: bytes):
    with closing(connect()) as connection:
        connection.sendall(POST + head)
        said = rest_of(connection)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"did not come in time" in said
    assert app.left_alone.wait(LATE)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"Content-Length: 100000\r\n\r\n", b"x"),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"Transfer-Encoding: chunked\r\n\r\n5;", b"an-extension-of-a-chunk"),
    ],
)
def test_a_body_that_comes_byte_by_byte_is_closed(connect: Connect, app: App, head: bytes, part: bytes):
    with closing(connect()) as connection:
        connection.sendall(POST + head)
        assert dribble(connection, part).startswith(b"HTTP/1.1 408 ")
    assert not app.read


def test_a_body_that_comes_slowly_and_steadily_is_read(connect: Connect, app: App):
    with closing(connect()) as connection:
        connection.sendall(POST + b"Content-Length: 20000\r\n\r\n")
        for _ in range(20):  # 0.4 s in all, 10 kB in each period of 0.2 s
            connection.sendall(bytes(1000))
            time.sleep(0.02)
        assert b" 200 " in answer_of(connection)
    assert app.read == [20000]


def test_a_slow_answer_and_an_idle_connection_are_nobodys_fault(connect: Connect):
    with closing(connect()) as connection:
        for path in (b"/slow", b"/"):
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in answer_of(connection)
            time.sleep(1.5 * LIMITS.head_seconds)


def test_a_client_that_does_not_fetch_its_answer_is_cut_off(connect: Connect):
    with closing(connect()) as connection:
        connection.sendall(GET.replace(b"/", b"/large", 1))
        time.sleep(2 * LIMITS.stall_seconds)
        assert len(rest_of(connection)) < len(LARGE)


def test_a_client_that_fetches_slowly_and_steadily_gets_all(connect: Connect):
    with closing(connect()) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        read = 0
        while part := connection.recv(1_000_000):
            read += len(part)
            time.sleep(0.01)
    assert read > len(LARGE)


def test_trailers_without_end_are_refused(app: App):
    def flood(connection: socket.socket) -> None:
        for _ in range(1000):
            connection.sendall(b"x: y\r\n" * 1000)
            time.sleep(0.001)

    with serving(app, limits=ConnectionLimits()) as connect, closing(connect()) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            flood(connection)


def test_requests_that_are_sent_ahead_without_end_are_refused(app: App):
    with serving(app) as connect, closing(connect()) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET * 5000)
        assert b" 400 " in rest_of(connection)
        assert app.asked <= 101


def test_requests_that_are_sent_ahead_are_answered_in_order(connect: Connect, app: App):
    with closing(connect()) as connection:
        connection.sendall(GET * 50)
        read = b""
        while read.count(b"\r\n\r\nok") < 50:
            read += connection.recv(2**16)
    assert app.asked == 50


def test_the_log_counts_what_was_closed_and_is_not_flooded(app: App, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="leyden._lib.host.asgi"):
        with serving(app) as connect:
            connections = [connect() for _ in range(20)]
            for connection in connections:
                rest_of(connection)
                connection.close()
        said = [record.getMessage() for record in caplog.records]
    assert len(said) <= 2  # one at once, one for the rest of the minute
    assert all("did not send the whole head of a request within 0.2 s" in line for line in said)
    assert sum(int(line.partition("(")[2].split()[0]) for line in said) == 20
    assert "127.0.0.1:" in said[0]


def is_served(address: tuple[str, int]) -> bool:
    with closing(socket.create_connection(address, timeout=LATE)) as connection:
        try:
            connection.sendall(GET)
            return b" 200 " in connection.recv(2**16)
        except ConnectionError:
            return False


SERVER = """
import logging, resource, sys
from leyden._lib.host.asgi import AsgiThread
from leyden._lib.host.listening import listen
from tests.lib.host.test_asgi_limits import App

logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
listener = listen("127.0.0.1", 0)
thread = AsgiThread(App(), name="test", http=sys.argv[1])
thread.start(listener)
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
with open("/dev/null"):  # clients have left some descriptors to the process itself
    thread.stop()
"""


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("http", ["auto", "h11"])
def test_silent_clients_that_take_all_descriptors_shut_nobody_else_out(http: str):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, http],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        silent = [socket.create_connection(address, timeout=LATE) for _ in range(300)]
        deadline = time.monotonic() + LATE
        while not is_served(address):  # the flood may have taken this one, too; clients try again
            assert time.monotonic() < deadline
        assert all(is_served(address) for _ in range(20))
        for connection in silent:
            connection.close()
        _, log = process.communicate("stop\n", timeout=30)
    assert process.returncode == 0, log
    assert "may open no more than 96 files (ulimit -n)" in log


IN_A_LOOP = """
import asyncio, logging, os, resource, sys
from leyden._lib.host.asgi import AsgiServer
from leyden._lib.host.listening import listen, loop_factory
from tests.lib.host.test_asgi_limits import App

async def main():
    logging.basicConfig()
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    listener = listen("127.0.0.1", 0)
    server = AsgiServer(App(), keep_alive_seconds=5)
    held = [os.dup(0) for _ in range(96 - 40)]  # the program's own files
    await server.start(listener)
    print(listener.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for descriptor in held:
        os.close(descriptor)
    await server.stop(grace_seconds=0.1)

with asyncio.Runner(loop_factory=loop_factory() if sys.argv[1] == "uvloop" else None) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_server_without_descriptors_logs_a_line_a_minute(loop: str):
    with subprocess.Popen(
        [sys.executable, "-c", IN_A_LOOP, loop],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        clients = [socket.create_connection(address, timeout=LATE) for _ in range(200)]
        for client in clients[:100]:
            with suppress(OSError):
                client.sendall(b"nonsense\r\n\r\n")
        time.sleep(2.5)  # asyncio tries again each second
        for client in clients:
            client.close()
        _, log = process.communicate("stop\n", timeout=30)
    assert process.returncode == 0, log
    assert len(log.splitlines()) <= 6, log[:3000]
    assert "ulimit -n" in log
    assert "Traceback" not in log


def test_malformed_requests_are_counted_and_not_logged_one_by_one(app: App, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        for http in ("auto", "h11"):
            with serving(app, http) as connect:
                for _ in range(20):
                    with closing(connect()) as connection:
                        connection.sendall(b"nonsense\r\n\r\n")
                        rest_of(connection)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) <= 8
    assert sum(int(line.partition("(")[2].split()[0]) for line in said if "Invalid HTTP" in line) == 40
    assert {record.name for record in caplog.records} == {"leyden._lib.host.asgi"}


async def test_a_listener_that_is_closed_is_not_said_to_lack_descriptors(caplog: pytest.LogCaptureFixture):
    listener = listen("127.0.0.1", 0)
    server = AsgiServer(App(), keep_alive_seconds=5, limits=LIMITS)
    await server.start(listener)
    with caplog.at_level(logging.WARNING, logger="leyden._lib.host.asgi"):
        os.close(listener.fileno())
        while not caplog.records:  # noqa: ASYNC110 -- a log has no event
            await asyncio.sleep(0.01)
        os.dup2(0, listener.fileno())  # so that the server can close it
        await server.stop(grace_seconds=0.1)
    assert all("accepts no new clients: Bad file descriptor" in record.getMessage() for record in caplog.records)


async def test_the_loops_own_handler_of_errors_is_kept(caplog: pytest.LogCaptureFixture):
    loop, seen = asyncio.get_running_loop(), list[str]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: seen.append(context["message"]))
    try:
        server = AsgiServer(App(), keep_alive_seconds=5)
        await server.start(listen("127.0.0.1", 0))
        loop.call_exception_handler({"message": "of the program"})
        await server.stop(grace_seconds=0.1)
        loop.call_exception_handler({"message": "afterwards"})
    finally:
        loop.set_exception_handler(before)
    assert seen == ["of the program", "afterwards"]
