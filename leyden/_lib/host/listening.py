"""The addresses that servers listen at: ports and Unix sockets, and which machines reach them.

The module knows no protocol. A server catches the OSError of an address that it cannot bind, and raises an error of its
own.
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

from leyden.errors import ConfigError

UNIX_SCHEME: Final = "http+unix"
"""The scheme of URLs whose host is the path of a Unix socket, percent-encoded."""
BACKLOG = 2048
"""The most connections that wait until the server accepts them."""
_CONNECT_SECONDS = 1.0


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    port: 0 chooses a free one. Raise OSError if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user can reach. It replaces a socket on which no process listens
    any more. Raise OSError if the path cannot be bound, with EADDRINUSE if another process listens there.
    """
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # no client can connect before `listen`
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    """Remove a socket that a killed process left behind. Any other file stays, and `bind` refuses the path. Raise
    OSError (EADDRINUSE) if a process listens on the socket.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_CONNECT_SECONDS)  # a server that is too busy to accept is alive
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def unix_url(path: Path) -> str:
    """Return the URL of a server on a Unix socket."""
    return f"{UNIX_SCHEME}://{quote(str(path), safe='')}"


def socket_path_of(url: str) -> str | None:
    """Return the path in the URL of a Unix socket; None for any other URL."""
    parts = urlsplit(url)
    path = unquote(parts.netloc)
    whole = parts.scheme == UNIX_SCHEME and path.startswith("/") and not (parts.path or parts.query or parts.fragment)
    return path if whole else None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server that is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(name: str, token: object, *, host: str, or_say: str | None = None, insecure: bool = False) -> None:
    """Raise ConfigError unless a server that is bound to `host` may run with this token.

    An empty token is refused on every address, because it usually comes from an unset variable and would admit any
    client. Without a token (None) a server may be bound to a loopback address only, unless it is `insecure`.

    name: the token's option, for the message.
    insecure: the user allows a server without a token on any address.
    or_say: the option that makes a server `insecure`, for the message; None if there is none.
    """
    if token is not None and not isinstance(token, str):
        raise ConfigError(f"{name} is {type(token).__name__}; it must be a string, or None")
    if token is not None and not token.strip():
        raise ConfigError(f"{name} is empty; leave it out, or choose one that is hard to guess")
    if token is None and not insecure and not is_loopback(host):
        other = "" if or_say is None else f", or say {or_say}"
        raise ConfigError(f"host {host!r} can be reached from other machines: give {name}, or bind to 127.0.0.1{other}")


_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Hosts that stand for all addresses of a machine, and the loopback address of each."""


def reachable(host: str) -> str:
    """Return the host at which this machine reaches a server that is bound to `host`: a loopback address for a host
    that stands for all addresses, and `host` itself otherwise.
    """
    return _ALL_ADDRESSES.get(host, host)


def at_host_of(neighbour: str, url: str) -> str:
    """Return `url` with the host of `neighbour` in place of a host that stands for all addresses of a machine. A `url`
    with any other host is returned unchanged.

    neighbour: the URL of a server on the same machine as `url`. One that is no HTTP URL, such as a file's, means this
        machine.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host not in _ALL_ADDRESSES:
        return url
    other = urlsplit(neighbour)
    there = other.hostname if other.scheme in ("http", "https") else None
    return parts._replace(netloc=netloc(there or reachable(host), parts.port or 80)).geturl()


def netloc(host: str, port: int) -> str:
    """Return `host:port` in the form of a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of uvloop's event loop if it is installed (the `fast` extra), else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
