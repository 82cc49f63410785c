"""Rules that decide when an alert is raised: pure functions of time series.

A rule judges the series of one subject (a worker, or the store with its machine) at a given time. It knows no store and
no clock. To add a kind of rule, write a class with the members of `Rule`; to change a limit, give `Monitor` other rules
than DEFAULT_RULES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final, Literal, Protocol, get_args

from leyden._lib.numbers import mean_of
from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.types.worker_health import MISSED_HEARTBEATS

Severity = Literal["info", "warning", "critical"]
Comparison = Literal[">", "<"]

Point = tuple[float, float]
"""A time in Unix seconds, and the value then."""
Series = Mapping[str, Sequence[Point]]
"""The points of one subject by the name of the metric, each in the order of time."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A rule's judgement of one subject at one time."""

    firing: bool
    """Whether the alert is to be raised, or to stay raised."""
    value: float
    """The value that was judged."""
    limit: float
    """The limit with which the value was compared."""


class Rule(Protocol):
    """Judges the series of one subject."""

    @property
    def name(self) -> str:
        """The name of the rule and of its alerts, unique among the rules of a monitor."""
        ...

    @property
    def severity(self) -> Severity: ...
    @property
    def comparison(self) -> Comparison: ...

    @property
    def metrics(self) -> Sequence[str]:
        """The names of the metrics that the rule reads. Its alerts are about the first one."""
        ...

    @property
    def reach_seconds(self) -> float:
        """The age of the oldest point that the rule reads."""
        ...

    def judge(self, series: Series, now: float) -> Judgement | None:
        """Return the judgement, or None if there are too few points.

        now: Unix seconds.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """Raises an alert while the mean of a metric over a window is above (or below) a limit.

    name: letters, digits and underscores.
    comparison: ">" raises the alert above `threshold`, "<" below it.
    window_seconds: the length of the window; 0 reads the latest point alone, however old it is.
    minimum_count: the fewest points in the window, or with `per` the least growth of that counter, that allow a
        judgement.
    per: the name of a counter. The rule then judges a share instead of a mean: the growth of the counter `metric` in
        the window, divided by the growth of this one.
    """

    name: str
    metric: str
    comparison: Comparison
    threshold: float
    window_seconds: float = 60.0
    minimum_count: int = 1
    severity: Severity = "warning"
    per: str | None = None

    def __post_init__(self) -> None:
        _check(self.name, self.metrics, self.comparison, self.severity, self.window_seconds, self.minimum_count)
        check_number(f"rule {self.name!r}: threshold", self.threshold)
        if self.per is not None and not self.window_seconds:
            raise ConfigError(
                f"rule {self.name!r}: per={self.per!r} needs a window in which it grows; window_seconds is 0"
            )

    @property
    def metrics(self) -> Sequence[str]:
        return (self.metric,) if self.per is None else (self.metric, self.per)

    @property
    def reach_seconds(self) -> float:
        return self.window_seconds

    def judge(self, series: Series, now: float) -> Judgement | None:
        start, points = now - self.window_seconds, series.get(self.metric, ())
        values = [value for _, value in (within(points, start, now) if self.window_seconds else list(points)[-1:])]
        if self.per is None:
            if not values or len(values) < self.minimum_count:
                return None
            value = mean_of(values)
        else:
            growth = increase([value for _, value in within(series.get(self.per, ()), start, now)])
            if growth <= 0 or growth < self.minimum_count:
                return None
            value = increase(values) / growth
        return Judgement(_exceeds(value, self.comparison, self.threshold), value, self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyRule:
    """Raises an alert while the median of a metric is far above (or below) its earlier median.

    Far means more than `deviations` robust standard deviations of the history, and more than `least_change`. A robust
    standard deviation is 1.4826 times the median absolute deviation.

    name: letters, digits and underscores.
    comparison: ">" raises the alert for a rise, "<" for a fall.
    window_seconds: the length of the window whose median is judged.
    history_seconds: the length of the history before the window.
    minimum_count: the fewest points in the history that allow a judgement.
    """

    name: str
    metric: str
    comparison: Comparison
    least_change: float
    deviations: float = 6.0
    window_seconds: float = 60.0
    history_seconds: float = 900.0
    minimum_count: int = 30
    severity: Severity = "info"

    def __post_init__(self) -> None:
        _check(self.name, self.metrics, self.comparison, self.severity, self.window_seconds, self.minimum_count)
        check_number(f"rule {self.name!r}: least_change", self.least_change, at_least=0)
        check_number(f"rule {self.name!r}: deviations", self.deviations, at_least=0)
        check_number(f"rule {self.name!r}: history_seconds", self.history_seconds, above=0)

    @property
    def metrics(self) -> Sequence[str]:
        return (self.metric,)

    @property
    def reach_seconds(self) -> float:
        return self.window_seconds + self.history_seconds

    def judge(self, series: Series, now: float) -> Judgement | None:
        start, points = now - self.window_seconds, series.get(self.metric, ())
        recent = [value for _, value in within(points, start, now)]
        history = [value for time, value in within(points, start - self.history_seconds, start) if time < start]
        if not recent or not history or len(history) < self.minimum_count:
            return None
        centre = median(history)
        # the factor makes it the standard deviation, if the values are normally distributed
        spread = 1.4826 * median(abs(value - centre) for value in history)
        change = max(self.deviations * spread, self.least_change)
        limit = centre + change if self.comparison == ">" else centre - change
        value = median(recent)
        return Judgement(_exceeds(value, self.comparison, limit), value, limit)


def increase(values: Sequence[float]) -> float:
    """Return the growth of a counter over its values. A counter that fell has restarted from 0."""
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def within(points: Sequence[Point], start: float, end: float) -> list[Point]:
    return [point for point in points if start <= point[0] <= end]


def _exceeds(value: float, comparison: Comparison, limit: float) -> bool:
    return value > limit if comparison == ">" else value < limit


def _check(
    name: Any, metrics: Sequence[Any], comparison: str, severity: str, window_seconds: float, minimum_count: int
) -> None:
    if not (isinstance(name, str) and name.isascii() and name.replace("_", "").isalnum()):
        raise ConfigError(f"a rule is named by letters, digits and underscores, got {name!r}")
    if comparison not in get_args(Comparison):
        raise ConfigError(f"rule {name!r}: comparison is {comparison!r}; possible: '>', '<'")
    if severity not in get_args(Severity):
        raise ConfigError(f"rule {name!r}: severity is {severity!r}; possible: {', '.join(get_args(Severity))}")
    if wrong := [metric for metric in metrics if not (isinstance(metric, str) and metric)]:
        raise ConfigError(f"rule {name!r}: {wrong[0]!r} is no name of a metric; docs/monitoring.md lists them")
    check_number(f"rule {name!r}: window_seconds", window_seconds, at_least=0)
    check_number(f"rule {name!r}: minimum_count", minimum_count, at_least=1, whole=True)


DEFAULT_RULES: Final[Sequence[Rule]] = (
    AlertRule(name="cpu", metric="cpu_percent", comparison=">", threshold=80.0, minimum_count=3),
    AlertRule(
        name="memory", metric="memory_percent", comparison=">", threshold=90.0, minimum_count=3, severity="critical"
    ),
    AlertRule(name="disk", metric="disk_free_percent", comparison="<", threshold=10.0, severity="critical"),
    AlertRule(name="io", metric="io_seconds", comparison=">", threshold=0.1, minimum_count=3),
    AlertRule(name="latency", metric="store_latency_seconds", comparison=">", threshold=1.0),
    AlertRule(
        name="worker_lost",
        metric="missed_heartbeats",
        comparison=">",
        threshold=MISSED_HEARTBEATS,
        window_seconds=0.0,
        severity="critical",
    ),
    AlertRule(
        name="store_lost",
        metric="store_reachable",
        comparison="<",
        threshold=1.0,
        window_seconds=0.0,
        severity="critical",
    ),
    AlertRule(
        name="completion",
        metric="attempts_completed",
        per="attempts_ended",
        comparison="<",
        threshold=0.95,
        window_seconds=300.0,
        minimum_count=20,
    ),
    AlertRule(
        name="success",
        metric="attempts_succeeded",
        per="attempts_ended",
        comparison="<",
        threshold=0.8,
        window_seconds=300.0,
        minimum_count=20,
    ),
    AlertRule(
        name="upstream",
        metric="upstream_healthy",
        comparison="<",
        threshold=0.5,
        window_seconds=30.0,
        minimum_count=2,
        severity="critical",
    ),
    AlertRule(
        name="upstream_errors",
        metric="upstream_errors",
        per="upstream_requests",
        comparison=">",
        threshold=0.1,
        window_seconds=300.0,
        minimum_count=20,
    ),
    AnomalyRule(name="latency_anomaly", metric="store_latency_seconds", comparison=">", least_change=0.1),
)
