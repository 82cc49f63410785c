"""Count the requests to a store server and how long they took, in memory, from the start of the server.

The module knows no HTTP beyond a status, and no format in which a monitor reads the counts
(`leyden/monitor/prometheus.py`). Every request is counted, in the one event loop that serves, so counting is a look-up
and a bisection without a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

BUCKET_SECONDS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0)
"""The upper bounds of a histogram's buckets; one more bucket has none."""


class Durations:
    """A histogram of the time that requests took."""

    __slots__ = ("by_bucket", "total_seconds")

    def __init__(self) -> None:
        self.by_bucket = [0] * (len(BUCKET_SECONDS) + 1)
        self.total_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one request."""
        self.by_bucket[bisect_left(BUCKET_SECONDS, seconds)] += 1
        self.total_seconds += seconds


class RequestMetrics:
    """Counts of requests by method and status, and durations by method of requests that did not wait for an event."""

    def __init__(self, connections: Callable[[], int] = lambda: 0) -> None:
        """Begin with no requests.

        connections: returns the number of open connections.
        """
        self.connections = connections
        self.requests: dict[tuple[str, int], int] = {}
        self.durations: dict[str, Durations] = {}

    def add(self, method: str, status: int, seconds: float | None) -> None:
        """Count one request.

        method: the store's method, or another name for the request's target.
        seconds: how long the reply took; None for a request that waited for an event.
        """
        key = method, status
        self.requests[key] = self.requests.get(key, 0) + 1
        if seconds is not None:
            durations = self.durations.get(method)
            if durations is None:
                durations = self.durations[method] = Durations()
            durations.add(seconds)
