"""Report the end of an attempt to a gateway in another process, over HTTP.

`RemoteRecorder` is for runners that the gateway's own process starts: a pickled `LLMProxy` is unpickled as one.
`FoundGateways` is for runners that were started elsewhere, by hand: it finds the gateway in each attempt's resources.
Both send the gateway's control key, which agents do not get.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from leyden._lib.attempt_key import NO_TOKEN
from leyden._lib.host.listening import is_loopback
from leyden._lib.per_loop import PerLoop
from leyden.errors import GatewayError, StoreError
from leyden.types import NamedResources, ProxyLLM

_SECONDS = 60.0
"""Seconds that the gateway may take to write an attempt's calls."""


def end_path(rollout_id: str, attempt_id: str) -> str:
    """Return the URL path whose POST ends an attempt. The gateway replies when the attempt's record is in the store."""
    return f"/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}/end"


def control_key_of(secret: str) -> str:
    """Return the control key, which gateway and runners derive from a secret that they share. The secret itself is
    never sent.

    secret: the store's token, else the gateway's, else the one of `ControlSecret`.
    """
    return hmac.digest(secret.encode(), b"leyden gateway control", "sha256").hex()


class ControlSecret:
    """A random secret of a gateway that has no token and whose store has none either. It lies in a file that only the
    gateway's user can read, so that this user's runners and operators find it, and other programs of the machine do
    not.
    """

    def __init__(self) -> None:
        self.text = secrets.token_urlsafe(32)
        self._path: Path | None = None

    def publish(self, port: int) -> None:
        """Write the file of the gateway at this port, in place of one that a dead gateway has left. Raise GatewayError
        if it cannot be written.
        """
        path = _secret_path(port)
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self.text)
        except OSError as error:
            raise GatewayError(
                f"{path} cannot be written, by which runners find the gateway's control key ({error.strerror or error}); "
                "give the gateway a token, or set LEYDEN_STORE_TOKEN"
            ) from error
        self._path = path

    def withdraw(self) -> None:
        """Remove the file, unless another gateway has replaced it."""
        if self._path is not None and _read_secret(self._path) == self.text:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._path = None


def found_secret(root: str) -> str:
    """Return the `ControlSecret` of the gateway at this address; "" if this user has none there."""
    parts = urlsplit(root)
    if not is_loopback(parts.hostname or ""):
        return ""
    return _read_secret(_secret_path(parts.port or 80))


def _secret_path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"leyden-{os.getuid()}-gateway-{port}"


def _read_secret(path: Path) -> str:
    """Return the text of a file that belongs to this user alone; "" for any other file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            about = os.fstat(file.fileno())
            return file.read(1000) if about.st_uid == os.getuid() and not about.st_mode & 0o077 else ""
    except (OSError, ValueError):
        return ""


class RemoteRecorder:
    """An `AttemptRecorder` for attempts that call the gateway at `url` from another process."""

    def __init__(self, url: str, control_key: str) -> None:
        self._url, self._control_key = url, control_key
        self._sessions = PerLoop(client_session)

    def __reduce__(self) -> tuple[Callable[..., RemoteRecorder], tuple[Any, ...]]:
        return RemoteRecorder, (self._url, self._control_key)

    async def close(self) -> None:
        """Close the connections. A later `flush` opens new ones."""
        await self._sessions.close()

    def begin_attempt(self, rollout_id: str, attempt_id: str, resources: NamedResources) -> None:
        """Do nothing: the gateway learns of an attempt by its first call."""

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Do nothing: `flush`, which follows at once, ends the attempt, too."""

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        await _end(await self._sessions.get(), self._url, self._control_key, rollout_id, attempt_id)


class FoundGateways:
    """An `AttemptRecorder` that finds the gateways in each attempt's resources (`ProxyLLM`)."""

    def __init__(self, secret: str | None) -> None:
        """secret: the gateways' secret (`LLMProxy.share_control`); None: the token in each gateway's resource, or else
        the gateway's `ControlSecret`.
        """
        self._secret = secret
        self._sessions = PerLoop(client_session)
        self._found: dict[tuple[str, str], dict[str, str | None]] = {}
        """The gateways of each attempt: their tokens by base URL."""

    def __reduce__(self) -> tuple[Callable[..., FoundGateways], tuple[Any, ...]]:
        return FoundGateways, (self._secret,)

    def begin_attempt(self, rollout_id: str, attempt_id: str, resources: NamedResources) -> None:
        found = {
            gateway.root: self._secret or (None if gateway.api_key == NO_TOKEN else gateway.api_key)
            for gateway in resources.values()
            if isinstance(gateway, ProxyLLM)
        }
        if found:
            self._found[rollout_id, attempt_id] = found

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Do nothing: `flush`, which follows at once, ends the attempt, too."""

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        for root, token in self._found.pop((rollout_id, attempt_id), {}).items():
            control_key = control_key_of(token or found_secret(root))
            await _end(await self._sessions.get(), root, control_key, rollout_id, attempt_id)


async def _end(session: aiohttp.ClientSession, root: str, control_key: str, rollout_id: str, attempt_id: str) -> None:
    """End an attempt at a gateway, and wait until its calls are in the store. Raise GatewayError if the gateway cannot
    be reached, StoreError if a call could not be written.
    """
    url, headers = root + end_path(rollout_id, attempt_id), {"Authorization": f"Bearer {control_key}"}
    try:
        try:
            async with session.post(url, headers=headers) as response:
                text = await response.text()
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            # Safe to repeat. If the gateway's process has died, the session's other connections are
            # about to end as well. A new one waits at the open port for another process.
            async with client_session() as fresh, fresh.post(url, headers=headers) as response:
                text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise GatewayError(
            f"the gateway at {root} cannot be notified that attempt {attempt_id!r} is over: {error or type(error).__name__}; "
            "is it running, and can this machine reach it there?"
        ) from error
    if response.status != 200:
        raise StoreError(text)


def client_session(*, total_seconds: float = _SECONDS) -> aiohttp.ClientSession:
    """Return a session for requests to a gateway, each of which may take `total_seconds`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=15.0),
        timeout=aiohttp.ClientTimeout(total=total_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
