"""The page that Prometheus reads, `/metrics`, in its text format (version 0.0.4).

A store server has the page if it is given `views=metrics(store)`. The page shows rollouts by status, the health of the
workers, the metrics of their last heartbeats, and what a `Monitor` and the gateways have measured in the last minute.
`of_requests` and `of_gateways` are also for the pages of other servers. To add a metric, write a function that yields a
metric family, and call it in `exposition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from leyden._lib.host import pages
from leyden._lib.host.http import HttpReply
from leyden.monitor.alert import ALERT_PREFIX
from leyden.monitor.health import heartbeat_metrics
from leyden.monitor.metric_names import STORE_METRICS, SYSTEM_METRICS, UPSTREAM_METRICS, WORKER_METRICS
from leyden.store.base import LightningStore, StoreStatistics
from leyden.store.request_metrics import BUCKET_SECONDS, RequestMetrics
from leyden.store.store_app import View
from leyden.types import Sample, Worker
from leyden.types.worker_health import WorkerHealth, health_of

_STATUSES = ("queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled")
"""Every status is shown, also with 0 rollouts, so that a graph has no gaps."""
_RECENT_SECONDS = 60.0
"""Older samples are not shown."""
_ABOUT = {**SYSTEM_METRICS, **WORKER_METRICS, **STORE_METRICS}
"""The help texts of the metrics that workers and monitors report, by name."""


def metrics(store: LightningStore) -> Mapping[str, View]:
    """Return the views of a server with the page `/metrics`.

    For example `LightningStoreServer(store, views=metrics(store))`.
    """

    async def page(requests: RequestMetrics) -> HttpReply:
        return pages.metrics(await _families(store, requests))

    return {pages.METRICS: page}


async def exposition(store: LightningStore, requests: RequestMetrics) -> bytes:
    """Return the content of the page. Raise the store's errors.

    requests: the store server's own metrics.
    """
    return pages.metrics_text(await _families(store, requests))


async def _families(store: LightningStore, requests: RequestMetrics) -> list[Metric]:
    statistics = await store.statistics()
    now = statistics["time"]
    workers = list(await store.query_workers())
    samples = list(await store.query_samples(measured_from=now - _RECENT_SECONDS))
    return [
        *_of_statistics(statistics),
        _of_health(workers, now),
        *_of_heartbeats(workers, samples, now),
        *of_gateways(samples),
        _of_alerts(samples),
        *of_requests(requests),
    ]


def _of_statistics(statistics: StoreStatistics) -> Iterator[Metric]:
    by_status = {**dict.fromkeys(_STATUSES, 0), **statistics["rollouts_by_status"]}
    rollouts = GaugeMetricFamily("leyden_rollouts", "Rollouts by status.", labels=["status"])
    for status, count in by_status.items():
        rollouts.add_metric([status], count)
    yield rollouts
    queued = by_status["queuing"] + by_status["requeuing"]
    yield GaugeMetricFamily("leyden_queue_length", "Rollouts that wait to be claimed.", queued)
    records = GaugeMetricFamily("leyden_records", "Records in the store by kind.", labels=["kind"])
    records.add_metric(["attempts"], statistics["total_attempts"])
    records.add_metric(["spans"], statistics["total_spans"])
    records.add_metric(["resources"], statistics["total_resources"])
    yield records
    uptime = statistics["uptime_seconds"]
    yield GaugeMetricFamily("leyden_store_uptime_seconds", "How long the store has been open.", uptime)


def _of_health(workers: Iterable[Worker], now: float) -> Metric:
    count: dict[str, int] = dict.fromkeys(get_args(WorkerHealth), 0)
    for worker in workers:
        count[health_of(worker, now)] += 1
    about = "Workers by health, as far as their heartbeats tell."
    family = GaugeMetricFamily("leyden_workers", about, labels=["health"])
    for health, number in count.items():
        family.add_metric([health], number)
    return family


def _of_heartbeats(workers: Iterable[Worker], samples: Iterable[Sample], now: float) -> Iterator[Metric]:
    """Yield the metrics of each worker's last heartbeat, and a monitor's last measurements of the store."""
    latest: dict[str, dict[tuple[str, str], float]] = {}
    for worker in workers:
        if health_of(worker, now) == "healthy":
            for full_name, value in heartbeat_metrics(worker, _ABOUT).items():
                name, _, gpu = full_name.partition(":")
                latest.setdefault(name, {})[worker.worker_id, gpu] = value
    for sample in samples:
        name, _, gpu = sample.name.partition(":")
        if name in _ABOUT and (sample.worker_id is None or name in STORE_METRICS):
            latest.setdefault(name, {})[sample.worker_id or "", gpu] = sample.value
    latest.pop("queue_length", None)  # `_of_statistics` has the store's own count
    for name, values in sorted(latest.items()):
        is_of_store = any(not worker_id for worker_id, _ in values)
        about = _ABOUT[name] + (" Without a worker: of the store and its machine." if is_of_store else "")
        yield _by_subject(f"leyden_{name}", about, values, "worker", "gpu")


def of_gateways(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Yield the newest samples of gateways about themselves and the servers behind them."""
    latest: dict[str, dict[tuple[str, str], float]] = {}
    for sample in samples:
        name, _, reason = sample.name.partition(":")
        if name in UPSTREAM_METRICS:
            latest.setdefault(name, {})[sample.worker_id or "", reason] = sample.value
    for name, values in sorted(latest.items()):
        subject = "upstream" if name.startswith("upstream") else "gateway"
        yield _by_subject(f"leyden_{name}", UPSTREAM_METRICS[name], values, subject, "reason")


def _by_subject(
    name: str, about: str, values: Mapping[tuple[str, str], float], subject: str, part: str
) -> GaugeMetricFamily:
    """Return a family with a value for each subject, and for each part of it if there are parts.

    values: by subject and part; the part is "" for a whole subject.
    subject, part: the names of the two labels.
    """
    has_parts = any(value_part for _, value_part in values)
    family = GaugeMetricFamily(name, about, labels=[subject, part] if has_parts else [subject])
    for key, value in sorted(values.items()):
        family.add_metric(key if has_parts else key[:1], value)
    return family


def _of_alerts(samples: Iterable[Sample]) -> Metric:
    """Return whether each alert of the last minute is raised, 1 or 0."""
    latest = {
        (sample.name.removeprefix(ALERT_PREFIX), sample.worker_id or ""): sample.value
        for sample in samples
        if sample.name.startswith(ALERT_PREFIX)
    }
    family = GaugeMetricFamily("leyden_alert", "1 while a monitor's alert is raised.", labels=["rule", "worker"])
    for key, value in sorted(latest.items()):
        family.add_metric(key, value)
    return family


def of_requests(requests: RequestMetrics) -> Iterator[Metric]:
    """Yield the server's requests, connections and durations in seconds."""
    about = "Requests to this server."
    counts = CounterMetricFamily("leyden_http_requests", about, labels=["method", "status"])
    for (method, status), count in sorted(requests.requests.items()):
        counts.add_metric([method, str(status)], count)
    yield counts
    about = "Connections that are open to this server."
    yield GaugeMetricFamily("leyden_http_connections", about, requests.connections())
    about = "Time that this server took for each request, without those that wait for events."
    seconds = HistogramMetricFamily("leyden_http_request_seconds", about, labels=["method"])
    bounds = [*map(str, BUCKET_SECONDS), "+Inf"]
    for method, durations in sorted(requests.durations.items()):
        buckets = list(zip(bounds, accumulate(durations.by_bucket), strict=True))
        seconds.add_metric([method], buckets, durations.total_seconds)
    yield seconds
