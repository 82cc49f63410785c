"""Whether a worker is well, as far as its heartbeats tell: pure functions of what the store last heard of it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final, Literal

from leyden.types import Worker

WorkerHealth = Literal["healthy", "unhealthy", "ended"]

MISSED_HEARTBEATS: Final = 3.0
"""A worker that has been silent for more than so many of its intervals is unhealthy."""
_USUAL_SECONDS: Final = 10.0

WORKER_FIGURES: Final[Mapping[str, str]] = {
    "store_latency_seconds": "How long a round trip to the store took.",
    "rollouts_running": "Rollouts in flight.",
    "attempts_per_second": "Attempts that ended, since the last heartbeat.",
    "attempts_ended": "Attempts that ended, since the worker began.",
    "attempts_completed": "Attempts that came to their end: neither timed out, nor lost what they recorded.",
    "attempts_succeeded": "Attempts that succeeded.",
}
"""What a runner tells of itself with a heartbeat, beside the figures of `system.py`."""


def base_name(figure: str) -> str:
    """Return the metric's name without its subject: `gpu_device_percent` for
    `gpu_device_percent:0`.
    """
    return figure.partition(":")[0]


def heartbeat_seconds(worker: Worker) -> float:
    """Between two heartbeats of this worker, as it says."""
    given = (worker.heartbeat_stats or {}).get("heartbeat_seconds")
    return float(given) if isinstance(given, int | float) and given > 0 else _USUAL_SECONDS


def health_of(worker: Worker, now: float) -> WorkerHealth:
    """now: Unix seconds by the store's clock."""
    if has_ended(worker):
        return "ended"
    heard = worker.last_heartbeat_time
    silent = heard is None or now - heard > MISSED_HEARTBEATS * heartbeat_seconds(worker)
    return "unhealthy" if silent else "healthy"


def has_ended(worker: Worker) -> bool:
    """Whether its last heartbeat said that there will be no more."""
    return (worker.heartbeat_stats or {}).get("ended") is True


def figures_of(worker: Worker, known: Container[str]) -> dict[str, float]:
    """Return the known metrics of a worker's last heartbeat, by name."""
    stats = worker.heartbeat_stats or {}
    return {
        name: float(value)
        for name, value in stats.items()
        if base_name(name) in known and isinstance(value, int | float) and not isinstance(value, bool)
    }
