"""`Search`: the state of a beam search over prompts, as a checkpoint keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.algorithm.prompts.candidate import Candidate
from leyden.algorithm.prompts.components import name_to_improve


@dataclass(slots=True)
class Search:
    """The beam, the best candidate, and the rewards of those in use."""

    first: Candidate
    """The prompts that the user gave."""
    beam: list[Candidate] = field(default_factory=list[Candidate])
    best: Candidate | None = None
    """The best candidate that was measured on the whole validation set; None before the first."""
    rewards: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Rewards on validation tasks, by the candidate's key and the task's place."""
    known: set[str] = field(default_factory=set[str])
    """The key of every candidate that was ever measured."""

    edits: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """For the name of each prompt resource: how often it was rewritten, and how often the rewriting
    raised the mean reward."""

    def __post_init__(self) -> None:
        self.beam = self.beam or [self.first]
        self.known.add(self.first.key)

    def has(self, candidate: Candidate, tasks: Iterable[int]) -> bool:
        """Return whether the candidate has a reward on each of these tasks."""
        return set(tasks) <= self.rewards.get(candidate.key, {}).keys()

    def mean(self, candidate: Candidate, tasks: Sequence[int] | None = None) -> float:
        """Return the candidate's mean reward on these tasks; None: on all that
        it was measured on.
        """
        rewards = self.rewards[candidate.key]
        return statistics.fmean(rewards.values() if tasks is None else [rewards[task] for task in tasks])

    def add(self, candidate: Candidate, rewards: dict[int, float]) -> None:
        """Keep rewards of a candidate."""
        self.rewards.setdefault(candidate.key, {}).update(rewards)

    @property
    def extremes(self) -> tuple[float, float] | None:
        """Return the lowest and the highest reward of the candidates in use; None without any."""
        found = [reward for rewards in self.rewards.values() for reward in rewards.values()]
        return (min(found), max(found)) if found else None

    def count_edits(self, edits: Sequence[tuple[str, str, str]], tasks: Sequence[int]) -> None:
        """Count which rewritten prompts were better than their parents.

        edits: the name of the prompt, the key of the parent and the key of the new candidate.
        tasks: on which they are compared.
        """
        for name, parent, child in edits:
            before, after = self.rewards.get(parent, {}), self.rewards.get(child, {})
            common = [task for task in tasks if task in before and task in after]
            tried, raised = self.edits.get(name, (0, 0))
            is_better = sum(after[task] for task in common) > sum(before[task] for task in common)
            self.edits[name] = (tried + 1, raised + is_better)

    def name_to_improve(self, names: Sequence[str], turn: int, seed: str) -> str:
        """Return the prompt to rewrite: see `components.name_to_improve`."""
        return name_to_improve(names, self.edits, turn, seed)

    def forget_rest(self, candidates: Sequence[Candidate]) -> None:
        """Remember that these candidates were measured, and forget the rewards of those
        that are not in use.
        """
        self.known |= {candidate.key for candidate in candidates}
        in_use = {candidate.key for candidate in (self.first, *self.beam, self.best) if candidate is not None}
        self.rewards = {key: rewards for key, rewards in self.rewards.items() if key in in_use}

    def as_json(self) -> dict[str, Any]:
        """Return the state for `from_json`."""
        return {
            "first": self.first.as_json(),
            "beam": [candidate.as_json() for candidate in self.beam],
            "best": None if self.best is None else self.best.as_json(),
            "rewards": {key: list(rewards.items()) for key, rewards in self.rewards.items()},
            "known": sorted(self.known),
            "edits": {name: list(counts) for name, counts in self.edits.items()},
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Search:
        """Return the state that `as_json` has described."""
        return cls(
            first=Candidate.from_json(stored["first"]),
            beam=[Candidate.from_json(each) for each in stored["beam"]],
            best=None if stored["best"] is None else Candidate.from_json(stored["best"]),
            rewards={key: {int(task): reward for task, reward in each} for key, each in stored["rewards"].items()},
            known=set(stored["known"]),
            edits={name: (tried, raised) for name, (tried, raised) in stored["edits"].items()},
        )
