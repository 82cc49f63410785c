"""How much better one candidate is than another on the same tasks, and how sure that is.

Pure values and functions: they know rewards, no prompts, no store and no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.algorithm.evaluation import Estimate, estimate
from leyden.utils.figures import figure

Rewards = Mapping[int, float]
"""A candidate's rewards by task: the task's place in the validation set."""

_SURE = 0.05
"""The largest probability, by a sign test, with which a sure difference may be chance."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two candidates on the same tasks: the reward of the second minus the reward of the first."""

    difference: Estimate
    better: int
    """The number of tasks on which the second candidate has the higher reward."""
    worse: int
    tasks: int
    n_compared: int = 1
    """Candidates of which the second was chosen as the best, by the same rewards."""

    @property
    def chance(self) -> float:
        """Return an upper bound of the p-value that the second candidate is no better: a one-sided
        sign test with Bonferroni's correction for `n_compared` candidates.
        """
        n = self.better + self.worse
        return min(1.0, self.n_compared * sum(math.comb(n, k) for k in range(self.better, n + 1)) / 2**n)

    @property
    def is_sure(self) -> bool:
        """Return whether the confidence interval of the mean difference lies above 0 and the sign
        test also rejects that both prompts are equal.
        """
        return self.difference.low is not None and self.difference.low > 0 and self.chance <= _SURE

    def __str__(self) -> str:
        """Return the difference with its interval, the counts of tasks, and whether it is sure."""
        sure = "sure" if self.is_sure else "not sure"
        if self.n_compared > 1:
            sure += f", as the best of {self.n_compared:,}"
        counts = f"{self.better} better, {self.worse} worse of {self.tasks} tasks"
        mean = figure(self.difference.mean, 3)
        if self.difference.low is None or self.difference.high is None:
            return f"{mean} ({counts}; {sure})"
        interval = f"{figure(self.difference.low, 3)} to {figure(self.difference.high, 3)}"
        return f"{mean} (95 % interval {interval}; {counts}; {sure})"


def compare(first: Rewards, second: Rewards, *, n_compared: int = 1) -> Comparison:
    """Compare two candidates on the tasks that both have a reward for, at least one.

    The pairs take the difficulty of the tasks out of the difference. The best of many candidates
    was also lucky, so its interval and its sign test are those of `n_compared` simultaneous
    comparisons (Bonferroni): all intervals hold together with 95 %.

    n_compared: candidates of which the second is the best by these rewards; 1: it was
        not chosen by them.
    """
    differences = [second[task] - first[task] for task in sorted(first.keys() & second.keys())]
    return Comparison(
        difference=estimate([[difference] for difference in differences], n_compared=n_compared),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        tasks=len(differences),
        n_compared=n_compared,
    )
