"""`beliefs`: estimate how good each candidate is from the rewards of all candidates.

A hierarchical Gaussian model, fitted by empirical Bayes (expectation maximisation):

    reward of a candidate on a task = value of the candidate + effect of the task + noise
    value of a candidate = value of its parent + gain of the edit

Because tasks have effects, hard tasks do not count against the candidate that ran them. The gains
are normally distributed around a common mean. So the estimate of a candidate with few rewards is
close to its parent's value plus the mean gain of edits so far, and luck has little influence.

Pure functions of numbers, which know no prompts, no models and no optimiser.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Task = TypeVar("Task", bound=Hashable)

_ROUNDS = 20
"""Rounds of expectation maximisation. The order of candidates is stable after about ten."""
_PRIOR_COUNT = 2.0
"""The weight, in observations, of the first guess of each variance, and of the guess that the mean
gain is 0."""
_PRIOR_SHARE = 0.25
"""The first guess of the variance of gains, and of that of tasks' effects, as a share of the
variance of all rewards."""
_LEAST_VARIANCE = 1e-6
"""The variance of rewards is taken to be at least this, so that it can be divided by."""


@dataclass(frozen=True, slots=True)
class Belief:
    """The posterior distribution of a candidate's value: a normal distribution."""

    mean: float
    variance: float


def beliefs(parents: Sequence[int | None], rewards: Sequence[Mapping[Task, float]]) -> list[Belief]:
    """Return the posterior mean and variance of each candidate's value, by the model of this
    module: reward = value + effect of the task + noise, and value = parent's value + gain.

    The variances of noise, effects and gains, and the mean gain, are estimated from the data. Each
    round first updates the values and the effects, then these four numbers.
    parents: the index of each candidate's parent, which is smaller than its own; None: no parent.
    rewards: the rewards of each candidate, by task. At least one candidate must have one.
    """
    seen = [reward for each in rewards for reward in each.values()]
    total = max(statistics.pvariance(seen), _LEAST_VARIANCE)
    guess = _PRIOR_SHARE * total
    noise, spread, task_spread, gain = total, guess, guess, 0.0
    means, variances = [statistics.fmean(seen)] * len(parents), [total] * len(parents)
    runs: dict[Task, list[tuple[int, float]]] = {}
    children: list[list[int]] = [[] for _ in parents]
    measured = [place for place, each in enumerate(rewards) if each]
    for place in measured:
        for task, reward in rewards[place].items():
            runs.setdefault(task, []).append((place, reward))
        if (parent := parents[place]) is not None:
            children[parent].append(place)
    effects = dict.fromkeys(runs, 0.0)
    for _ in range(_ROUNDS):
        for place, parent in enumerate(parents):
            own = [reward - effects[task] for task, reward in rewards[place].items()]
            related = [means[child] - gain for child in children[place]]
            related += [] if parent is None else [means[parent] + gain]
            weight = len(own) / noise + len(related) / spread
            if weight:
                means[place] = (sum(own) / noise + sum(related) / spread) / weight
                variances[place] = 1 / weight
        for task, found in runs.items():
            effects[task] = sum(reward - means[place] for place, reward in found) / (len(found) + noise / task_spread)
        errors = [
            (reward - means[place] - effects[task]) ** 2 + variances[place]
            for task, found in runs.items()
            for place, reward in found
        ]
        squares = [effects[task] ** 2 + noise / (len(found) + noise / task_spread) for task, found in runs.items()]
        edits = [(means[each] - means[p], variances[each]) for each in measured if (p := parents[each]) is not None]
        noise = _shrunk(total, errors)
        task_spread = _shrunk(guess, squares)
        gain = sum(step for step, _ in edits) / (_PRIOR_COUNT + len(edits))
        spread = _shrunk(guess, [(step - gain) ** 2 + variance for step, variance in edits])
    return [Belief(mean, variance) for mean, variance in zip(means, variances, strict=True)]


def _shrunk(guess: float, squares: Sequence[float]) -> float:
    """Return a variance: the mean of the squares, in which the guess counts as `_PRIOR_COUNT` more
    of them.
    """
    return (_PRIOR_COUNT * guess + sum(squares)) / (_PRIOR_COUNT + len(squares))
