"""Report the end of an attempt to a gateway in another process, over HTTP.

`RemoteRecorder` is for runners that the gateway's own process starts: a pickled `LLMProxy` is
unpickled as one. `FoundGateways` is for runners that were started elsewhere, by hand: it finds the
gateway in each attempt's resources. Both send the gateway's control key, which agents do not get.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp

from leyden.errors import GatewayError, StoreError
from leyden.types import NamedResources, ProxyLLM
from leyden.utils.attempt_key import NO_TOKEN
from leyden.utils.per_loop import PerLoop

_SECONDS = 60.0
"""Seconds that the gateway may take to write an attempt's calls."""


def end_path(rollout_id: str, attempt_id: str) -> str:
    """Return the URL path whose POST ends an attempt. The gateway replies when the attempt's record
    is in the store.
    """
    return f"/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}/end"


def control_key_of(secret: str | None) -> str:
    """Return the control key, which gateway and runners derive from a secret that they share. The
    secret itself is never sent.

    secret: the store's token, else the gateway's. None gives a key that any program can derive.
        Neither server has a token then, so every program on this machine may end an attempt in the
        store anyway.
    """
    return hmac.digest((secret or "").encode(), b"leyden gateway control", "sha256").hex()


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
        """End the attempt, and wait until every call of it is in the store.

        Raise StoreError if a call could not be written, GatewayError if the gateway cannot be
        reached.
        """
        await _end(await self._sessions.get(), self._url, self._control_key, rollout_id, attempt_id)


class FoundGateways:
    """An `AttemptRecorder` that finds the gateways in each attempt's resources (`ProxyLLM`)."""

    def __init__(self, secret: str | None) -> None:
        """secret: the gateways' secret (`LLMProxy.share_control`); None: the token in each
        gateway's resource.
        """
        self._secret = secret
        self._sessions = PerLoop(client_session)
        self._found: dict[tuple[str, str], dict[str, str]] = {}
        """The gateways of each attempt: control keys by base URL."""

    def __reduce__(self) -> tuple[Callable[..., FoundGateways], tuple[Any, ...]]:
        return FoundGateways, (self._secret,)

    def begin_attempt(self, rollout_id: str, attempt_id: str, resources: NamedResources) -> None:
        """Remember which gateways the agent may call."""
        found = {
            gateway.root: control_key_of(self._secret or (None if gateway.api_key == NO_TOKEN else gateway.api_key))
            for gateway in resources.values()
            if isinstance(gateway, ProxyLLM)
        }
        if found:
            self._found[rollout_id, attempt_id] = found

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Do nothing: `flush`, which follows at once, ends the attempt, too."""

    async def flush(self, rollout_id: str, attempt_id: str) -> None:
        """End the attempt at each of its gateways, and wait until every call of it is in the store.

        Raise StoreError if a call could not be written, GatewayError if a gateway cannot be
        reached.
        """
        for root, control_key in self._found.pop((rollout_id, attempt_id), {}).items():
            await _end(await self._sessions.get(), root, control_key, rollout_id, attempt_id)


async def _end(session: aiohttp.ClientSession, root: str, control_key: str, rollout_id: str, attempt_id: str) -> None:
    """Notify a gateway that an attempt is over. Raise GatewayError if it cannot be reached,
    StoreError if it failed to write the attempt's records.
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
