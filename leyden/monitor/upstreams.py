"""Names of the series in which a gateway reports the model servers behind it.

The gateway writes them into its store as samples, and the monitor and `/metrics` read them there,
so the gateway may run in any process. A series is about one server of one model: `Sample.worker_id`
is its subject.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REPORT_SECONDS: Final = 10.0
"""Seconds between two samples of a gateway that has something to report."""

UPSTREAM_FIGURES: Final[Mapping[str, str]] = {
    "upstream_healthy": "1 while a model's server is well, 0 from a failure until it answers again.",
    "upstream_requests": "Requests that the gateway has sent to the server, since the gateway began.",
    "upstream_errors": "Those that failed by the server's fault.",
    "upstream_failures": "Failed requests by reason: unreachable, incomplete, timeout, garbage, failed (an answer of 5xx).",
    "upstream_in_flight": "Requests that the server is working on.",
    "upstream_latency_p50_seconds": "The median time to the end of an answer, of those in the last minute.",
    "upstream_latency_p95_seconds": "The 95th percentile of that time.",
    "gateway_connections": "Connections that agents have open to the gateway.",
}
"""The series of a gateway by name. `upstream_failures:timeout` has its reason behind a colon."""


def upstream_subject(model: str, address: str, gateway: str) -> str:
    """Return the subject of a series: the server and its gateway."""
    return f"{model} at {address} behind {gateway}"
