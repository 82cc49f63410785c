"""Compare two candidates on the same tasks, and `PromptResult`: how much better the best prompts are than the user's.

Values and pure functions, which know rewards, no prompts, no store and no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from leyden._lib.formatting import figure
from leyden.statistics import Estimate, estimate
from leyden.types import PromptTemplate

Rewards = Mapping[int, float]
"""A candidate's rewards by task: the task's index in the validation set."""

_SURE = 0.05
"""A difference is only sure if the p-value of the sign test is at most this."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of a second candidate with a first one on the same tasks."""

    difference: Estimate
    """The mean reward of the second candidate minus that of the first."""
    better: int
    """The number of tasks on which the second candidate has the higher reward."""
    worse: int
    """The number of tasks on which the second candidate has the lower reward."""
    tasks: int
    """The number of tasks, those with equal rewards included."""
    n_compared: int = 1
    """The number of candidates of which the second one was chosen by the same rewards."""

    @property
    def chance(self) -> float:
        """An upper bound of the p-value of a one-sided sign test that both candidates are equally good, with
        Bonferroni's correction for `n_compared` candidates.

        It is the probability of at least `better` heads in `better + worse` tosses of a fair coin, times `n_compared`.
        """
        n = self.better + self.worse
        return min(1.0, self.n_compared * sum(math.comb(n, k) for k in range(self.better, n + 1)) / 2**n)

    @property
    def is_sure(self) -> bool:
        """Whether the confidence interval of the mean difference lies above 0, and the sign test also rejects that both
        candidates are equally good.
        """
        return self.difference.low is not None and self.difference.low > 0 and self.chance <= _SURE

    def __str__(self) -> str:
        sure = "sure" if self.is_sure else "not sure"
        if self.n_compared > 1:
            sure += f", as the best of {self.n_compared:,}"
        counts = f"{self.better} better, {self.worse} worse of {self.tasks} tasks"
        mean = figure(self.difference.mean, 3)
        if self.difference.low is None or self.difference.high is None:
            return f"{mean} ({counts}; {sure})"
        interval = f"{figure(self.difference.low, 3)} to {figure(self.difference.high, 3)}"
        return f"{mean} (95 % interval {interval}; {counts}; {sure})"


@dataclass(frozen=True, slots=True, repr=False)
class PromptResult:
    """The result of a run of a prompt optimiser, as `RunSummary.result` has it."""

    prompts: dict[str, PromptTemplate]
    """The best prompts, by the names of their resources."""
    resources_id: str
    """The id of the resources with the best prompts, which are labelled `prompts/RUN_ID/best`."""
    version: int
    """The version of these resources."""
    reward: float | None
    """The mean reward over the validation tasks on which the best prompts were measured; None if they were not
    measured."""
    against_first: Comparison | None
    """The best prompts compared with the user's, on validation tasks; None if both are the same."""
    test_reward: float | None = None
    """The mean reward of the best prompts on the test set; None without a test set."""
    test: Comparison | None = None
    """The best prompts compared with the user's, on the test set."""
    expected_reward: float | None = None
    """The reward to expect of the best prompts on new tasks, from GEPA and APO. The best prompts were also lucky in the
    rewards of `reward`, because these rewards helped to choose them; this estimate from the rewards of all candidates
    has little of that luck. None from FewShot."""

    def __repr__(self) -> str:
        parts = ["no reward" if self.reward is None else f"reward {figure(self.reward, 3)}"]
        if self.expected_reward is not None:
            parts[0] += f", {figure(self.expected_reward, 3)} expected on new tasks"
        parts.append(
            "the first prompts are the best" if self.against_first is None else f"better by {self.against_first}"
        )
        if self.test is not None and self.test_reward is not None:
            parts.append(f"test reward {figure(self.test_reward, 3)}, difference {self.test}")
        return "; ".join(parts)


def compare(first: Rewards, second: Rewards, *, n_compared: int = 1) -> Comparison:
    """Return the comparison of two candidates on the tasks for which both have a reward, at least one.

    Pairs of rewards on the same task remove the tasks' difficulty from the difference. The best of many candidates was
    also lucky, so interval and sign test are corrected for `n_compared` simultaneous comparisons (Bonferroni).

    n_compared: the number of candidates of which `second` was chosen by these rewards; 1: it was not chosen by them.
    """
    differences = [second[task] - first[task] for task in sorted(first.keys() & second.keys())]
    return Comparison(
        difference=estimate([[difference] for difference in differences], n_compared=n_compared),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        tasks=len(differences),
        n_compared=n_compared,
    )
