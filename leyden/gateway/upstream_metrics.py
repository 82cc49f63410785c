"""Measure the servers behind the gateway: their requests, failures and latencies.

The numbers are counted in memory and reported to the store as samples every few seconds. They do not influence which
server takes a call; `balance` decides that. Count in the gateway's event loop only; `statuses` may be called from any
thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from leyden._lib.clock import unix_time
from leyden.errors import LeydenError, redact
from leyden.gateway.upstream import UpstreamModel
from leyden.monitor.metric_names import REPORT_SECONDS, upstream_subject
from leyden.store.base import LightningStore
from leyden.types import Sample

logger = logging.getLogger(__name__)

_RECENT_SECONDS = 60.0
"""The seconds whose answers count for the latencies."""
_MAX_RECENT = 4096
"""The most answers of one server that count for its latencies."""


@dataclass(frozen=True, slots=True)
class UpstreamFailure:
    """The reason why a server failed a request."""

    reason: str
    """One word: unreachable, incomplete, timeout, garbage or failed."""
    message: str


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """The requests, failures and latencies of one server of one model."""

    model_name: str
    address: str
    """The server's address, without passwords."""
    healthy: bool
    """Whether the last request succeeded. If not, other servers of the model are preferred for a while."""
    problem: str | None
    """The last failure; None for a healthy server."""
    requests: int
    """Requests sent to the server since the gateway began."""
    errors: dict[str, int]
    """The number of failed requests, by reason."""
    in_flight: int
    """Requests under way."""
    latency_p50_seconds: float | None
    """The median time to the end of an answer in the last minute; None without an answer."""
    latency_p95_seconds: float | None
    """The 95th percentile of that time; None without an answer."""


@dataclass(slots=True)
class _Server:
    """The counts and durations of one server's requests."""

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    in_flight: int = 0
    problem: str | None = None
    seconds: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT))
    """The time at which each recent answer ended, and its duration in seconds."""
    changed: bool = True
    """Whether the numbers changed since the last report."""
    serves: bool = True
    """Whether the gateway still has the server in its list."""


class UpstreamMetrics:
    """Counts the requests to each server, their outcomes and their durations."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._servers: dict[tuple[str, str], _Server] = {}

    def begin(self, model: UpstreamModel) -> float:
        """Count a request, and return when it began. Pass that time to `end`, which must follow."""
        server = self._servers.setdefault((model.model_name, redact(model.address)), _Server())
        server.requests += 1
        server.in_flight += 1
        server.changed = True
        return self._clock()

    def end(self, model: UpstreamModel, began: float, *, healthy: bool | None, failure: UpstreamFailure | None) -> None:
        """Count the end of a request to a model server.

        began: the time that `begin` returned.
        healthy: None if the end says nothing about the server.
        failure: the reason if `healthy` is False.
        """
        server = self._servers[model.model_name, redact(model.address)]
        server.in_flight -= 1
        server.changed = True
        if not server.serves and not server.in_flight:
            del self._servers[model.model_name, redact(model.address)]
        if healthy:
            now = self._clock()
            server.seconds.append((now, now - began))
            server.problem = None
        elif failure is not None:
            server.errors[failure.reason] += 1
            server.problem = failure.message

    def keep(self, models: Iterable[UpstreamModel]) -> None:
        """Drop all servers but these, else the gateway would report the last failure of an unused server for ever. A
        server with a request in flight is dropped when that ends.
        """
        keys = {(model.model_name, redact(model.address)) for model in models}
        for key, server in list(self._servers.items()):
            server.serves = key in keys
            if not server.serves and not server.in_flight:
                del self._servers[key]

    def statuses(self) -> list[UpstreamStatus]:
        """Return the status of each server that had a request, in the order of their first requests."""
        return [_status(*key, server, self._clock()) for key, server in list(self._servers.items())]

    async def report(self, store: LightningStore, gateway: str, connections: Callable[[], int]) -> None:
        """Write samples to the store every few seconds, until cancelled.

        gateway: the gateway's name in the samples.
        connections: returns how many connections of clients are open.
        """
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if samples := self.samples(gateway, connections()):
                try:
                    await store.add_many_samples(samples)
                except LeydenError as error:
                    logger.info("the metrics of the gateway's servers could not be written to %s: %s", store.url, error)

    def samples(self, gateway: str, connections: int) -> list[Sample]:
        """Return the samples of servers that had requests since the last report, are at work, or are unhealthy."""
        found = list[Sample]()
        for key, server in self._servers.items():
            if server.changed or server.in_flight or server.problem is not None:
                server.changed = False
                found += self._samples_of(key, server, upstream_subject(*key, gateway))
        if found or connections:
            found.append(Sample(name="gateway_connections", time=unix_time(), value=connections, worker_id=gateway))
        return found

    def all_samples(self) -> list[Sample]:
        """Return the samples of every server, for the gateway's own page."""
        servers = self._servers.items()
        return [sample for key, server in servers for sample in self._samples_of(key, server, " at ".join(key))]

    def _samples_of(self, key: tuple[str, str], server: _Server, subject: str) -> list[Sample]:
        now, status = unix_time(), _status(*key, server, self._clock())
        metrics: dict[str, float] = {
            "upstream_healthy": float(status.healthy),
            "upstream_requests": float(status.requests),
            "upstream_errors": float(sum(status.errors.values())),
            "upstream_in_flight": float(status.in_flight),
        }
        metrics |= {f"upstream_failures:{reason}": float(count) for reason, count in status.errors.items()}
        if status.latency_p50_seconds is not None and status.latency_p95_seconds is not None:
            metrics["upstream_latency_p50_seconds"] = status.latency_p50_seconds
            metrics["upstream_latency_p95_seconds"] = status.latency_p95_seconds
        return [Sample(name=name, time=now, value=value, worker_id=subject) for name, value in metrics.items()]


def _status(model_name: str, address: str, server: _Server, now: float) -> UpstreamStatus:
    """Return one server's status. Latencies cover the last `_RECENT_SECONDS`; None without a request in them."""
    seconds = sorted(took for ended, took in list(server.seconds) if ended >= now - _RECENT_SECONDS)
    return UpstreamStatus(
        model_name=model_name,
        address=address,
        healthy=server.problem is None,
        problem=server.problem,
        requests=server.requests,
        errors=dict(server.errors),
        in_flight=server.in_flight,
        latency_p50_seconds=_quantile(seconds, 0.5),
        latency_p95_seconds=_quantile(seconds, 0.95),
    )


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None
