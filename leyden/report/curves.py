"""The curves of a run: raw, smoothed, with the intervals of its validations; and whether its reward rose."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate

from leyden._lib.json import Json
from leyden._lib.numbers import mean_of
from leyden.statistics import Estimate, estimate, paired_difference
from leyden.store.base import LightningStore
from leyden.training import MetricsRow, Stage
from leyden.training.runs.recorded_runs import iteration_of
from leyden.types import AttemptedRollout

_MAX_POINTS = 300
_MAX_VALIDATED, _MAX_RESAMPLED = 5_000, 600
"""Rollouts of validations that are read, and tasks whose means are resampled for intervals, in half a second."""

Validations = Mapping[int, Mapping[str, Sequence[float]]]
"""The rewards of each task, by the iteration of the validation and by the task as text."""


def curve(name: str, rows: Sequence[MetricsRow], validations: Validations) -> Json:
    """Return the curve of a metric.

    validations: those whose mean rewards get an interval, the newest first, until it would take too long.
    """
    train, val = _points(name, rows, "train"), _points(name, rows, "val")
    intervals: dict[int, Estimate] = {}
    left = _MAX_RESAMPLED
    for iteration in sorted(validations, reverse=True):
        tasks = list(validations[iteration].values())
        left -= 0 if all(each in ([0.0], [1.0]) for each in tasks) else len(tasks)
        if left >= 0:
            intervals[iteration] = estimate(tasks)
    window = max(3, len(train) // 8 | 1)
    ends = {at: (found.low, found.high) for at, found in intervals.items()}
    return {
        "name": name,
        "train": _thinned(train),
        "smooth": _thinned(_smoothed(train, window)) if len(train) >= 2 * window else [],
        "window": window,
        "val": [[at, mean, *ends.get(at, (None, None))] for at, mean in val[-_MAX_POINTS:]],
        "points": len(train) + len(val),
        "not_finite": sum(isinstance(v := row.metrics.get(name), float) and not math.isfinite(v) for row in rows),
    }


def _points(name: str, rows: Sequence[MetricsRow], stage: Stage) -> list[tuple[int, float]]:
    found = [(row.iteration, row.metrics.get(name)) for row in rows if row.stage == stage]
    return [(n, float(value)) for n, value in found if isinstance(value, int | float) and math.isfinite(value)]


def _smoothed(points: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Return the centred moving average; near an end, over as many points on each side as there are on the shorter."""
    sums = [0.0, *accumulate(value for _, value in points)]
    found: list[tuple[int, float]] = []
    for place, (iteration, _) in enumerate(points):
        half = min(window // 2, place, len(points) - 1 - place)
        found.append((iteration, (sums[place + half + 1] - sums[place - half]) / (2 * half + 1)))
    return [(iteration, value) for iteration, value in found if math.isfinite(value)]


def _thinned(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Return the points; of many, the lowest and the highest of each stretch, so that no spike is lost."""
    n = _MAX_POINTS // 2
    if len(points) > 2 * n:
        stretches = [points[place * len(points) // n : (place + 1) * len(points) // n] for place in range(n)]
        ends = [{min(each, key=lambda at: at[1]), max(each, key=lambda at: at[1])} for each in stretches]
        points = [point for each in ends for point in sorted(each)]
    return [list(point) for point in points]


async def read_validations(store: LightningStore, run_id: str | None, rows: Sequence[MetricsRow]) -> Validations:
    """Return the rewards of the validations by task, of those that the store has whole: as many rollouts as the run
    recorded, with the recorded mean. A run with too many to read has none.
    """
    recorded = {row.iteration: row.metrics for row in rows if row.stage == "val"}
    found = await store.query_rollouts(mode_in=["val"], run_id=run_id, status_in=["succeeded"], limit=_MAX_VALIDATED)
    by_iteration: dict[int, dict[str, list[float]]] = {}
    for each in found if recorded and found.total == len(found) else ():
        reward = each.attempt.reward if isinstance(each, AttemptedRollout) else None
        if (at := iteration_of(each)) is not None and reward is not None:
            task = json.dumps(each.input, sort_keys=True, default=str)
            by_iteration.setdefault(at, {}).setdefault(task, []).append(reward)
    whole: dict[int, dict[str, list[float]]] = {}
    for at, tasks in by_iteration.items():
        rewards, row = [reward for each in tasks.values() for reward in each], recorded.get(at, {})
        mean = row.get("reward")
        same_mean = isinstance(mean, int | float) and math.isclose(mean, mean_of(rewards), rel_tol=1e-6, abs_tol=1e-9)
        if same_mean and row.get("rollouts") == len(rewards):
            whole[at] = tasks
    return whole


def learned(rows: Sequence[MetricsRow], validations: Validations) -> Json:
    """Return the first, the last and the best reward, of the validations if there are any, and the difference of the
    last to the first by task, or the reason if there is none.
    """
    basis: Stage = "val" if _points("reward", rows, "val") else "train"
    points = _points("reward", rows, basis)
    data: Json = {"basis": basis if points else None, "difference": None, "reason": None}
    if not points:
        return {**data, "first": None, "last": None, "best": None, "reason": "no reward was recorded"}
    first, last = points[0], points[-1]
    before, after = validations.get(first[0]), validations.get(last[0])
    if len(points) < 2:
        data["reason"] = "it was measured once"
    elif basis == "train":
        data["reason"] = "these are rewards of training, and there was no validation"
    elif before is None or after is None:
        data["reason"] = "not all rollouts of the first and the last validation are known"
    elif before.keys() != after.keys() or len(before) > 2 * _MAX_RESAMPLED:
        data["reason"] = "the first and the last validation ran other tasks, or too many"
    else:
        pairs = [(mean_of(before[task]), mean_of(after[task])) for task in before]
        data["difference"] = {**asdict(paired_difference(*zip(*pairs, strict=True))), "tasks": len(pairs)}
    return {**data, "first": first, "last": last, "best": max(points, key=lambda point: point[1])}
