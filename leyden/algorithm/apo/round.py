"""`Round`: counts of one round for its metrics, and the warnings about a round that went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from leyden.algorithm.apo.search import Search
from leyden.algorithm.own_metrics import means_of
from leyden.algorithm.prompts.comparison import Comparison
from leyden.algorithm.prompts.reflector import ReflectionCounts

_MIN_EQUAL = 8
"""Equal rewards of different candidates on the same task are no coincidence from this number on."""


@dataclass(slots=True)
class Round:
    """The state of one round of APO: scores so far, failures, and the comparison at its end."""

    planned: int = 0
    """The largest number of scores that the round may need."""
    scores: int = 0
    failed: int = 0
    """The number of rollouts without a reward of their own."""
    own: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """The agent's own numbers of each rollout, by the metric's name."""
    exceeded: str = ""
    """The budget's message about the last measurement that it refused; empty if it refused none."""
    comparison: Comparison | None = None
    """The new best prompts against those before; None if the best ones have not changed."""

    def metrics(self) -> dict[str, float]:
        """Return the counts, the means of the agent's own numbers, and the improvement if the best prompts are new."""
        improvement = {} if self.comparison is None else {"improvement": self.comparison.difference.mean}
        return {**improvement, "rollouts": self.scores, "failed": self.failed, **means_of(self.own)}


def reflection_warnings(round_: int, counts: ReflectionCounts, n_new: int) -> list[str]:
    """Return the warnings after the reflection calls of a round.

    n_new: number of new prompts that can be used.
    """
    if counts.errors:
        shown = "; ".join(f"{count} x {error}" for error, count in counts.errors.most_common(3))
        return [f"round {round_}: {counts.errors.total()} reflection calls failed: {shown}"]
    if counts.refused and not n_new:
        problem = f"in {counts.refused} branches; the last reason: {counts.last_problem}"
        return [f"round {round_}: the reflection models wrote no prompt that can be used, {problem}"]
    return []


def ignored_warning(search: Search, names: Sequence[str]) -> str | None:
    """Return a warning that the agent may ignore the prompts, if all candidates have equal rewards on every task; else
    None.

    names: the names of the prompts to improve.
    """
    by_task: dict[tuple[str, int], list[float]] = {}
    for index in search.measured:
        for task, reward in search.rewards(index).items():
            by_task.setdefault(task, []).append(reward)
    shared = {task: found for task, found in by_task.items() if len(found) > 1}
    differ = any(len(set(found)) > 1 for found in shared.values())
    if differ or sum(len(found) - 1 for found in shared.values()) < _MIN_EQUAL:
        return None
    return (
        f"all {len(search.measured)} prompts have equal rewards, on each of {len(shared)} tasks: check that the agent "
        f"uses the prompt {' or '.join(map(repr, names))}, and that its reward can change"
    )
