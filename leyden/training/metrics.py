"""Metrics: named numbers of a stage, how the values of many steps become one, and the rows that writers get.

A stage of a training loop ends with a mapping of names to numbers; `clean_metrics` checks it when the loop receives it.
Inside a stage, a `LogCollector` takes the values of one step (of an episode, a rollout) and a `MetricsAggregator`
reduces those of many steps to one value for each name. There are rows of stages (`MetricsRow`), of episodes
(`EpisodeRow`) and of steps (`StepRow`); none of them knows who writes it.

To add a way to reduce many values to one, add a line to `REDUCERS`; to add a kind of row, subclass `Row` and add it to
`ROW_KINDS`.
"""

from __future__ import annotations

import difflib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Final, Literal, TypeAlias, cast

from leyden._lib.numbers import as_number, mean_of
from leyden.errors import ConfigError, InvalidMetrics

logger = logging.getLogger(__name__)

MetricValue: TypeAlias = float | int | str
Metrics: TypeAlias = Mapping[str, MetricValue]
Stage: TypeAlias = Literal["train", "val", "test"]
Logs: TypeAlias = Mapping[str, tuple[int, Any]]
"""The values logged in one step: the level and the value of each name."""

ROW_FIELDS: Final = ("iteration", "stage", "seconds")
"""The fields of a row besides its metrics; no metric may have such a name."""

REDUCERS: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "mean": mean_of,
    "sum": sum,
    "last": lambda values: values[-1],
}

STEPS_OF_AN_EPISODE: Final[Mapping[str, str]] = {"reward": "sum"}
"""How the steps of an episode are reduced by default: rewards are summed, all else is averaged."""


class LogLevel(IntEnum):
    """The importance of a logged value.

    A writer takes values at its own level or above. Values that no writer takes are dropped where they are logged.
    """

    DEBUG = 10
    """Large values for debugging, such as observations and raw actions."""
    PERIODIC = 20
    """Logged at every step; the default level."""
    INFO = 30
    """Logged a few times in each episode."""
    CRITICAL = 40
    """Always written."""


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """The length, reward and logged numbers of an episode that has ended."""

    length: int
    """Number of steps."""
    reward: float
    """Sum of the rewards of all steps."""
    logs: dict[str, float] = field(default_factory=dict[str, float])
    """One value for each number that was logged, as `MetricsAggregator` reduces the steps."""
    seed_index: int | None = None
    """The position of the episode's seed in the data set; None for an episode without a seed."""
    seed_number: int | None = None
    """The number of seeds that were taken before the episode's own."""
    env_id: int | None = None
    """Which of the vectorised environments ran it, from 0."""


