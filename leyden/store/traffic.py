"""What a store server was asked so far, and how long its answers took: counts in memory, from the start of the server.

It knows no HTTP beyond a status. Whoever shows them (`leyden/monitor/prometheus.py`) is handed them by the app.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

BOUNDS_SECONDS: Final = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0)
"""The upper ends of the classes in which answers are counted; the last class has none."""


class Durations:
    """How long answers took: how many in each class, how many seconds together."""

    __slots__ = ("by_class", "total_seconds")

    def __init__(self) -> None:
        self.by_class = [0] * (len(BOUNDS_SECONDS) + 1)
        self.total_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one answer."""
        self.by_class[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds


class Traffic:
    """Requests by method and status, and the durations of those that did not wait by themselves for something to happen."""

    def __init__(self, connections: Callable[[], int] = lambda: 0) -> None:
        """connections: returns the number of open connections."""
        self.connections = connections
        self.requests: dict[tuple[str, int], int] = {}
        self.durations: dict[str, Durations] = {}

    def add(self, method: str, status: int, seconds: float | None) -> None:
        """Count one request. method: of the store, or what else was asked for; seconds: None for one that waited."""
        key = method, status
        self.requests[key] = self.requests.get(key, 0) + 1
        if seconds is not None:
            durations = self.durations.get(method)
            if durations is None:
                durations = self.durations[method] = Durations()
            durations.add(seconds)
