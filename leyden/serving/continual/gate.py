"""The offline check of a candidate: production and candidate run the same tasks, and the differences must stay within
limits.

`check` is a pure function of a `Measurement`. This module knows no store; `jobs` measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden._lib.options import check_flag, check_number
from leyden.algorithm.prompts.comparison import Rewards, compare

Amount: TypeAlias = Literal["seconds", "cost"]


class TaskOutcome(BaseModel):
    """The result of one run of one task with one version."""

    task: int
    """The index of the task."""
    reward: float | None = None
    """The final reward; None if the agent gave none."""
    failed: bool = False
    seconds: float | None = None
    """The duration of the run; None if it has not ended."""
    cost: float | None = None
    """The cost of its model calls; None if it was not recorded."""


class Measurement(BaseModel):
    """The outcomes of two versions on the same tasks, which both have run equally often."""

    production: list[TaskOutcome]
    candidate: list[TaskOutcome]


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Requirements that a candidate must meet on held-out tasks before any user gets it.

    The canary proves that a candidate is better; the gate refuses one that is clearly not worth trying.

    tasks: the tasks to measure on; None: the held-out inputs of recorded requests (`DataSettings.held_out`).
    n_tasks: the most tasks to measure on.
    min_tasks: with fewer tasks no cycle begins, because its candidate could not be checked.
    replicas: how often each version runs each task.
    min_gain: the least difference of the mean rewards, paired by task. A failed run counts as 0. None: rewards are not
        compared, for agents that give none.
    sure: whether the difference must be proven on these tasks (95 % interval above 0, and a sign test).
    max_more_failures: how much higher the share of failed runs may be.
    max_slowdown, max_cost_rise: the largest ratio of the mean durations and of the mean costs, over the tasks that both
        versions have done; None: no limit. A slowdown counts only if it is proven, as with `sure`, because a slow
        moment of the machine is no slowdown. A cost that was not recorded is not compared.
    """

    tasks: Sequence[Any] | None = None
    n_tasks: int = 50
    min_tasks: int = 5
    replicas: int = 1
    min_gain: float | None = 0.0
    sure: bool = False
    max_more_failures: float = 0.02
    max_slowdown: float | None = 1.5
    max_cost_rise: float | None = 1.5

    def __post_init__(self) -> None:
        for name in ("n_tasks", "min_tasks", "replicas"):
            check_number(name, getattr(self, name), at_least=1, whole=True)
        check_number("min_gain", self.min_gain, or_none="rewards are not compared")
        check_flag("sure", self.sure)
        check_number("max_more_failures", self.max_more_failures, at_least=0, at_most=1)
        for name in ("max_slowdown", "max_cost_rise"):
            check_number(name, getattr(self, name), above=0, or_none="no limit")


@dataclass(frozen=True, slots=True)
class GateReport:
    """Whether a candidate has passed the check, and the measured numbers."""

    passed: bool
    reason: str
    """One sentence for the audit log."""
    numbers: dict[str, float]
    """The measured numbers by name, for the release's details."""


def check(settings: GateSettings, measured: Measurement) -> GateReport:
    """Return whether a candidate passes, and why: the first missed limit, or the difference of the rewards."""
    old, new = measured.production, measured.candidate
    tasks = len({outcome.task for outcome in new})
    numbers: dict[str, float] = {"tasks": tasks}
    faults: list[str] = []
    if tasks < settings.min_tasks:
        faults.append(f"{tasks} tasks are too few to check it on; at least {settings.min_tasks} are needed")
    before, after = _failures(old), _failures(new)
    numbers |= {"failures_before": before, "failures": after}
    if after - before > settings.max_more_failures:
        faults.append(f"{after:.0%} of its tasks fail, instead of {before:.0%}")
    gained = "its rewards were not compared"
    if settings.min_gain is not None:
        rewards_before, rewards_after = _rewards(old), _rewards(new)
        if rewards_before.keys() & rewards_after.keys():
            difference = compare(rewards_before, rewards_after)
            numbers["gain"] = difference.difference.mean
            gained = f"the reward on held-out tasks differs by {difference}"
            if numbers["gain"] < settings.min_gain:
                faults.append(f"{gained}, and at least {settings.min_gain:g} is required")
            elif settings.sure and not difference.is_sure:
                faults.append(f"{gained}, which may be chance; measure more tasks (n_tasks), or give sure=False")
        else:
            gained = ""
            faults.append("no task has a reward for both versions; let the agent return one, or give min_gain=None")
    limits: dict[Amount, float | None] = {"seconds": settings.max_slowdown, "cost": settings.max_cost_rise}
    for amount, limit in limits.items():
        before_by_task, after_by_task = _amounts(old, amount), _amounts(new, amount)
        both = sorted(before_by_task.keys() & after_by_task.keys())
        before_by_task, after_by_task = (
            {task: each[task] for task in both} for each in (before_by_task, after_by_task)
        )
        if sum(before_by_task.values()) <= 0:
            continue
        ratio = numbers[f"{amount}_ratio"] = sum(after_by_task.values()) / sum(before_by_task.values())
        if limit is None or ratio <= limit:
            continue
        at_limit = {task: limit * value for task, value in before_by_task.items()}
        if amount == "cost" or compare(at_limit, after_by_task).is_sure:  # costs have no noise, durations do
            name = "duration" if amount == "seconds" else "cost"
            faults.append(f"its mean {name} is {figure(ratio, 3)} times as large, and {limit:g} is the limit")
    finite = {name: number for name, number in numbers.items() if math.isfinite(number)}  # the store takes no other
    return GateReport(not faults, faults[0] if faults else gained, finite)


def _rewards(outcomes: Sequence[TaskOutcome]) -> Rewards:
    """Return the mean reward by task; a failure counts 0."""
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        reward = 0.0 if outcome.failed else outcome.reward
        if reward is not None:
            found.setdefault(outcome.task, []).append(reward)
    return {task: mean_of(rewards) for task, rewards in found.items()}


def _failures(outcomes: Sequence[TaskOutcome]) -> float:
    return sum(outcome.failed for outcome in outcomes) / max(1, len(outcomes))


def _amounts(outcomes: Sequence[TaskOutcome], amount: Amount) -> dict[int, float]:
    """Return the mean amount by task, over the runs that did not fail and have the amount."""
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        value = getattr(outcome, amount)
        if value is not None and not outcome.failed:
            found.setdefault(outcome.task, []).append(value)
    return {task: mean_of(values) for task, values in found.items()}
