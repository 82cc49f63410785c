"""Agent Lightning's counters and histograms, for programs that keep some of their own.

Leyden's servers count by themselves and serve their counts at `/metrics`, without this module. A program registers a
metric first, with the names of its labels. To add a destination, subclass `MetricsBackend`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LabelDict = dict[str, str]
LabelKey = tuple[tuple[str, str], ...]

logger = logging.getLogger("leyden.metrics")


@dataclass(slots=True)
class _Metric:
    """A registered metric and its events by label values."""

    kind: str
    """`counter` or `histogram`."""
    label_names: tuple[str, ...]
    buckets: tuple[float, ...] | None
    group_level: int | None
    events: dict[LabelKey, deque[tuple[float, float]]] = field(default_factory=dict[LabelKey, Any])
    """Time and amount of each event, oldest first."""


class _Done:
    """An awaitable for a call that is done already, because Agent Lightning's methods are coroutines. A program need
    not await it.
    """

    def __init__(self, others: Sequence[Awaitable[None]] = ()) -> None:
        self._others = others

    def __await__(self) -> Generator[Any, Any, None]:
        for other in self._others:
            yield from other.__await__()


class MetricsBackend:
    """A destination of counters and histograms."""

    def __init__(self) -> None:
        self._metrics: dict[str, _Metric] = {}

    def has_prometheus(self) -> bool:
        """Return whether Prometheus can scrape this backend."""
        return False

    def register_counter(
        self, name: str, label_names: Sequence[str] | None = None, group_level: int | None = None
    ) -> None:
        """Register a counter. Raise ValueError if another metric has the name.

        group_level: how many leading labels `ConsoleMetricsBackend` aggregates by, unless it has a `group_level` of its
            own; None: it aggregates all events. Prometheus gets all labels.
        """
        self._register(name, _Metric("counter", tuple(label_names or ()), None, group_level))

    def register_histogram(
        self,
        name: str,
        label_names: Sequence[str] | None = None,
        buckets: Sequence[float] | None = None,
        group_level: int | None = None,
    ) -> None:
        """Register a histogram. Raise ValueError if another metric has the name.

        group_level: how many leading labels `ConsoleMetricsBackend` aggregates by, unless it has a `group_level` of its
            own; None: it aggregates all events. Prometheus gets all labels.
        """
        limits = None if buckets is None else tuple(buckets)
        self._register(name, _Metric("histogram", tuple(label_names or ()), limits, group_level))

    def inc_counter(self, name: str, amount: float = 1.0, labels: LabelDict | None = None) -> Awaitable[None]:
        """Add `amount` to a counter. Raise ValueError for a name or a label that is not registered."""
        return self._note("counter", name, amount, labels)

    def observe_histogram(self, name: str, value: float, labels: LabelDict | None = None) -> Awaitable[None]:
        """Add a value to a histogram. Raise ValueError for a name or a label that is not registered."""
        return self._note("histogram", name, value, labels)

    def _register(self, name: str, metric: _Metric) -> None:
        """Register a metric. Do nothing if an equal one is registered; raise ValueError if a different one has the
        name.
        """
        known = self._metrics.get(name)
        if known is None:
            self._metrics[name] = metric
            self._add(name, metric)
        elif (known.kind, known.label_names, known.buckets) != (metric.kind, metric.label_names, metric.buckets):
            raise ValueError(
                f"Metric {name!r} is already registered as {known.kind} with labels {known.label_names} and buckets "
                f"{known.buckets}; give this one another name."
            )

    def _note(self, kind: str, name: str, amount: float, labels: Mapping[str, str] | None) -> Awaitable[None]:
        """Record a value of a registered metric. Raise ValueError if the metric or one of its labels is missing."""
        metric, given = self._metrics.get(name), labels or {}
        if metric is None or metric.kind != kind:
            raise ValueError(f"{kind.capitalize()} {name!r} is not registered.")
        for label in metric.label_names:
            if label not in given:
                raise ValueError(f"Label {label!r} is required for {kind.capitalize()} {name!r}.")
        self._record(name, metric, tuple((label, given[label]) for label in metric.label_names), amount)
        return _Done()

    def _add(self, name: str, metric: _Metric) -> None:
        """Prepare for a new metric. Override it in a backend that needs to."""

    def _record(self, name: str, metric: _Metric, labels: LabelKey, amount: float) -> None:
        """Record a value; `labels` are in the registered order."""
        raise NotImplementedError


class ConsoleMetricsBackend(MetricsBackend):
    """Logs rates of counters, and percentiles (50, 95, 99) of histograms, over the last seconds.

    window_seconds: how long an event counts; None: for ever.
    log_interval_seconds: the first event after this many seconds logs every metric in one line.
    group_level: aggregate by this many leading labels; None: aggregate all events.
    """

    def __init__(
        self,
        window_seconds: float | None = 60.0,
        log_interval_seconds: float = 10.0,
        group_level: int | None = None,
    ) -> None:
        super().__init__()
        self.window_seconds, self.log_interval_seconds, self.group_level = (
            window_seconds,
            log_interval_seconds,
            group_level,
        )
        self._logged_at: float | None = None
        self._lock = threading.Lock()

    def _record(self, name: str, metric: _Metric, labels: LabelKey, amount: float) -> None:
        """Keep a value, and log all metrics if `log_interval_seconds` have passed."""
        now = time.time()
        with self._lock:
            metric.events.setdefault(labels, deque()).append((now, amount))
            if self._logged_at is not None and now - self._logged_at < self.log_interval_seconds:
                return
            self._logged_at = now
            entries = [entry for known, each in self._metrics.items() for entry in self._entries(known, each, now)]
        logger.info("%s", "  ".join(sorted(entries)))

    def _entries(self, name: str, metric: _Metric, now: float) -> list[str]:
        """Drop the events of a metric that are older than the window, and return one text for each group of its
        labels.
        """
        level = metric.group_level if self.group_level is None else self.group_level
        groups: dict[LabelKey, list[tuple[float, float]]] = {}
        for labels, events in metric.events.items():
            while events and self.window_seconds is not None and events[0][0] < now - self.window_seconds:
                events.popleft()
            groups.setdefault(labels[: max(level or 0, 0)], []).extend(events)
        entries: list[str] = []
        for labels, events in groups.items():
            if events:
                shown = "{" + ",".join(f"{label}={value}" for label, value in labels) + "}" if labels else ""
                entries.append(f"{name}{shown}={self._summary(metric.kind, events, now)}")
        return entries

    def _summary(self, kind: str, events: Sequence[tuple[float, float]], now: float) -> str:
        if kind == "counter":
            seconds = max(now - min(moment for moment, _ in events), self.log_interval_seconds, 1e-3)
            return f"{sum(amount for _, amount in events) / seconds:.2f}/s"
        values = sorted(value for _, value in events)
        return ",".join(_duration(_percentile(values, share)) for share in (0.5, 0.95, 0.99))


class PrometheusMetricsBackend(MetricsBackend):
    """Passes metrics on to `prometheus_client`; a dot in a name becomes an underscore."""

    def __init__(self) -> None:
        super().__init__()
        try:
            self._client: Any = importlib.import_module("prometheus_client")
        except ImportError as error:
            raise ImportError(
                "PrometheusMetricsBackend needs `pip install prometheus_client`; ConsoleMetricsBackend needs nothing"
            ) from error
        self._exported: dict[str, Any] = {}

    def has_prometheus(self) -> bool:
        """Return True: Prometheus scrapes `prometheus_client`'s metrics."""
        return True

    def _add(self, name: str, metric: _Metric) -> None:
        made = self._client.Counter if metric.kind == "counter" else self._client.Histogram
        options = {} if metric.buckets is None else {"buckets": metric.buckets}
        title = f"{metric.kind.capitalize()} {name}"
        self._exported[name] = made(name.replace(".", "_"), title, labelnames=metric.label_names, **options)

    def _record(self, name: str, metric: _Metric, labels: LabelKey, amount: float) -> None:
        exported = self._exported[name].labels(**dict(labels)) if labels else self._exported[name]
        (exported.inc if metric.kind == "counter" else exported.observe)(amount)


