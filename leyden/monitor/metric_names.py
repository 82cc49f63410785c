"""The names of all metrics that heartbeats, monitors and gateways report, with their meanings.

A name is a series in the store (`Sample.name`) and, with `leyden_` in front, a metric on `/metrics`. A colon and a part
of the subject may follow the name, as in `gpu_device_percent:0`. To add a metric, add it here, write it where it is
measured (`SystemProbe.read`, the runner's heartbeat, `Watch`, the gateway), and explain it in `docs/monitoring.md`.

A gateway writes its metrics into its store, so it may run in any process. The subject of such a metric
(`Sample.worker_id`) is one server of one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SYSTEM_METRICS: Final[Mapping[str, str]] = {
    "cpu_percent": "How busy the machine's CPUs are, all cores together.",
    "memory_percent": "How much of the machine's memory is in use.",
    "disk_free_percent": "How much of the disk is free on which the process works.",
    "io_seconds": "How long a read or a write of the machine's disks took on average.",
    "network_bytes_per_second": "What the machine sent and received.",
    "gpu_percent": "How busy the busiest GPU is that the process sees.",
    "gpu_memory_percent": "How full the fullest GPU is that the process sees.",
    "gpu_device_percent": "How busy one GPU is.",
    "gpu_device_memory_used_bytes": "How much memory of one GPU is in use.",
    "gpu_device_memory_total_bytes": "How much memory one GPU has.",
    "gpu_device_temperature_celsius": "How warm the chip of one GPU is.",
    "process_cpu_percent": "CPU time of the process; 100 is one core.",
    "process_rss_bytes": "Resident memory of the process.",
}
"""Metrics that `SystemProbe.read` returns. `gpu_device_*` end with a colon and the GPU's index."""

MACHINE_METRICS: Final = frozenset(
    {"cpu_percent", "memory_percent", "disk_free_percent", "io_seconds", "network_bytes_per_second"}
)
"""System metrics with the same value in every process of a machine."""

WORKER_METRICS: Final[Mapping[str, str]] = {
    "store_latency_seconds": "How long a round trip to the store took.",
    "rollouts_running": "Rollouts in flight.",
    "attempts_per_second": "Attempts that ended, since the last heartbeat.",
    "attempts_ended": "Attempts that ended, since the worker began.",
    "attempts_completed": "Attempts that ended by themselves: they did not time out, and lost no record.",
    "attempts_succeeded": "Attempts that succeeded.",
}
"""Metrics that a runner reports with a heartbeat, in addition to the system's."""

STORE_METRICS: Final[Mapping[str, str]] = {
    "store_reachable": "1 if the store answered the monitor, 0 if it did not.",
    "queue_length": "Rollouts that wait to be claimed.",
    "rollouts_under_way": "Rollouts that a worker has claimed and not finished.",
    "workers_alive": "Workers whose last heartbeat is recent.",
    "missed_heartbeats": "For how many heartbeat intervals a worker has been silent.",
}
"""Metrics that a monitor measures."""

UPSTREAM_METRICS: Final[Mapping[str, str]] = {
    "upstream_healthy": "1 while a model's server answers, 0 from a failure until it answers again.",
    "upstream_requests": "Requests that the gateway has sent to the server, since the gateway began.",
    "upstream_errors": "Requests that failed by the server's fault, since the gateway began.",
    "upstream_failures": "Failed requests by reason: unreachable, incomplete, timeout, garbage, failed (an answer of 5xx).",
    "upstream_in_flight": "Requests that the server is working on.",
    "upstream_latency_p50_seconds": "The median time to the end of an answer, in the last minute.",
    "upstream_latency_p95_seconds": "The 95th percentile of the time to the end of an answer, in the last minute.",
    "gateway_connections": "Connections that agents have open to the gateway.",
}
"""Metrics that a gateway reports. `upstream_failures:timeout` has its reason behind a colon."""

REPORT_SECONDS: Final = 10.0
"""Seconds between two reports of a gateway that has something to report."""


def base_name(name: str) -> str:
    """Return the name without what follows a colon: `gpu_device_percent` for `gpu_device_percent:0`."""
    return name.partition(":")[0]


def upstream_subject(model: str, address: str, gateway: str) -> str:
    """Return the subject of a gateway's series, which names the model, the server and the gateway."""
    return f"{model} at {address} behind {gateway}"
