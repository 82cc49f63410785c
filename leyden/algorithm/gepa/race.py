"""The validation race: a candidate that is provably worse than the best one is not
measured to the end.

Each candidate runs the validation tasks in a random order of its own, in growing stages. It is
stopped after a stage if a sequential test refutes, wrongly with a probability of at most `error`,
that its mean over the whole validation set reaches that of the best candidate, and if no task so
far shows it above the Pareto front. So a specialist, which is better on some tasks, goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from leyden.algorithm.prompts.comparison import Rewards
from leyden.maths.sequential import ShortfallEvidence, observe_shortfall

FIRST_STAGE = 6
"""Tasks of the first stage. Fewer cannot refute anything at an error of 0.05; each
stage is twice as long."""


@dataclass(slots=True)
class Race:
    """One candidate against the best one and the front. All rewards are within `reward_range`.

    best: rewards of the best candidate on all validation tasks.
    front: the highest reward of any candidate on each task.
    error: largest probability of a wrong rejection by the test.
    """

    best: Rewards
    front: Rewards
    error: float
    reward_range: tuple[float, float]
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """The candidate's, so far."""
    is_above_front: bool = False
    _evidence: ShortfallEvidence = field(default_factory=ShortfallEvidence)

    @property
    def is_lost(self) -> bool:
        """Return whether the candidate is stopped."""
        return self._evidence.refutes(self.error) and not self.is_above_front

    def add(self, found: Mapping[int, float]) -> None:
        """Add the rewards of a stage, by task, in the order of the race."""
        low, high = self.reward_range
        for task, reward in found.items():
            self.rewards[task] = reward
            self.is_above_front |= reward > self.front[task]
            self._evidence = observe_shortfall(
                self._evidence, reward - self.best[task], population=len(self.best), bound=high - low
            )


def stages(n_tasks: int, seed: str) -> Iterator[list[int]]:
    """Yield the validation tasks in random order, in stages that double. seed:
    decides the order.
    """
    order = random.Random(seed).sample(range(n_tasks), n_tasks)
    start, size = 0, FIRST_STAGE
    while start < n_tasks:
        yield order[start : start + size]
        start, size = start + size, 2 * size
