"""`EffectModel`: estimate what each edit of a prompt adds to the reward, from all rewards of a search together.

It is a linear Gaussian model, fitted by empirical Bayes (expectation maximisation):

    reward of a prompt on a task = base + effects of its edits + effect of the task + noise

An edit that several prompts have is measured by the rewards of all of them. The effects of edits are normally
distributed around a common mean, so an edit without rewards is believed to be like the others. The effects of tasks
make comparisons paired: hard tasks do not count against the prompt that ran them.

Pure functions of numbers, which know no prompts, no language models and no optimiser.
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
"""The number of rounds of expectation maximisation."""
_DRAW_SWEEPS = 10
"""The number of sweeps over all edits for a draw, which starts at the posterior mean."""
_PRIOR_COUNT = 2.0
"""The number of observations for which the first guess of a variance, or of the mean effect, counts when it is averaged
with the data."""
_BOLDNESS = 0.5
"""The deviation of a draw from the posterior mean, for edits with rewards, as a fraction of what the posterior
distribution says. Among many edits, some useless one always has a lucky full draw."""
_OPTIMISM = 0.5
"""The first guess of the mean effect, in standard deviations of the effects. It is positive, so that new edits are
tried."""
_PRIOR_SHARE = 0.25
"""The first guess of the variance of the edits' effects, and of the tasks', as a fraction of the variance of all
rewards."""
_LARGEST = 1e100
"""Rewards of this size are divided by the largest one, because their squares are no floats."""
_LEAST_VARIANCE = 1e-6
"""Takes the place of smaller variances, by which the model would divide: of equal rewards, and of prompts without
edits."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The mean reward of a prompt without edits, and what each edit adds to it."""

    base: float
    edits: Sequence[float]
    """The effect of each edit on a prompt's value, by the edit's number."""

    def value(self, edits: Sequence[int]) -> float:
        """Return the mean reward of a prompt with the edits of these numbers."""
        return self.base + sum([self.edits[edit] for edit in edits])


class EffectModel:
    """The posterior distribution of the effects of all edits, given the rewards.

    edits: the numbers of the edits of each prompt.
    rewards: the rewards of each prompt, by task. At least one prompt has a reward.
    n_edits: the number of all edits.
    """

    def __init__(self, edits: Sequence[Sequence[int]], rewards: Sequence[Mapping[Task, float]], n_edits: int) -> None:
        measured = [place for place, found in enumerate(rewards) if found]
        seen = [reward for place in measured for reward in rewards[place].values()]
        largest = max(map(abs, seen))
        self._unit = 1.0 if largest < _LARGEST else largest
        rewards = [{task: reward / self._unit for task, reward in found.items()} for found in rewards]
        seen = [reward / self._unit for reward in seen]
        total = max(statistics.pvariance(seen), _LEAST_VARIANCE)
        guess = _PRIOR_SHARE * total
        self.deviation = math.sqrt(total) * self._unit
        """The standard deviation of all rewards."""
        self._edits = [edits[place] for place in measured]
        self._counts = [len(rewards[place]) for place in measured]
        self._having: list[list[int]] = [[] for _ in range(n_edits)]
        for row, own in enumerate(self._edits):
            for edit in own:
                self._having[edit].append(row)
        self._measured = [
            (edit, rows, sum(self._counts[row] for row in rows)) for edit, rows in enumerate(self._having) if rows
        ]
        self._unmeasured = [edit for edit, rows in enumerate(self._having) if not rows]
        optimism, task_spread = _OPTIMISM * math.sqrt(guess), guess
        self._noise, self._spread, self._mean = total, guess, optimism
        runs: dict[Task, list[tuple[int, float]]] = {}
        for row, place in enumerate(measured):
            for task, reward in rewards[place].items():
                runs.setdefault(task, []).append((row, reward))
        tasks = dict.fromkeys(runs, 0.0)
        effects = Effects(mean_of(seen), [0.0] * n_edits)
        for _ in range(_ROUNDS):
            self._sums = [sum([r - tasks[task] for task, r in rewards[place].items()]) for place in measured]
            effects = self._solve(effects, self._sums, [self._mean] * n_edits, sweeps=1)
            values = self._values(effects)
            for task, found in runs.items():
                tasks[task] = sum([r - values[row] for row, r in found]) / (len(found) + self._noise / task_spread)
            variances = {edit: 1 / (weight / self._noise + 1 / self._spread) for edit, _, weight in self._measured}
            unsure = [
                1 / (count / self._noise + 1 / max(sum([variances[edit] for edit in own]), _LEAST_VARIANCE))
                for count, own in zip(self._counts, self._edits, strict=True)
            ]
            errors = [
                (r - values[row] - tasks[task]) ** 2 + unsure[row] for task, found in runs.items() for row, r in found
            ]
            squares = [
                tasks[task] ** 2 + self._noise / (len(f) + self._noise / task_spread) for task, f in runs.items()
            ]
            self._noise, task_spread = _shrunk(total, errors), _shrunk(guess, squares)
            self._mean = _shrunk(optimism, [effects.edits[edit] for edit in variances])
            steps = [(effects.edits[edit] - self._mean) ** 2 + variance for edit, variance in variances.items()]
            self._spread = _shrunk(guess, steps)
        self._expected = effects
        self.expected = self._in_rewards(effects)
        """The posterior mean of the effects."""

    def draw(self, chance: random.Random) -> Effects:
        """Return one draw: the posterior mean after normal noise was added to the rewards and to the prior mean of each
        edit. It is a draw from the posterior distribution for edits without rewards, and closer to the mean for the
        others.
        """
        noise, spread = _BOLDNESS * math.sqrt(self._noise), math.sqrt(self._spread)
        sums = [
            total + noise * math.sqrt(count) * chance.gauss()
            for total, count in zip(self._sums, self._counts, strict=True)
        ]
        prior = [chance.gauss(self._mean, _BOLDNESS * spread if rows else spread) for rows in self._having]
        return self._in_rewards(self._solve(self._expected, sums, prior, sweeps=_DRAW_SWEEPS))

    def _in_rewards(self, effects: Effects) -> Effects:
        return Effects(effects.base * self._unit, [edit * self._unit for edit in effects.edits])

    def _solve(self, start: Effects, sums: Sequence[float], prior: Sequence[float], *, sweeps: int) -> Effects:
        """Return the effects after `sweeps` passes, each of which sets every effect to its best value, given the
        others.

        start: the effects before the first pass.
        sums: for each prompt with rewards, the sum of its rewards less the effects of their tasks.
        prior: the prior mean of each edit's effect.
        """
        counts, noise, spread = self._counts, self._noise, self._spread
        effects, base, total = list(start.edits), start.base, sum(self._counts)
        rest = [own - count * value for own, count, value in zip(sums, counts, self._values(start), strict=True)]
        for edit in self._unmeasured:
            effects[edit] = prior[edit]
        for _ in range(sweeps):
            step = sum(rest) / total
            base += step
            rest = [each - count * step for each, count in zip(rest, counts, strict=True)]
            for edit, rows, weight in self._measured:
                before = effects[edit]
                found = (sum([rest[row] for row in rows]) + weight * before) / noise + prior[edit] / spread
                effects[edit] = found = found / (weight / noise + 1 / spread)
                step = found - before
                for row in rows:
                    rest[row] -= counts[row] * step
        return Effects(base, effects)

    def _values(self, effects: Effects) -> list[float]:
        return [effects.value(edits) for edits in self._edits]


def _shrunk(guess: float, values: Sequence[float]) -> float:
    return (_PRIOR_COUNT * guess + sum(values)) / (_PRIOR_COUNT + len(values))
