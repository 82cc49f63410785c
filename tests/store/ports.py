"""A port for a server that is stopped and started again on it."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """A port where nobody listens, below those that the system gives to connections (from 32768 on).

    While the server is away its clients try to connect. One of those that the system chose might be given to such a connection as its
    own end: then the client talks to itself, and the server cannot come back.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
