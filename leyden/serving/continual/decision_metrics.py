"""The metrics that judge a canary, as numbers in [0, 1], where more is better.

A `Metric` defines the range of its values, which direction is better, and what a promotion requires of it. The module
knows neither requests nor statistical tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from leyden._lib.options import check_choice, check_number
from leyden.errors import ConfigError
from leyden.statistics import RankHistory, observe_rank


@dataclass(frozen=True, slots=True)
class Bounded:
    """The scale of a metric with a known range, such as rewards, or 0 and 1 for failures. The test compares the means
    of both arms.

    low, high: the range. A value outside of it counts as the nearer end.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_number("low", self.low)
        check_number("high", self.high, above=self.low)


@dataclass(frozen=True, slots=True)
class Exceeds:
    """The scale of a metric without an upper bound that has a limit, such as a latency objective. The test compares the
    shares of requests above the limit in both arms.

    limit: values above it exceed it.
    """

    limit: float

    def __post_init__(self) -> None:
        check_number("limit", self.limit)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The scale of a metric without an upper bound and without a limit, such as cost. The test compares the mean ranks
    of both arms' values among all earlier values.
    """


Scale: TypeAlias = Bounded | Exceeds | Ranked
"""How the values of a metric become numbers in [0, 1]."""
Requirement: TypeAlias = Literal["better", "not_worse"]
"""The requirement of a promotion on a metric: an improvement, or no worsening."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One guarded metric. Evidence that it is worse in the canary counts towards a rollback.

    name: the key of its values in `RequestOutcome.values`.
    better: the direction of improvement.
    scale: how values become numbers in [0, 1].
    promotion: what a promotion has to prove. `better`: the mean has improved. `not_worse`: it has not worsened by
        `tolerance` or more. None: nothing; the metric can only cause a rollback.
    tolerance: how much worse `not_worse` allows the canary to be, in (0, 1): a part of the range, a share of the
        requests (`Exceeds`), or a part of the ranks.
    weight: the part of the rollback error that this metric receives, relative to the other metrics. A metric with twice
        the weight of another one needs half as much evidence.
    """

    name: str
    better: Literal["higher", "lower"] = "higher"
    scale: Scale = field(default_factory=Bounded)
    promotion: Requirement | None = None
    tolerance: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_choice("better", self.better, ("higher", "lower"))
        check_number("weight", self.weight, above=0)
        if self.promotion is not None:
            check_choice("promotion", self.promotion, ("better", "not_worse"))
        if self.promotion == "not_worse":
            if self.tolerance is None:
                raise ConfigError(
                    f"metric {self.name!r} with promotion='not_worse' needs tolerance=: how much worse still counts as equal"
                )
            check_number("tolerance", self.tolerance, above=0)
            if self.tolerance >= 1:
                raise ConfigError(f"tolerance is {self.tolerance!r}; the whole scale is 1, so it must be below 1")
        elif self.tolerance is not None:
            raise ConfigError(f"metric {self.name!r} has a tolerance, which only promotion='not_worse' uses")

    @property
    def margin(self) -> float:
        """The margin of the null hypothesis that a promotion has to reject: minus the tolerance; 0 for `better`."""
        return -(self.tolerance or 0.0)

    def scaled(self, value: float, ranks: RankHistory) -> tuple[float, RankHistory]:
        """Return the value scaled to [0, 1], where larger is better, and the history of ranks with it. Raise
        ConfigError for NaN.

        ranks: the history of the metric's values so far, which only `Ranked` uses.
        """
        if value != value:  # NaN
            raise ConfigError(f"the value of metric {self.name!r} is NaN; leave a missing value out instead")
        match self.scale:
            case Bounded(low, high):
                number = (min(max(value, low), high) - low) / (high - low)
            case Exceeds(limit):
                number = float(value > limit)
            case Ranked():
                number, ranks = observe_rank(ranks, value)
        return (number if self.better == "higher" else 1 - number), ranks


REWARD = Metric("reward", promotion="better", weight=3.0)
"""Rewards in [0, 1]; a promotion requires an improvement. Together with `FAILURE`, `LATENCY` and `COST` it has half of
the weight."""
FAILURE = Metric("failure", better="lower")
"""1 for a failed request, else 0."""
LATENCY = Metric("latency", better="lower", scale=Ranked())
"""Seconds of a request."""
COST = Metric("cost", better="lower", scale=Ranked())
"""Cost of a request, in any unit."""


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Raise ConfigError unless names differ and at least one metric is required for a promotion."""
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise ConfigError(f"two metrics have the same name: {', '.join(names)}")
    if not any(metric.promotion for metric in metrics):
        raise ConfigError(
            "no metric has promotion='better' or 'not_worse', so a canary could never be promoted; give REWARD, for example"
        )
