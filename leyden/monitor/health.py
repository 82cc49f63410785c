"""Which metrics a worker's last heartbeat reports."""

from __future__ import annotations

from collections.abc import Container

from leyden.monitor.metric_names import base_name
from leyden.types import Worker


def heartbeat_metrics(worker: Worker, known: Container[str]) -> dict[str, float]:
    """Return the metrics of a worker's last heartbeat by name. Names that are not in `known` are left out."""
    stats = worker.heartbeat_stats or {}
    return {
        name: float(value)
        for name, value in stats.items()
        if base_name(name) in known and isinstance(value, int | float) and not isinstance(value, bool)
    }