@dataclass(frozen=True, slots=True)
class Row(ABC):
    """One row of a record, as a writer gets it.

    Rows of different kinds can be joined by `iteration` and `stage`.
    """

    fields: ClassVar[tuple[str, ...]]
    """The first names of the mapping that `flat` returns."""
    axis: ClassVar[str]
    """The name of the attribute that `number` returns."""

    iteration: int
    """The number of finished iterations. Train row 3 is the third step, validation row 3 measures the policy after it,
    and validation row 0 the policy before any step. Episodes and steps have the number of their stage."""
    stage: Stage

    @property
    def number(self) -> int:
        """The row's position on the axis of a curve: the iteration, the episode, or the step since the run began."""
        return getattr(self, self.axis)

    @abstractmethod
    def flat(self) -> dict[str, Any]:
        """Return the row as one mapping of `fields` and metrics, whose values JSON can hold."""

    @abstractmethod
    def numbers(self) -> dict[str, float]:
        """Return the metrics that are numbers, by names that tell stages and kinds of row apart.

        Such names are `reward`, `val/reward`, `episode/reward` and `val/episode/reward`.
        """

    def _named(self, values: Mapping[str, Any], kind: str = "") -> dict[str, float]:
        """Return the numbers among the values, with the stage (unless "train") and `kind` in front of their names."""
        prefix = kind if self.stage == "train" else f"{self.stage}/{kind}"
        return {prefix + name: value for name, value in values.items() if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class MetricsRow(Row):
    """The metrics of one stage."""

    fields: ClassVar[tuple[str, ...]] = ROW_FIELDS
    axis: ClassVar[str] = "iteration"

    seconds: float
    """Seconds that the loop has run so far, in all processes that worked on this run."""
    metrics: dict[str, MetricValue]

    def flat(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "stage": self.stage, "seconds": round(self.seconds, 3), **self.metrics}

    def numbers(self) -> dict[str, float]:
        return self._named(self.metrics)


@dataclass(frozen=True, slots=True)
class EpisodeRow(Row):
    """One episode that has ended."""

    fields: ClassVar[tuple[str, ...]] = ("iteration", "stage", "episode", "env_id", "seed_index", "length", "reward")
    axis: ClassVar[str] = "episode"

    episode: int
    """The episode's number in the order in which episodes began, from 1."""
    stats: EpisodeStats
    """The episode's length, reward and logs. In `flat`, a field comes before a log of its name."""

    def flat(self) -> dict[str, Any]:
        """Return the row as one mapping. An unknown `env_id` or `seed_index` is an empty string."""
        stats = self.stats
        indices: list[Any] = ["" if index is None else index for index in (stats.env_id, stats.seed_index)]
        values = (self.iteration, self.stage, self.episode, *indices, stats.length, stats.reward)
        return {**stats.logs, **dict(zip(self.fields, values, strict=True))}

    def numbers(self) -> dict[str, float]:
        stats = self.stats
        return self._named({**stats.logs, "length": stats.length, "reward": stats.reward}, "episode/")


@dataclass(frozen=True, slots=True)
class StepRow(Row):
    """One step of one environment."""

    fields: ClassVar[tuple[str, ...]] = ("iteration", "stage", "episode", "step", "env_id", "reward")
    axis: ClassVar[str] = "global_step"

    episode: int
    """The number of the step's episode, in the order in which episodes began, from 1."""
    step: int
    """The step's number within the episode, from 1."""
    env_id: int
    reward: float
    contents: dict[str, Any]
    """The values logged in the step, at the writer's level or above."""
    global_step: int
    """Steps since the run began, this one included."""

    def flat(self) -> dict[str, Any]:
        """Return the row as one mapping.

        Arrays become lists. Values other than numbers, strings and containers of them become their `repr`.
        """
        values = (self.iteration, self.stage, self.episode, self.step, self.env_id, self.reward)
        return {**_as_plain(self.contents), **dict(zip(self.fields, values, strict=True))}

    def numbers(self) -> dict[str, float]:
        return self._named({**_as_plain(self.contents), "reward": self.reward}, "step/")


RowKind: TypeAlias = Literal["stage", "episode", "step"]
ROW_KINDS: Final[Mapping[RowKind, type[Row]]] = {"stage": MetricsRow, "episode": EpisodeRow, "step": StepRow}


def _as_plain(value: Any) -> Any:
    """Return the value as JSON can hold it: arrays become lists, other objects their `repr`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _as_plain(part) for name, part in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain(part) for part in cast("Sequence[Any]", value)]
    if hasattr(value, "tolist"):  # arrays, NumPy scalars, tensors, series
        return _as_plain(value.tolist())
    return repr(value)


def monitored(metrics: Metrics, name: str, reader: str) -> float:
    """Return the metric `name` as a float.

    reader: what needs the metric, for the message.
    Raise ConfigError, with the nearest names, if the metric is missing or is a text.
    """
    value = metrics.get(name)
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        raise ConfigError(f"{reader} needs the metric {name!r}, which is the text {value!r} and no number")
    raise ConfigError(f"{reader} needs the metric {name!r}, which is not there{nearest(name, metrics)}")


def warn_of_misspelling(metrics: Metrics, name: str, reader: str) -> None:
    """Log a warning if `name` looks like a misspelt metric of validations, such as "val/rewrd".

    The first validation may be hours away, and usually has the metrics of a training stage.
    metrics: those of a training stage.
    reader: what needs the metric.
    """
    plain = name.removeprefix("val/")
    if plain != name and plain not in metrics and (like := _most_like(plain, metrics)):
        logger.warning("%s waits for the metric %r; did you mean 'val/%s'?", reader, name, like[0])


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: "; did you mean 'reward'? There are: ..."."""
    known = sorted(names)
    like = _most_like(name, known)
    meant = f"; did you mean {' or '.join(map(repr, like))}?" if like else "."
    return f"{meant} There are: {', '.join(known) or 'none'}"


def _most_like(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), n=2, cutoff=0.7)


