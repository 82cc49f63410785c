"""`expected_rewards`: estimate the mean reward of each candidate on new tasks from the rewards of all candidates.

A hierarchical logistic model, fitted by empirical Bayes (expectation maximisation):

    mean reward of a candidate on a task = logistic(value of the candidate + effect of the task)
    value of a candidate = value of its parent + gain of the edit

Because tasks have effects, hard tasks do not count against the candidate that ran them. The gains are normally
distributed around a common mean. So the estimate of a candidate with few rewards is close to its parent's value plus
the mean gain of edits so far, and luck has little influence. The logistic function is there because rewards have
limits: near the highest reward, edits gain less, and rewards vary less.

Pure functions of numbers, which know no prompts, no models and no optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Task = TypeVar("Task", bound=Hashable)

_ROUNDS = 30
"""Rounds of expectation maximisation. More of them change estimates by less than 0.001."""
_PRIOR_COUNT = 2.0
"""The weight, in observations, of the first guess of each variance, and of the guess that the mean gain is 0."""
_GUESS = 1.0
"""The first guess of the variance of gains, and of that of tasks' effects. With it, a typical edit moves a mean reward
of one half to 0.27 or 0.73."""
_ROOT_VARIANCE = math.pi**2 / 3
"""The prior variance of the value of a candidate without a parent: that of a value whose mean reward may be anything
within the range, with equal probability."""
_LONGEST_STEP = 1.0
"""An update changes a value or an effect by at most this, because Newton's method diverges if it starts far from the
solution."""
_LEAST_NOISE = 0.01
"""The noise is taken to be at least this, so that it can be divided by."""


def expected_rewards(
    parents: Sequence[int | None], rewards: Sequence[Mapping[Task, float]], reward_range: tuple[float, float]
) -> list[float]:
    """Return the expected mean reward of each candidate on tasks like those of `rewards`, by the model of this module.

    The variances of gains and effects, the mean gain, and how much rewards vary compared with rewards that are either
    the lowest or the highest one, are estimated from the data. Each round first updates the values and the effects by a
    step of Newton's method each, then these numbers.
    parents: the index of each candidate's parent, which is smaller than its own; None: no parent.
    rewards: the rewards of each candidate, by task. At least one candidate must have one.
    reward_range: all rewards are within it.
    """
    low, high = reward_range
    runs: dict[Task, list[tuple[int, float]]] = {}
    own: list[list[tuple[Task, float]]] = [[] for _ in parents]
    children: list[list[int]] = [[] for _ in parents]
    for place, parent in enumerate(parents):
        for task, reward in rewards[place].items():
            share = (reward / 2 - low / 2) / (high / 2 - low / 2)  # halves, because high - low may be infinite
            own[place].append((task, share))
            runs.setdefault(task, []).append((place, share))
        if parent is not None and own[place]:
            children[parent].append(place)
    between = sum([share * (1 - share) for found in own for _, share in found])
    values, unsure = [0.0] * len(parents), [_ROOT_VARIANCE] * len(parents)
    effects, effects_unsure = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, _GUESS)
    spread, task_spread, gain, noise = _GUESS, _GUESS, 0.0, 1.0
    for _ in range(_ROUNDS):
        for place, parent in enumerate(parents):
            slope, weight = _evidence([(values[place] + effects[task], share) for task, share in own[place]], noise)
            related = [values[child] - gain for child in children[place]]
            related += [] if parent is None else [values[parent] + gain]
            slope += sum([each - values[place] for each in related]) / spread
            weight += len(related) / spread
            if parent is None:
                slope, weight = slope - values[place] / _ROOT_VARIANCE, weight + 1 / _ROOT_VARIANCE
            values[place] += _step(slope, weight)
            unsure[place] = 1 / weight
        for task, found in runs.items():
            slope, weight = _evidence([(values[place] + effects[task], share) for place, share in found], noise)
            weight += 1 / task_spread
            effects[task] += _step(slope - effects[task] / task_spread, weight)
            effects_unsure[task] = 1 / weight
        edits = [(each, parent) for each, parent in enumerate(parents) if parent is not None and own[each]]
        gains = [values[each] - values[parent] for each, parent in edits]
        gain = sum(gains) / (_PRIOR_COUNT + len(gains))
        spread = _shrunk(
            _GUESS,
            [
                (each - gain) ** 2 + unsure[child] + unsure[parent]
                for each, (child, parent) in zip(gains, edits, strict=True)
            ],
        )
        task_spread = _shrunk(_GUESS, [effects[task] ** 2 + effects_unsure[task] for task in runs])
        expected = sum([_chance(values[place] + effects[task]) for task, found in runs.items() for place, _ in found])
        # Of rewards that are 0 or 1 alone, none is between, so that the noise is exactly 1.
        noise = max(_LEAST_NOISE, 1 - between / (expected + _PRIOR_COUNT / 4))

    def mean(value: float, variance: float) -> float:
        means = [_mean_logistic(value + effect, variance + effects_unsure[task]) for task, effect in effects.items()]
        share = sum(means) / len(means)
        return low * (1 - share) + high * share

    return [mean(value, variance) for value, variance in zip(values, unsure, strict=True)]


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def _mean_logistic(mean: float, variance: float) -> float:
    return _logistic(mean / math.sqrt(1 + math.pi / 8 * variance))


def _evidence(found: Sequence[tuple[float, float]], noise: float) -> tuple[float, float]:
    """Return the first derivative of the log-likelihood by a value, and the negative second one.

    found: for each reward, the value plus the task's effect, and the reward on a scale from 0 to 1.
    noise: how much rewards vary compared with rewards of 0 or 1 alone.
    """
    means = [_logistic(value) for value, _ in found]
    slope = sum([share - mean for mean, (_, share) in zip(means, found, strict=True)])
    return slope / noise, sum([mean * (1 - mean) for mean in means]) / noise


def _step(slope: float, weight: float) -> float:
    return max(-_LONGEST_STEP, min(_LONGEST_STEP, slope / weight))


def _chance(value: float) -> float:
    mean = _logistic(value)
    return mean * (1 - mean)


def _shrunk(guess: float, values: Sequence[float]) -> float:
    return (_PRIOR_COUNT * guess + sum(values)) / (_PRIOR_COUNT + len(values))