class MultiMetricsBackend(MetricsBackend):
    """Passes every call on to several backends."""

    def __init__(self, backends: Sequence[MetricsBackend]) -> None:
        super().__init__()
        if not backends:
            raise ValueError("MultiMetricsBackend needs at least one backend.")
        self._backends = list(backends)

    def has_prometheus(self) -> bool:
        """Return whether Prometheus can scrape one of the backends."""
        return any(backend.has_prometheus() for backend in self._backends)

    def register_counter(
        self, name: str, label_names: Sequence[str] | None = None, group_level: int | None = None
    ) -> None:
        """Register a counter in every backend.

        group_level: how many leading labels `ConsoleMetricsBackend` aggregates by, unless it has a `group_level` of its
            own.
        """
        for backend in self._backends:
            backend.register_counter(name, label_names=label_names, group_level=group_level)

    def register_histogram(
        self,
        name: str,
        label_names: Sequence[str] | None = None,
        buckets: Sequence[float] | None = None,
        group_level: int | None = None,
    ) -> None:
        """Register a histogram in every backend.

        group_level: how many leading labels `ConsoleMetricsBackend` aggregates by, unless it has a `group_level` of its
            own.
        """
        for backend in self._backends:
            backend.register_histogram(name, label_names=label_names, buckets=buckets, group_level=group_level)

    def inc_counter(self, name: str, amount: float = 1.0, labels: LabelDict | None = None) -> Awaitable[None]:
        """Count in every backend."""
        return _Done([backend.inc_counter(name, amount=amount, labels=labels) for backend in self._backends])

    def observe_histogram(self, name: str, value: float, labels: LabelDict | None = None) -> Awaitable[None]:
        """Add a value to the histogram in every backend."""
        return _Done([backend.observe_histogram(name, value=value, labels=labels) for backend in self._backends])


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ordered values, interpolated linearly between two of them.

    share: 0.95 for the 95th percentile.
    """
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _duration(seconds: float) -> str:
    """Return a duration with the unit that suits it: `1.50s`, `20.00ms`."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= limit:
            return f"{seconds / limit:.2f}{unit}"
    return f"{seconds * 1e9:.2f}ns"
