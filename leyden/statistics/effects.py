"""`EffectModel`: estimate what each edit of a candidate adds to its reward, from the rewards of all candidates.

It is a hierarchical model, fitted by empirical Bayes (expectation maximisation):

    value of a candidate on a task = base + effects of its edits + effect of the task

The value is the mean reward itself in the linear model. In the logistic model it is the logit of the mean reward, which
has limits: near a limit, edits change less, and rewards vary less. An edit that several candidates have is measured by
the rewards of all of them. The effects of edits are normally distributed around a common mean, so an edit without
rewards is believed to be like the others, and luck on few tasks counts for little. The effects of tasks make the
comparisons paired: hard tasks do not count against the candidate that ran them.

A pure function of numbers, which knows no prompts, no language models and no optimiser.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from leyden._lib.numbers import mean_of

Task = TypeVar("Task", bound=Hashable)

_ROUNDS = 20
"""The number of rounds of expectation maximisation. More of them change expected rewards by less than 0.002."""
_DRAW_SWEEPS = 10
"""The number of sweeps over all edits for a draw, which starts at the posterior mean."""
_PRIOR_COUNT = 2.0
"""The number of observations for which the first guess of a variance, or of the mean effect, counts when it is averaged
with the data."""
_BOLDNESS = 0.5
"""The deviation of a draw from the posterior mean, for edits with rewards, as a fraction of what the posterior
distribution says. Among many edits, some useless one always has a lucky full draw."""
_OPTIMISM = 0.5
"""The first guess of the mean effect in the linear model, in standard deviations of the effects. It is positive, so
that new edits are tried."""
_PRIOR_SHARE = 0.25
"""The first guess of the variance of the edits' effects, and of the tasks', as a fraction of the variance of all
rewards. With limits, a typical edit then moves a mean reward of one half to 0.27 or 0.73."""
_BASE_VARIANCE = math.pi**2 / 3
"""The prior variance of the base with limits: every mean reward within them is equally probable."""
_MAX_STEP = 1.0
"""With limits, an update changes an effect by at most this, because Newton's method diverges far from the solution."""
_MAX_REWARD = 1e100
"""Rewards of this size are divided by the largest one, because their squares are no floats."""
_MIN_VARIANCE = 1e-6
"""Takes the place of smaller variances, by which the model would divide: of equal rewards, and of candidates without
edits."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The value of a candidate without edits, and what each edit adds to it."""

    base: float
    edits: Sequence[float]
    """The effect of each edit, by the edit's number."""

    def value(self, edits: Sequence[int]) -> float:
        """Return the value of a candidate with the edits of these numbers."""
        return self.base + sum([self.edits[edit] for edit in edits])


