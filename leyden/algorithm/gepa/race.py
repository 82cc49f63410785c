"""The validation race: a candidate is measured on the validation set in stages.

It is stopped after a stage if a sequential test refutes that its mean over the whole validation set reaches that of the
best candidate. The test is wrong with a probability of at most `error`.

If candidates compete for a Pareto front, each runs the tasks in another random order, and a candidate that is above the
front on a task continues. So a specialist, which is better on some tasks only, is not stopped. If candidates compete
with a leader, all run the tasks in one order, and a candidate that is ahead of the leader is not measured further.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from leyden.algorithm.prompts.comparison import Rewards
from leyden.statistics import ShortfallEvidence, observe_shortfall

FIRST_STAGE = 6
"""The number of tasks of the first stage. Fewer tasks cannot refute anything at an error of 0.05."""
_AHEAD = 0.5
"""A candidate is ahead of the leader if it is better by this many standard errors. Then it is the better one with a
probability of about 70 %. A wrong choice costs little, because the next candidates challenge the new leader on the same
tasks."""


@dataclass(slots=True)
class Race:
    """The race of one candidate against the best one, and against the front if there is one.

    best: rewards of the best candidate, at least on the tasks of the stages so far.
    front: the highest reward of any candidate on each task; None without a front.
    error: largest probability of a wrong rejection by the test; None: no candidate is rejected.
    reward_range: all rewards are within it, unless `error` is None.
    n_tasks: size of the validation set.
    """

    best: Rewards
    front: Rewards | None
    error: float | None
    reward_range: tuple[float, float]
    n_tasks: int
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """The candidate's rewards so far, by task."""
    is_above_front: bool = False
    """Whether the candidate is above the front on a task."""
    _evidence: ShortfallEvidence = field(default_factory=ShortfallEvidence)

    @property
    def is_lost(self) -> bool:
        """Whether the candidate is to be stopped."""
        return self.error is not None and self._evidence.refutes(self.error) and not self.is_above_front

    @property
    def is_ahead(self) -> bool:
        """Whether the candidate is better than the best one on the tasks so far, by half a standard error."""
        # The largest difference counts once more in the variance, which few equal differences would
        # make too small.
        differences = [reward - self.best[task] for task, reward in self.rewards.items()]
        n, largest = len(differences), max(map(abs, differences))
        variance = (sum(each * each for each in differences) + largest * largest) / (n + 1)
        return sum(differences) / n > _AHEAD * math.sqrt(variance / n)

    def add(self, found: Mapping[int, float]) -> None:
        """Add the candidate's rewards of a stage, by task, in the order of the race."""
        low, high = self.reward_range
        for task, reward in found.items():
            self.rewards[task] = reward
            self.is_above_front |= self.front is not None and reward > self.front[task]
            if self.error is not None:
                self._evidence = observe_shortfall(
                    self._evidence, reward - self.best[task], population=self.n_tasks, bound=high - low
                )


def stages(n_tasks: int, seed: str) -> Iterator[list[int]]:
    """Yield the validation tasks in random order, in stages each of which is twice as long as the one before.

    seed: decides the order.
    """
    order = random.Random(seed).sample(range(n_tasks), n_tasks)
    start, size = 0, FIRST_STAGE
    while start < n_tasks:
        yield order[start : start + size]
        start, size = start + size, 2 * size


def common_stages(n_tasks: int, seed: str) -> list[list[int]]:
    """Return the validation tasks in random order, in stages that end at a quarter, at a half and at all of them.

    seed: decides the order.
    """
    order = random.Random(seed).sample(range(n_tasks), n_tasks)
    ends = sorted({min(n_tasks, max(FIRST_STAGE, math.ceil(n_tasks * share))) for share in (0.25, 0.5, 1)})
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]
