"""Which of a model's servers takes a call: the attempt's own while it is well, else the least busy one.

An attempt stays with one server because that has its earlier turns in its cache. A server that fails is left alone for a while,
longer each time; then one call tries it (half-open), and the others follow if that succeeds. Nothing is refused for want of a
healthy server: the one that may be back first is tried.

Everything runs in the gateway's event loop. It knows servers by name and address, and no HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from leyden.gateway.attempts import AttemptKey
from leyden.gateway.upstream import UpstreamModel

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
_STICKY_KEPT = 65_536

_Server = tuple[str, str]
"""Model name, address."""


@dataclass(slots=True)
class _Health:
    calls: int = 0
    """Under way."""
    attempts: int = 0
    """That stay with it."""
    failures: int = 0
    """In a row."""
    left_until: float = 0.0
    probing: bool = False
    """A call tries whether it is well again."""


class Balancer:
    """The servers' health, load and attempts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._health: dict[_Server, _Health] = {}
        self._sticky: OrderedDict[AttemptKey, dict[str, _Server]] = OrderedDict()
        """By attempt and model."""

    def __len__(self) -> int:
        return len(self._sticky)

    def choose(
        self, servers: Sequence[UpstreamModel], key: AttemptKey, *, but: Collection[UpstreamModel] = ()
    ) -> UpstreamModel:
        """The server for a call of this attempt; not one of `but` unless there is no other."""
        if len(servers) == 1:
            return servers[0]
        left = [server for server in servers if server not in but] or list(servers)
        ready = [server for server in left if self._ready(server)]
        if not ready:
            return min(left, key=lambda server: self._of(server).left_until)
        own = self._sticky.get(key, {}).get(servers[0].model_name)
        for server in ready:
            if _name(server) == own:
                return server
        best = min(ready, key=lambda server: (self._of(server).calls, self._of(server).attempts))
        self._stay(key, best)
        return best

    def begin(self, server: UpstreamModel) -> None:
        """A call goes to this server; `end` must follow."""
        health = self._of(server)
        health.calls += 1
        health.probing = health.failures > 0

    def end(self, server: UpstreamModel, *, well: bool | None) -> None:
        """The call is over. well: None where it says nothing about the server, as when its client went away."""
        health = self._of(server)
        health.calls -= 1
        health.probing = False
        if well:
            health.failures, health.left_until = 0, 0.0
        elif well is False:
            pause = FIRST_PAUSE_SECONDS * 2 ** min(health.failures, 10)
            health.failures += 1
            health.left_until = self._clock() + min(pause, LONGEST_PAUSE_SECONDS)

    def end_attempt(self, key: AttemptKey) -> None:
        """Forget where an attempt stayed."""
        for server in self._sticky.pop(key, {}).values():
            self._health[server].attempts -= 1

    def _ready(self, server: UpstreamModel) -> bool:
        health = self._of(server)
        return not health.failures or (not health.probing and health.left_until <= self._clock())

    def _of(self, server: UpstreamModel) -> _Health:
        return self._health.setdefault(_name(server), _Health())

    def _stay(self, key: AttemptKey, server: UpstreamModel) -> None:
        places = self._sticky.setdefault(key, {})
        if before := places.get(server.model_name):
            self._health[before].attempts -= 1
        places[server.model_name] = _name(server)
        self._of(server).attempts += 1
        if len(self._sticky) > _STICKY_KEPT:
            self.end_attempt(next(iter(self._sticky)))


def _name(server: UpstreamModel) -> _Server:
    return server.model_name, server.address
