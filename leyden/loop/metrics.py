"""Metrics: named numbers of a stage, and how the values of many steps become one.

A stage of a training loop ends with a mapping of names to numbers; `clean_metrics` checks it once, at the edge. Inside a stage, a
`LogCollector` takes the values of one step (an episode, a rollout) and a `LogBuffer` makes one value of all of them.
To add a way of making one value out of many, add a line to `REDUCERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from leyden.errors import ConfigError, InvalidMetrics

__all__ = ["REDUCERS", "LogBuffer", "LogCollector", "MetricValue", "Metrics", "MetricsRow", "Stage", "clean_metrics"]

MetricValue: TypeAlias = float | int | str
Metrics: TypeAlias = Mapping[str, MetricValue]
Stage: TypeAlias = Literal["train", "val"]

ROW_FIELDS: Final = ("iteration", "stage", "seconds")
"""What a row says besides its metrics; no metric may have such a name."""

REDUCERS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one stage."""

    iteration: int
    """Finished iterations: train row 3 is the third step, validation row 3 is the policy after it, and row 0 the one before any."""
    stage: Stage
    seconds: float
    """Time spent in the loop so far, over all processes that worked on this run."""
    metrics: dict[str, MetricValue]

    def flat(self) -> dict[str, MetricValue]:
        """The row as one mapping: iteration, stage, seconds, then the metrics."""
        return {"iteration": self.iteration, "stage": self.stage, "seconds": round(self.seconds, 3), **self.metrics}


def clean_metrics(metrics: object, *, source: str) -> dict[str, MetricValue]:
    """Plain numbers and strings. NumPy scalars and tensors of one element become numbers; None is an empty mapping.

    Raises InvalidMetrics, which names `source` and the metric.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidMetrics(f"{source} returned {type(metrics).__name__}; return a mapping of metric names to numbers")
    cleaned: dict[str, MetricValue] = {}
    for name, value in metrics.items():  # pyright: ignore[reportUnknownVariableType] -- comes from user code
        if not isinstance(name, str) or name in ROW_FIELDS:
            raise InvalidMetrics(
                f"{source} returned a metric named {name!r}; names are strings other than {ROW_FIELDS}"
            )
        cleaned[name] = _plain(value, f"{source}: metric {name!r}")  # pyright: ignore[reportUnknownArgumentType]
    return cleaned


def _plain(value: Any, name: str) -> MetricValue:
    if isinstance(value, str):
        return value
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:  # more than one element
            raise InvalidMetrics(f"{name} has more than one element; return its mean or another number") from error
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise InvalidMetrics(f"{name} is {value!r} ({type(value).__name__}); a metric is a number or a string")


class LogCollector:
    """The values of one step. `reset` before the next."""

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any) -> None:
        """Note a number (or anything with one in its `item()`). Raises InvalidMetrics for anything else, and for a name used twice."""
        if name in self._logs:
            raise InvalidMetrics(f"metric {name!r} was logged twice in one step; use two names, or log their sum")
        number = _plain(value, f"metric {name!r}")
        if isinstance(number, str):
            raise InvalidMetrics(f"metric {name!r} is the string {number!r}; add_scalar takes numbers")
        self._logs[name] = float(number)

    def logs(self) -> dict[str, float]:
        """What was noted since the last `reset`."""
        return dict(self._logs)

    def reset(self) -> None:
        """Forget everything."""
        self._logs.clear()


class LogBuffer:
    """Many steps' values, made one. A metric that is missing in some steps is reduced over those that have it.

    reducers: name -> "mean" (the default of every metric), "sum" or "last".
    """

    def __init__(self, reducers: Mapping[str, str] | None = None) -> None:
        self._reducers = dict(reducers or {})
        for name, reducer in self._reducers.items():
            if reducer not in REDUCERS:
                raise ConfigError(f"metric {name!r}: unknown reducer {reducer!r}; choose one of {', '.join(REDUCERS)}")
        self._values: dict[str, list[float]] = {}

    def add(self, logs: Mapping[str, float]) -> None:
        """The values of one step."""
        for name, value in logs.items():
            self._values.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        """One value for each name."""
        return {name: REDUCERS[self._reducers.get(name, "mean")](values) for name, values in self._values.items()}

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
