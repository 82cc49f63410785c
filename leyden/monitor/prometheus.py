"""The page that Prometheus reads, `/metrics`, in its text format (version 0.0.4).

A store server shows it when it is handed `metrics(store)`. It says what the store knows at the moment: how many rollouts are in which
status, how the workers are, their figures, and what a `Monitor` has measured in the last minute, if one is at work. To add a
family of metrics: a function that yields a `_Family`, and a line in `_families`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, get_args

from leyden.host.http import HttpReply
from leyden.monitor.alert import ALERT_PREFIX
from leyden.monitor.health import WORKER_FIGURES, WorkerHealth, figures_of, health_of
from leyden.monitor.monitor import STORE_FIGURES
from leyden.monitor.system import FIGURES
from leyden.monitor.upstreams import UPSTREAM_FIGURES
from leyden.store.app import View
from leyden.store.base import LightningStore, StoreStatistics
from leyden.store.traffic import BOUNDS_SECONDS, Traffic
from leyden.types import Sample, Worker

PATH: Final = "/metrics"
_CONTENT_TYPE: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_STATUSES = ("queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled")
_RECENT_SECONDS = 60.0
"""What was measured before is not shown any more."""
_ABOUT = {**FIGURES, **WORKER_FIGURES, **STORE_FIGURES}

Labels = Mapping[str, str]
_NO_LABELS: Labels = {}


@dataclass(frozen=True, slots=True)
class _Family:
    """Metrics of one name."""

    name: str
    about: str
    kind: Literal["gauge", "counter", "histogram"]
    lines: Sequence[tuple[str, Labels, float]]
    """A suffix of the name, labels, a value."""


def metrics(store: LightningStore) -> Mapping[str, View]:
    """What a server is handed: `LightningStoreServer(store, views=metrics(store))`."""

    async def page(traffic: Traffic) -> HttpReply:
        return HttpReply(200, (await exposition(store, traffic)).encode(), _CONTENT_TYPE)

    return {PATH: page}


async def exposition(store: LightningStore, traffic: Traffic) -> str:
    """The whole page. Raises what the store raises."""
    now = time.time()
    statistics = await store.statistics()
    workers = list(await store.query_workers())
    samples = list(await store.query_samples(measured_from=now - _RECENT_SECONDS))
    families = [
        *_of_statistics(statistics),
        _of_health(workers, now),
        *_of_figures(workers, samples, now),
        *_of_gateways(samples),
        _of_alerts(samples),
        *_of_traffic(traffic),
    ]
    return "".join(_text(family) for family in families)


def _of_statistics(statistics: StoreStatistics) -> Iterator[_Family]:
    by_status = {**dict.fromkeys(_STATUSES, 0), **statistics["rollouts_by_status"]}
    lines: list[tuple[str, Labels, float]] = [
        ("", {"status": status}, float(count)) for status, count in by_status.items()
    ]
    yield _Family("leyden_rollouts", "Rollouts by status.", "gauge", lines)
    lines = [("", _NO_LABELS, float(by_status["queuing"] + by_status["requeuing"]))]
    yield _Family("leyden_queue_length", "Rollouts that wait to be claimed.", "gauge", lines)
    totals = {
        "attempts": statistics["total_attempts"],
        "spans": statistics["total_spans"],
        "resources": statistics["total_resources"],
    }
    lines = [("", {"kind": kind}, float(total)) for kind, total in totals.items()]
    yield _Family("leyden_records", "Records in the store by kind.", "gauge", lines)
    lines = [("", _NO_LABELS, statistics["uptime_seconds"])]
    yield _Family("leyden_store_uptime_seconds", "How long the store has been open.", "gauge", lines)


def _of_health(workers: Iterable[Worker], now: float) -> _Family:
    count: dict[str, int] = dict.fromkeys(get_args(WorkerHealth), 0)
    for worker in workers:
        count[health_of(worker, now)] += 1
    lines = [("", {"health": health}, float(number)) for health, number in count.items()]
    return _Family("leyden_workers", "Workers by health, as far as their heartbeats tell.", "gauge", lines)


def _of_figures(workers: Iterable[Worker], samples: Iterable[Sample], now: float) -> Iterator[_Family]:
    """Of each worker the figures of its last heartbeat; of the store what a monitor measured last."""
    latest: dict[str, dict[tuple[str, str], float]] = {}
    for worker in workers:
        if health_of(worker, now) == "healthy":
            for figure, value in figures_of(worker, _ABOUT).items():
                name, _, gpu = figure.partition(":")
                latest.setdefault(name, {})[worker.worker_id, gpu] = value
    for sample in samples:
        name, _, gpu = sample.name.partition(":")
        if name in _ABOUT and (sample.worker_id is None or name in STORE_FIGURES):
            latest.setdefault(name, {})[sample.worker_id or "", gpu] = sample.value
    latest.pop("queue_length", None)  # it is there already, as the store says
    for name, values in sorted(latest.items()):
        of_the_store = any(not worker_id for worker_id, _ in values)
        about = _ABOUT[name] + (" Without a worker: of the store and its machine." if of_the_store else "")
        lines = [
            ("", {"worker": worker_id, **({"gpu": gpu} if gpu else {})}, value)
            for (worker_id, gpu), value in sorted(values.items())
        ]
        yield _Family(f"leyden_{name}", about, "gauge", lines)


def _of_gateways(samples: Iterable[Sample]) -> Iterator[_Family]:
    """Return the newest samples of gateways about themselves and the servers behind them."""
    latest: dict[str, dict[tuple[str, str], float]] = {}
    for sample in samples:
        name, _, reason = sample.name.partition(":")
        if name in UPSTREAM_FIGURES:
            latest.setdefault(name, {})[sample.worker_id or "", reason] = sample.value
    for name, values in sorted(latest.items()):
        whom = "upstream" if name.startswith("upstream") else "gateway"
        lines = [
            ("", {whom: subject, **({"reason": reason} if reason else {})}, value)
            for (subject, reason), value in sorted(values.items())
        ]
        yield _Family(f"leyden_{name}", UPSTREAM_FIGURES[name], "gauge", lines)


def _of_alerts(samples: Iterable[Sample]) -> _Family:
    latest = {
        (sample.name.removeprefix(ALERT_PREFIX), sample.worker_id or ""): sample.value
        for sample in samples
        if sample.name.startswith(ALERT_PREFIX)
    }
    lines = [("", {"rule": rule, "worker": worker}, value) for (rule, worker), value in sorted(latest.items())]
    return _Family("leyden_alert", "1 while a monitor's alert is raised.", "gauge", lines)


def _of_traffic(traffic: Traffic) -> Iterator[_Family]:
    requests = sorted(traffic.requests.items())
    lines: list[tuple[str, Labels, float]] = [
        ("", {"method": method, "status": str(status)}, float(n)) for (method, status), n in requests
    ]
    yield _Family("leyden_http_requests_total", "Requests to the store server.", "counter", lines)
    lines = [("", _NO_LABELS, float(traffic.connections()))]
    yield _Family("leyden_http_connections", "Connections that are open to the store server.", "gauge", lines)
    lines = [line for method in sorted(traffic.durations) for line in _histogram(traffic, method)]
    about = "How long the store server took to answer what does not wait by itself."
    yield _Family("leyden_http_request_seconds", about, "histogram", lines)


def _histogram(traffic: Traffic, method: str) -> Iterator[tuple[str, Labels, float]]:
    durations = traffic.durations[method]
    counts = list(accumulate(durations.by_class))
    for bound, count in zip((*map(repr, BOUNDS_SECONDS), "+Inf"), counts, strict=True):
        yield "_bucket", {"method": method, "le": bound}, float(count)
    yield "_sum", {"method": method}, durations.total_seconds
    yield "_count", {"method": method}, float(counts[-1])


def _text(family: _Family) -> str:
    about = family.about.replace("\\", r"\\").replace("\n", r"\n")
    head = f"# HELP {family.name} {about}\n# TYPE {family.name} {family.kind}\n"
    return head + "".join(
        f"{family.name}{suffix}{_labels(labels)} {value!r}\n" for suffix, labels, value in family.lines
    )


def _labels(labels: Labels) -> str:
    parts = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return "{" + ",".join(parts) + "}" if parts else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
