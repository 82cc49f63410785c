"""Where a server listens: ports and Unix sockets, and who can reach them.

It knows no protocol. Who listens says in its own error what an address that cannot be had means.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

UNIX_SCHEME: Final = "http+unix"
"""Of URLs whose host is the path of a Unix socket, quoted."""
_BACKLOG = 2048
_ANSWER_SECONDS = 1.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket that only this user can reach; one that nobody listens on any more is replaced.

    Raises OSError when the path cannot be had, with EADDRINUSE where somebody listens.
    """
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before `listen`
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    """Remove a socket that a killed process left. Anything else stays where it is, and `bind` refuses the path."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_ANSWER_SECONDS)  # one that listens and is too busy to answer is alive
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def unix_url(path: Path) -> str:
    """The URL of a server on a Unix socket."""
    return f"{UNIX_SCHEME}://{quote(str(path), safe='')}"


def socket_path_of(url: str) -> str | None:
    """The socket's path in such a URL; None for a URL that is not one."""
    parts = urlsplit(url)
    path = unquote(parts.netloc)
    whole = parts.scheme == UNIX_SCHEME and path.startswith("/") and not (parts.path or parts.query or parts.fragment)
    return path if whole else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def reachable(host: str) -> str:
    """Where this machine reaches a server that is bound to `host`: an address for all addresses is none to connect to."""
    return _ALL_ADDRESSES.get(host, host)


def beside(url: str, neighbour: str) -> str:
    """`url`, at the host of `neighbour` where its own stands for all addresses of a machine; this machine's if that is no web address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host not in _ALL_ADDRESSES:
        return url
    other = urlsplit(neighbour)
    there = other.hostname if other.scheme in ("http", "https") else None
    return parts._replace(netloc=netloc(there or reachable(host), parts.port or 80)).geturl()


def netloc(host: str, port: int) -> str:
    """`host:port` as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes a server's event loop: uvloop where it is installed (the `fast` extra), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