class EffectModel:
    """The posterior distribution of the effects of all edits, given the rewards.

    edits: the numbers of the edits of each candidate.
    rewards: the rewards of each candidate, by task. At least one candidate has a reward.
    n_edits: the number of all edits.
    limits: the lowest and the highest possible reward, for the logistic model; None: the linear one.
    """

    def __init__(
        self,
        edits: Sequence[Sequence[int]],
        rewards: Sequence[Mapping[Task, float]],
        n_edits: int,
        *,
        limits: tuple[float, float] | None = None,
    ) -> None:
        measured = [index for index, found in enumerate(rewards) if found]
        largest = max(abs(reward) for found in rewards for reward in found.values())
        self._low, self._high = limits or (0.0, 1.0 if largest < _MAX_REWARD else largest)
        half = self._high / 2 - self._low / 2  # high - low may be infinite
        task_indices: dict[Task, int] = {}
        rows, at, shares = list[int](), list[int](), list[float]()
        for row, index in enumerate(measured):
            for task, reward in rewards[index].items():
                rows.append(row)
                at.append(task_indices.setdefault(task, len(task_indices)))
                shares.append((reward / 2 - self._low / 2) / half)
        self._edits, self._is_logistic, self._runs = edits, limits is not None, list(zip(rows, at, shares, strict=True))
        if limits is None:
            variance, base = max(statistics.pvariance(shares), _MIN_VARIANCE), mean_of(shares)
            guess, self._base_precision, self._max_step = _PRIOR_SHARE * variance, 0.0, math.inf
            optimism = _OPTIMISM * math.sqrt(guess)
        else:  # a reward that is 0 or 1 has the variance 1 for each unit of slope, and at most 4 for a mean of one half
            variance, base, optimism = 1.0, 0.0, 0.0
            guess, self._base_precision, self._max_step = 4 * _PRIOR_SHARE, 1 / _BASE_VARIANCE, _MAX_STEP
        self.deviation = math.sqrt(variance) * self._high
        """The standard deviation of all rewards, in the linear model."""
        own = [edits[index] for index in measured]
        self._having: list[list[int]] = [[] for _ in range(n_edits)]
        for row, each in enumerate(own):
            for edit in each:
                self._having[edit].append(row)
        task_spread = guess
        self._noise, self._spread, self._mean = variance, guess, optimism
        effects, unsure = Effects(base, [0.0] * n_edits), list[float]()
        tasks: list[float] = [0.0] * len(task_indices)
        self._tasks: list[tuple[float, float]] = []
        """The effect of each task, and its variance."""
        for _ in range(_ROUNDS):
            # The edits, by one sweep of Newton's method.
            values = [effects.value(each) for each in own]
            residuals, self._weights = [0.0] * len(own), [0.0] * len(own)
            for row, error, slope in zip(rows, *self._errors(values, tasks), strict=True):
                residuals[row] += error
                self._weights[row] += slope
            self._measured = [
                (edit, having, sum([self._weights[row] for row in having]))
                for edit, having in enumerate(self._having)
                if having
            ]
            effects, self._residuals = self._solve(effects, residuals, [self._mean] * n_edits, sweeps=1)
            values = [effects.value(each) for each in own]
            self._variances = [self._spread] * n_edits
            for edit, _, weight in self._measured:
                self._variances[edit] = 1 / (weight / self._noise + 1 / self._spread)
            unsure = [
                1 / (weight / self._noise + 1 / self._prior_variance(each))
                for weight, each in zip(self._weights, own, strict=True)
            ]
            # The tasks, by one step of Newton's method.
            slopes, precisions = [-effect / task_spread for effect in tasks], [1 / task_spread] * len(tasks)
            for task, error, slope in zip(at, *self._errors(values, tasks), strict=True):
                slopes[task] += error / self._noise
                precisions[task] += slope / self._noise
            steps = map(self._step, slopes, precisions)
            tasks = [effect + step for effect, step in zip(tasks, steps, strict=True)]
            self._tasks = [(effect, 1 / precision) for effect, precision in zip(tasks, precisions, strict=True)]
            # The variances and the mean effect, by the moments of what was found.
            found = list(zip(rows, *self._errors(values, tasks), strict=True))
            squares = sum([error * error + slope * slope * unsure[row] for row, error, slope in found])
            weight = sum([slope for _, _, slope in found])
            self._noise = (_PRIOR_COUNT * variance + squares) / (_PRIOR_COUNT + weight)
            task_spread = _shrunk(guess, [effect * effect + each for effect, each in self._tasks])
            self._mean = _shrunk(optimism, [effects.edits[edit] for edit, _, _ in self._measured])
            self._spread = _shrunk(
                guess,
                [(effects.edits[edit] - self._mean) ** 2 + self._variances[edit] for edit, _, _ in self._measured],
            )
        self._effects, self._unsure = effects, dict(zip(measured, unsure, strict=True))
        self.expected = self._in_rewards(effects)
        """The posterior mean of the effects, in the linear model."""

    def expected_rewards(self) -> list[float]:
        """Return the expected mean reward of each candidate on tasks like those of the rewards."""
        found = list[float]()
        for index, edits in enumerate(self._edits):
            share = self._effects.value(edits)
            if self._is_logistic:
                variance = self._unsure.get(index, self._prior_variance(edits))
                share = mean_of(
                    _logistic((share + effect) / math.sqrt(1 + math.pi / 8 * (variance + unsure)))
                    for effect, unsure in self._tasks
                )
            found.append(self._low * (1 - share) + self._high * share)
        return found

    def draw(self, rng: random.Random) -> Effects:
        """Return one draw of the linear model: the posterior mean after normal noise was added to the rewards and to
        the prior mean of each edit. It is a draw from the posterior distribution for edits without rewards, and closer
        to the mean for the others.
        """
        noise, spread = _BOLDNESS * math.sqrt(self._noise), math.sqrt(self._spread)
        residuals = [
            residual + noise * math.sqrt(weight) * rng.gauss()
            for residual, weight in zip(self._residuals, self._weights, strict=True)
        ]
        prior = [rng.gauss(self._mean, _BOLDNESS * spread if rows else spread) for rows in self._having]
        return self._in_rewards(self._solve(self._effects, residuals, prior, sweeps=_DRAW_SWEEPS)[0])

    def _solve(
        self, start: Effects, residuals: Sequence[float], prior: Sequence[float], *, sweeps: int
    ) -> tuple[Effects, list[float]]:
        """Return the effects after `sweeps` passes, each of which sets every effect to its best value, given the
        others, and the residuals that are left.

        start: the effects before the first pass.
        residuals: for each candidate with rewards, the sum of its rewards less their means.
        prior: the prior mean of each edit's effect.
        """
        weights, noise, spread = self._weights, self._noise, self._spread
        effects, base, rest = list(start.edits), start.base, list(residuals)
        precision = sum(weights) / noise + self._base_precision
        for edit, rows in enumerate(self._having):
            if not rows:
                effects[edit] = prior[edit]
        for _ in range(sweeps):
            step = self._step(sum(rest) / noise - base * self._base_precision, precision)
            base += step
            rest = [each - weight * step for each, weight in zip(rest, weights, strict=True)]
            for edit, rows, weight in self._measured:
                slope = sum([rest[row] for row in rows]) / noise + (prior[edit] - effects[edit]) / spread
                step = self._step(slope, weight / noise + 1 / spread)
                effects[edit] += step
                for row in rows:
                    rest[row] -= weights[row] * step
        return Effects(base, effects), rest

    def _errors(self, values: Sequence[float], tasks: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return each reward less its mean, and the derivative of the mean by the value.

        values: of each candidate with rewards.
        tasks: the effect of each task.
        """
        if not self._is_logistic:
            return [share - values[row] - tasks[task] for row, task, share in self._runs], [1.0] * len(self._runs)
        means = [_logistic(values[row] + tasks[task]) for row, task, _ in self._runs]
        errors = [share - mean for (_, _, share), mean in zip(self._runs, means, strict=True)]
        return errors, [mean * (1 - mean) for mean in means]

    def _step(self, slope: float, precision: float) -> float:
        return max(-self._max_step, min(self._max_step, slope / precision))

    def _prior_variance(self, edits: Sequence[int]) -> float:
        return max(sum([self._variances[edit] for edit in edits]), _MIN_VARIANCE)

    def _in_rewards(self, effects: Effects) -> Effects:
        return Effects(effects.base * self._high, [edit * self._high for edit in effects.edits])


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(min(-value, 500.0)))  # of -800, exp would overflow


def _shrunk(guess: float, values: Sequence[float]) -> float:
    return (_PRIOR_COUNT * guess + sum(values)) / (_PRIOR_COUNT + len(values))