def clean_metrics(metrics: object, *, source: str) -> dict[str, MetricValue]:
    """Return metrics as plain numbers and strings.

    NumPy scalars and tensors of one element become numbers; None becomes an empty mapping. Raise InvalidMetrics, which
    names `source` and the metric, for other values.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidMetrics(f"{source} returned {type(metrics).__name__}; return a mapping of metric names to numbers")
    cleaned: dict[str, MetricValue] = {}
    for name, value in cast("Mapping[object, Any]", metrics).items():
        if not isinstance(name, str) or name in ROW_FIELDS:
            raise InvalidMetrics(
                f"{source} returned a metric named {name!r}; names are strings other than {ROW_FIELDS}"
            )
        try:
            plain = value if isinstance(value, str) else as_number(value)
        except ValueError as error:
            raise InvalidMetrics(f"{source}: metric {name!r} {error}; a metric is a number or a string") from error
        cleaned[name] = int(plain) if isinstance(plain, bool) else plain
    return cleaned


def number(value: Any, name: str) -> float:
    """Return a number as a float. NumPy scalars and tensors without dimensions count as numbers.

    name: the metric's name, for the error's message.
    Raise InvalidMetrics for anything else.
    """
    if type(value) is float or type(value) is int:  # nearly always
        return float(value)
    try:
        return float(as_number(value))
    except ValueError as error:
        raise InvalidMetrics(
            f"metric {name!r} {error}; add_scalar takes numbers, add_string strings, add_array arrays"
        ) from error


class LogCollector:
    """Collects the values that are logged in one step. Call `reset` before the next step.

    A name that is logged twice in one step raises InvalidMetrics.
    min_loglevel: values whose `loglevel` is below this `LogLevel` are dropped without being checked.
    """

    def __init__(self, min_loglevel: int = LogLevel.PERIODIC) -> None:
        self.min_loglevel = LogLevel(min_loglevel)
        self._minimum = int(min_loglevel)
        self._logs: dict[str, tuple[int, Any]] = {}

    def add_scalar(self, name: str, value: Any, loglevel: int = LogLevel.PERIODIC) -> None:
        """Log a number, a NumPy scalar or a tensor without dimensions. Raise InvalidMetrics for anything else."""
        if loglevel >= self._minimum:
            self._add(name, number(value, name), loglevel)

    def add_string(self, name: str, value: str, loglevel: int = LogLevel.PERIODIC) -> None:
        """Log a string. Raise InvalidMetrics for any other value."""
        if loglevel >= self._minimum:
            if not isinstance(value, str):
                raise InvalidMetrics(f"{name!r} is a {type(value).__name__}; add_string takes strings")
            self._add(name, value, loglevel)

    def add_array(self, name: str, value: Any, loglevel: int = LogLevel.PERIODIC) -> None:
        """Log an array, a pandas table or anything else with a `shape`. The value is not copied.

        Raise InvalidMetrics for anything else.
        """
        if loglevel >= self._minimum:
            if not hasattr(value, "shape"):
                raise InvalidMetrics(f"{name!r} is a {type(value).__name__}; add_array takes arrays, add_any anything")
            self._add(name, value, loglevel)

    def add_any(self, name: str, value: Any, loglevel: int = LogLevel.PERIODIC) -> None:
        """Log any value. If the environment runs in another process, the value must be picklable.

        The value is not copied.
        """
        if loglevel >= self._minimum:
            self._add(name, value, loglevel)

    def _add(self, name: str, value: Any, loglevel: int) -> None:
        if name in self._logs:
            raise InvalidMetrics(f"metric {name!r} was logged twice in one step; use two names, or log their sum")
        self._logs[name] = (int(loglevel), value)

    def logs(self) -> dict[str, tuple[int, Any]]:
        """Return the values added since the last `reset`: the level and the value of each name."""
        return dict(self._logs)

    def reset(self) -> None:
        """Drop all values that were added."""
        self._logs.clear()


class MetricsAggregator:
    """Reduces the numbers of many steps to one for each name.

    A metric that some steps lack is reduced over the steps that have it.

    reducers: "mean", "sum" or "last" for each name; a name that is missing here is averaged. None sums `reward`, as
        over the steps of an episode. Give `{}` to average it too, as over the episodes of a stage.
    loglevel: values below this level are dropped.
    """

    def __init__(self, reducers: Mapping[str, str] | None = None, *, loglevel: int = LogLevel.PERIODIC) -> None:
        self._reducers = dict(STEPS_OF_AN_EPISODE if reducers is None else reducers)
        for name, reducer in self._reducers.items():
            if reducer not in REDUCERS:
                raise ConfigError(f"metric {name!r}: unknown reducer {reducer!r}; choose one of {', '.join(REDUCERS)}")
        self.loglevel = LogLevel(loglevel)
        self._values: dict[str, list[float]] = {}

    def add(self, logs: Mapping[str, Any]) -> None:
        """Add the values of one step: `LogCollector.logs`, or plain numbers by name.

        Skip values that are not numbers.
        """
        for name, value in logs.items():
            if isinstance(value, tuple):
                level, value = cast("tuple[int, Any]", value)
                if level < self.loglevel:
                    continue
            if isinstance(value, int | float):
                value = number(value, name)
            elif getattr(value, "ndim", 0) != 0:
                continue
            else:
                try:
                    value = float(as_number(value))
                except ValueError:
                    continue
            self._values.setdefault(name, []).append(value)

    def counts(self) -> dict[str, int]:
        return {name: len(values) for name, values in self._values.items()}

    def metrics(self) -> dict[str, float]:
        return {name: REDUCERS[self._reducers.get(name, "mean")](values) for name, values in self._values.items()}

    def clear(self) -> None:
        self._values.clear()
