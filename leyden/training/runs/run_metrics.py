"""Metrics of a whole run, computed from its rows: its rewards, counts and newest values.

The summary, `leyden runs` and the curve use them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from leyden.training import MetricsRow, MetricValue


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """The mean rewards of a stage over the run. Rows without a finite reward are left out."""

    first: float
    last: float
    best: float
    best_iteration: int
    values: tuple[float, ...]
    """The mean reward of each row, in order of iterations."""
    iterations: tuple[int, ...]
    """The iteration of each value."""


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The rewards and counts of a run so far."""

    reward: RewardMetrics | None = None
    """Rewards of the training stages, or of the validations if no training stage has a reward; None
    if neither has one."""
    val_reward: RewardMetrics | None = None
    """Rewards of the validations; None if no validation reported a reward."""
    iterations: int = 0
    """Finished training iterations."""
    seconds: float = 0.0
    """Seconds that the loop had run when the last row was written, without the pauses before resumes."""
    rollouts: int = 0
    """The sum of `rollouts` over all rows; rows without that metric add nothing."""
    failed: int = 0
    """The sum of `failed` over all rows."""
    reflection_calls: int = 0
    """How often the algorithm asked a reflection model. These calls are no rollouts."""
    metrics: dict[str, MetricValue] = field(default_factory=dict[str, MetricValue])
    """The metrics of the last row."""


def in_order(rows: Iterable[MetricsRow]) -> list[MetricsRow]:
    """Return the rows in the order of the run.

    Rows of one stage and iteration become one, in which a later metric replaces an earlier one of its name.
    """
    joined: dict[tuple[int, str], MetricsRow] = {}
    for row in rows:
        before = joined.get((row.iteration, row.stage))
        joined[row.iteration, row.stage] = (
            row if before is None else replace(row, metrics={**before.metrics, **row.metrics})
        )
    return sorted(joined.values(), key=lambda row: (row.iteration, row.stage != "train"))


def metrics_of(rows: Sequence[MetricsRow]) -> RunMetrics:
    rows = in_order(rows)
    if not rows:
        return RunMetrics()
    train = _rewards(row for row in rows if row.stage == "train")
    validation = _rewards(row for row in rows if row.stage == "val")
    return RunMetrics(
        reward=train or validation,
        val_reward=validation,
        iterations=max((row.iteration for row in rows if row.stage == "train"), default=0),
        seconds=max(row.seconds for row in rows),
        rollouts=_total(rows, "rollouts"),
        failed=_total(rows, "failed"),
        reflection_calls=_total(rows, "reflection_calls"),
        metrics=rows[-1].metrics,
    )


def _rewards(rows: Iterable[MetricsRow]) -> RewardMetrics | None:
    found = [(row.iteration, value) for row in rows if (value := _finite(row.metrics.get("reward"))) is not None]
    if not found:
        return None
    iterations, values = zip(*found, strict=True)
    best = max(values)
    return RewardMetrics(values[0], values[-1], best, iterations[values.index(best)], values, iterations)


def _total(rows: Sequence[MetricsRow], name: str) -> int:
    return int(sum(_finite(row.metrics.get(name)) or 0 for row in rows))


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
