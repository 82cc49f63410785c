"""The health of a worker, as pure functions of its last heartbeat in the store."""

from __future__ import annotations

from typing import Final, Literal

from leyden.types.worker import Worker

WorkerHealth = Literal["healthy", "unhealthy", "ended"]

MISSED_HEARTBEATS: Final = 3.0
"""A worker is unhealthy after a silence of more than this many heartbeat intervals."""
_DEFAULT_INTERVAL_SECONDS: Final = 10.0


def health_of(worker: Worker, now: float) -> WorkerHealth:
    """Return whether a worker has ended, is healthy, or has been silent for too long (unhealthy).

    now: Unix seconds by the store's clock.
    """
    if has_ended(worker):
        return "ended"
    last = worker.last_heartbeat_time
    is_silent = last is None or now - last > MISSED_HEARTBEATS * heartbeat_seconds(worker)
    return "unhealthy" if is_silent else "healthy"


def has_ended(worker: Worker) -> bool:
    """Return whether the worker's last heartbeat announced that it is the last."""
    return (worker.heartbeat_stats or {}).get("ended") is True


def heartbeat_seconds(worker: Worker) -> float:
    """Return the seconds between the worker's heartbeats, as it reports them; 10 by default."""
    given = (worker.heartbeat_stats or {}).get("heartbeat_seconds")
    return float(given) if isinstance(given, int | float) and given > 0 else _DEFAULT_INTERVAL_SECONDS
