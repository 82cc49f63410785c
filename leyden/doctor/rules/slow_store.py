"""Each call of the store takes long, so that workers wait for it."""

from __future__ import annotations

from statistics import median

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_SLOW_SECONDS = 0.5


def _find(run: Evidence) -> Finding | None:
    found = {worker.worker_id: (worker.heartbeat_stats or {}).get("store_latency_seconds") for worker in run.workers}
    seconds = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    if not seconds or (middle := median(seconds.values())) < _SLOW_SECONDS:
        return None
    slowest = max(seconds, key=seconds.__getitem__)
    shown = (
        f"{figure(middle, 3)} s (the median of {len(seconds)} workers), {figure(seconds[slowest], 3)} s at {slowest}"
    )
    return Finding(
        cause="the store is slow: each of its calls takes long",
        evidence=(f"a heartbeat took {shown}",),
        remedy="Put the store on a local disk rather than a network's, on a machine with a free core, near the workers. For "
        "many workers, use PostgreSQL.",
        command="leyden workers URL",
        share=sum(value >= _SLOW_SECONDS for value in seconds.values()) / len(seconds),
    )


RULE = Rule("slow-store", _find, explains=("worker-silent",))
