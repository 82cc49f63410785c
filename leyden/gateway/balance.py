"""Choose the server that takes a call: the attempt's own if healthy, else the least busy one.

An attempt stays with one server because that server has the earlier turns in its prefix cache. A server that fails is
avoided for a while, longer each time. Then one call probes it, and the others follow if the probe succeeds. If no
server is healthy, the call goes to the one whose pause ends first; it is never refused.

Everything runs in the gateway's event loop. The module knows servers by name and address, and no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from leyden.gateway.attempts import AttemptKey
from leyden.gateway.upstream import UpstreamModel

FIRST_PAUSE_SECONDS = 1.0
"""How long a server is avoided after its first failure. Each further failure doubles the pause."""
MAX_PAUSE_SECONDS = 30.0
_MAX_STICKY = 65_536
"""The most attempts whose servers are remembered. The oldest are dropped."""

_Server = tuple[str, str]
"""A server, by model name and address."""


@dataclass(slots=True)
class _Health:
    """The load and the health of one server."""

    calls: int = 0
    """The number of calls under way."""
    attempts: int = 0
    """The number of attempts whose calls all go to this server."""
    failures: int = 0
    """The number of failures in a row."""
    left_until: float = 0.0
    """The time until which the server is avoided, by the balancer's clock."""
    probing: bool = False
    """Whether a call under way tests if the server has recovered."""


class Balancer:
    """The health, the load and the attempts of each server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._health: dict[_Server, _Health] = {}
        self._sticky: OrderedDict[AttemptKey, dict[str, _Server]] = OrderedDict()
        """The server of each attempt, by model."""

    def __len__(self) -> int:
        return len(self._sticky)

    def choose(
        self, servers: Sequence[UpstreamModel], key: AttemptKey, *, but: Collection[UpstreamModel] = ()
    ) -> UpstreamModel:
        """Return the server for a call of this attempt. A newly chosen one becomes the attempt's own.

        but: servers to avoid, unless there is no other.
        """
        if len(servers) == 1:
            return servers[0]
        left = [server for server in servers if server not in but] or list(servers)
        now = self._clock()
        ready = [
            server
            for server, health in ((server, self._of(server)) for server in left)
            if not health.failures or (not health.probing and health.left_until <= now)
        ]
        if not ready:
            return min(left, key=lambda server: self._of(server).left_until)
        own = self._sticky.get(key, {}).get(servers[0].model_name)
        for server in ready:
            if _name(server) == own:
                return server
        best = min(ready, key=lambda server: (self._of(server).calls, self._of(server).attempts))
        places = self._sticky.setdefault(key, {})
        if before := places.get(best.model_name):
            self._health[before].attempts -= 1
        places[best.model_name] = _name(best)
        self._of(best).attempts += 1
        if len(self._sticky) > _MAX_STICKY:
            self.end_attempt(next(iter(self._sticky)))
        return best

    def begin(self, server: UpstreamModel) -> None:
        """Count a call to this server. `end` must follow."""
        health = self._of(server)
        health.calls += 1
        health.probing = health.failures > 0

    def end(self, server: UpstreamModel, *, healthy: bool | None) -> None:
        """Count the end of a call, and record the server's health.

        healthy: None if the call's end does not depend on the server, as when its client left.
        """
        health = self._of(server)
        health.calls -= 1
        health.probing = False
        if healthy:
            health.failures, health.left_until = 0, 0.0
        elif healthy is False:
            pause = FIRST_PAUSE_SECONDS * 2 ** min(health.failures, 10)  # 10: beyond the longest pause already
            health.failures += 1
            health.left_until = self._clock() + min(pause, MAX_PAUSE_SECONDS)

    def end_attempt(self, key: AttemptKey) -> None:
        """Drop the assignment of an attempt that is over."""
        for server in self._sticky.pop(key, {}).values():
            self._health[server].attempts -= 1

    def _of(self, server: UpstreamModel) -> _Health:
        return self._health.setdefault(_name(server), _Health())


def _name(server: UpstreamModel) -> _Server:
    return server.model_name, server.address
