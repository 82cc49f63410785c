"""`Round`: what one round did, for its metrics, and the warnings about a round that went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from leyden.algorithm.apo.search import Search
from leyden.algorithm.evaluator import Scores
from leyden.algorithm.prompts.candidate import Candidate
from leyden.algorithm.prompts.comparison import Comparison
from leyden.algorithm.prompts.reflector import ReflectionCounts
from leyden.utils.figures import figure


@dataclass(slots=True)
class Round:
    """Counts of one round."""

    planned: int = 0
    """Scores that the round needs at most."""
    known_rewards: tuple[float, float] | None = None
    """The lowest and the highest reward that a prompt in use had before the round; None:
    none was measured."""
    edits: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """The name of each prompt that was rewritten, and the keys of the parent and of
    the new candidate."""
    scores: int = 0
    failed: int = 0
    exceeded: str = ""
    """Why the budget did not allow the last measurement that was left out."""
    comparison: Comparison | None = None
    """The new best prompts against those before; None if the best ones have not changed."""

    def shows_nothing(self, scores: Scores) -> bool:
        """Return whether a batch has the highest reward on every task, so that a critic
        would have to guess.
        """
        if self.known_rewards is None:
            return False
        lowest, highest = self.known_rewards
        return lowest < highest and all(score.reward >= highest for score in scores.scores)

    def metrics(self) -> dict[str, float]:
        """Return the counts, and by how much the best prompts became better."""
        improvement = {} if self.comparison is None else {"improvement": self.comparison.difference.mean}
        return {**improvement, "rollouts": self.scores, "failed": self.failed}


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


def ignored_warning(
    candidates: Sequence[Candidate], search: Search, tasks: Sequence[int], names: Sequence[str]
) -> str | None:
    """Return a warning if several candidates have the same rewards, task by
    task; None otherwise.
    """
    found = {tuple(search.rewards[each.key][task] for task in tasks) for each in candidates}
    if len(candidates) < 2 or len(found) > 1:
        return None
    return (
        f"all {len(candidates)} prompts of round 1 have equal rewards, on each of {len(tasks)} tasks "
        f"(mean {figure(search.mean(candidates[0], tasks))}): check that the agent uses the prompt "
        f"{' or '.join(map(repr, names))}, and that its reward can change"
    )
