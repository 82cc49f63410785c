"""`Search`: all candidates of a run, their rewards and the beam, as a checkpoint keeps them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.algorithm.prompts.beliefs import Belief, beliefs
from leyden.algorithm.prompts.candidate import Candidate


@dataclass(slots=True)
class Search:
    """The state of an APO search: its candidates, their rewards and the beam. A candidate's number
    is its index in `candidates`; 0 is the user's prompt.
    """

    candidates: list[Candidate]
    parents: list[int | None] = field(default_factory=lambda: [None])
    train: list[dict[int, float]] = field(default_factory=lambda: [dict[int, float]()])
    """Rewards of each candidate by training task."""
    val: list[dict[int, float]] = field(default_factory=lambda: [dict[int, float]()])
    """Rewards of each candidate by validation task."""
    beam: list[int] = field(default_factory=lambda: [0])
    """The candidates that the next round rewrites."""
    best: int | None = None
    """The best candidate so far; None before the first was measured on validation tasks."""

    @property
    def known(self) -> set[str]:
        """Return the key of every candidate."""
        return {candidate.key for candidate in self.candidates}

    @property
    def measured(self) -> list[int]:
        """Return the candidates that have a reward."""
        return [place for place in range(len(self.candidates)) if self.train[place] or self.val[place]]

    def add(self, candidate: Candidate, parent: int) -> bool:
        """Add a new candidate; return whether no equal one was there."""
        is_new = candidate.key not in self.known
        if is_new:
            self.candidates.append(candidate)
            self.parents.append(parent)
            self.train.append({})
            self.val.append({})
        return is_new

    def rewards(self, place: int) -> dict[tuple[str, int], float]:
        """Return all rewards of a candidate, by kind and task."""
        kinds = (("train", self.train), ("val", self.val))
        return {(kind, task): reward for kind, by_place in kinds for task, reward in by_place[place].items()}

    def beliefs(self) -> list[Belief]:
        """Return the mean and the variance of what each candidate is believed to be worth."""
        return beliefs(self.parents, [self.rewards(place) for place in range(len(self.candidates))])

    def draw(self, count: int, seed: str) -> list[int]:
        """Return the candidates that run next, by Thompson sampling: those with the highest values
        in one draw from what is believed.
        """
        chance = random.Random(seed)
        values = [chance.gauss(each.mean, math.sqrt(each.variance)) for each in self.beliefs()]
        return sorted(range(len(values)), key=lambda place: -values[place])[:count]

    def ranked(self, places: Sequence[int]) -> list[int]:
        """Return candidates, the one with the highest expected value first."""
        found = self.beliefs()
        return sorted(places, key=lambda place: -found[place].mean)

    def worst_tasks(self, place: int, count: int, seed: str, *, highest: float | None = None) -> list[int]:
        """Return the training tasks on which a candidate has the lowest rewards.

        Equal ones come in random order. If it has the highest reward on each task, return none,
        because a critic would have to guess.

        highest: the highest possible reward; None: the highest one so far, if rewards differ.
        """
        rewards, known = self.train[place], {reward for each in (*self.train, *self.val) for reward in each.values()}
        if highest is None and len(known) > 1:
            highest = max(known)
        if not rewards or (highest is not None and min(rewards.values()) >= highest):
            return []
        shuffled = random.Random(seed).sample(sorted(rewards), len(rewards))
        return sorted(shuffled, key=lambda task: rewards[task])[:count]

    def edits(self) -> dict[str, tuple[int, int]]:
        """Return how many rewritten prompts were measured, and how many are believed to be better.

        The counts are by the prompt's name; better means better than the parent.
        """
        found, counts = self.beliefs() if self.measured else [], dict[str, tuple[int, int]]()
        for place in self.measured:
            name, parent = self.candidates[place].edited, self.parents[place]
            if name is not None and parent is not None:
                tried, raised = counts.get(name, (0, 0))
                counts[name] = (tried + 1, raised + (found[place].mean > found[parent].mean))
        return counts

    def as_json(self) -> dict[str, Any]:
        """Return the state for `from_json`."""
        return {
            "candidates": [candidate.as_json() for candidate in self.candidates],
            "parents": self.parents,
            "train": [list(rewards.items()) for rewards in self.train],
            "val": [list(rewards.items()) for rewards in self.val],
            "beam": self.beam,
            "best": self.best,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Search:
        """Return the state that `as_json` returned."""
        return cls(
            candidates=[Candidate.from_json(each) for each in stored["candidates"]],
            parents=stored["parents"],
            train=[{int(task): reward for task, reward in each} for each in stored["train"]],
            val=[{int(task): reward for task, reward in each} for each in stored["val"]],
            beam=stored["beam"],
            best=stored["best"],
        )
