"""`Search`: the state of an APO search, which checkpoints store: all candidates of a run, their edits and rewards, and
the beam.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.algorithm.prompts.candidate import Candidate
from leyden.statistics import EffectModel


@dataclass(slots=True)
class Search:
    """The state of an APO search: its candidates, their rewards and the beam. A candidate's number is its index in
    `candidates`; 0 is the user's prompt. An edit has the number of the candidate for which a model wrote it.
    """

    candidates: list[Candidate]
    parents: list[int | None] = field(default_factory=lambda: [None])
    edits: list[tuple[int, ...]] = field(default_factory=lambda: [tuple[int, ...]()])
    """The numbers of the edits that each candidate has."""
    train: list[dict[int, float]] = field(default_factory=lambda: [dict[int, float]()])
    """Rewards of each candidate by training task."""
    val: list[dict[int, float]] = field(default_factory=lambda: [dict[int, float]()])
    """Rewards of each candidate by validation task."""
    read: list[dict[int, int]] = field(default_factory=lambda: [dict[int, int]()])
    """How many critics have read the run of each candidate on a training task, by task."""
    beam: list[int] = field(default_factory=lambda: [0])
    """The candidates that the next round rewrites."""
    best: int | None = None
    """The number of the best candidate so far; None before one was measured on validation tasks."""
    _fitted: tuple[int, int, EffectModel] | None = field(default=None, compare=False, repr=False)
    """The last fitted model, after the numbers of candidates and of rewards to which it was fitted. Neither number ever
    falls, so equal numbers mean equal data."""

    @property
    def known(self) -> set[str]:
        return {candidate.key for candidate in self.candidates}

    @property
    def measured(self) -> list[int]:
        return [index for index in range(len(self.candidates)) if self.train[index] or self.val[index]]

    @property
    def written(self) -> list[int]:
        """The numbers of the edits: of the candidates that a model wrote, other than joined ones."""
        return [index for index, edits in enumerate(self.edits) if index in edits]

    def change(self, edit: int) -> tuple[str, str, str]:
        """Return the name of the prompt that an edit changes, and the prompt's text before and after the edit."""
        after, before = self.candidates[edit], self.candidates[self.parents[edit] or 0]
        name = after.edited or ""
        return name, before.prompts[name].template, after.prompts[name].template

    def add(self, candidate: Candidate, parent: int, edits: Sequence[int] | None = None) -> bool:
        """Add a candidate, unless one with the same prompts exists; return whether it was added.

        parent: the number of its parent.
        edits: the numbers of the edits that it has; None: those of its parent, and a new one.
        """
        is_new = candidate.key not in self.known
        if is_new:
            own = [*self.edits[parent], len(self.candidates)] if edits is None else edits
            self.edits.append(tuple(own))
            self.candidates.append(candidate)
            self.parents.append(parent)
            self.train.append({})
            self.read.append({})
            self.val.append({})
        return is_new

    def rewards(self, index: int) -> dict[tuple[str, int], float]:
        """Return all rewards of a candidate, by kind ("train" or "val") and task."""
        kinds = (("train", self.train), ("val", self.val))
        return {(kind, task): reward for kind, by_index in kinds for task, reward in by_index[index].items()}

    def effects(self) -> EffectModel:
        """Return the linear model of what each edit adds to the reward, fitted to all rewards so far. It is only fitted
        again after there are new candidates or rewards.
        """
        size, n_rewards = len(self.candidates), sum(map(len, (*self.train, *self.val)))
        if self._fitted is None or self._fitted[:2] != (size, n_rewards):
            self._fitted = (size, n_rewards, EffectModel(self.edits, list(map(self.rewards, range(size))), size))
        return self._fitted[2]

    def expected_reward(self, limits: tuple[float, float] | None) -> float | None:
        """Return the reward that is expected of the best candidate on new tasks, by the logistic model of all rewards.
        None if it has no reward, or if all rewards are equal and their limits are unknown.

        limits: the lowest and the highest possible reward; None: those of the rewards so far.
        """
        if self.best is None or self.best not in self.measured:
            return None
        rewards = [self.rewards(index) for index in range(len(self.candidates))]
        seen = [reward for each in rewards for reward in each.values()]
        low, high = limits or (min(seen), max(seen))
        if low >= high:
            return None
        model = EffectModel(self.edits, rewards, len(rewards), limits=(low, high))
        return model.expected_rewards()[self.best]

    def values(self) -> list[float]:
        return self.effects().expected_rewards()

    def bounded_values(self) -> list[float]:
        """Return the candidates' values, cut to the range of all rewards so far, which the linear model ignores."""
        seen = [reward for index in self.measured for reward in self.rewards(index).values()]
        return [min(max(value, min(seen)), max(seen)) for value in self.values()]

    def ranked(self, indices: Sequence[int]) -> list[int]:
        """Return the numbers of candidates, sorted by their expected reward, the highest first."""
        values = self.values()
        return sorted(indices, key=lambda index: -values[index])

    def worst_tasks(self, index: int, count: int, seed: str, *, highest: float | None = None) -> list[int]:
        """Return the `count` training tasks of which a critic reads a candidate's runs: of those below the highest
        reward, the ones that the fewest critics have read, the lowest rewards first; equal ones in random order.

        If it has the highest reward on every task, return none, because a critic would have to guess.
        highest: the highest possible reward; None: the highest one so far, if rewards differ.
        """
        rewards, known = self.train[index], {reward for each in (*self.train, *self.val) for reward in each.values()}
        if highest is None and len(known) > 1:
            highest = max(known)
        if not rewards or (highest is not None and min(rewards.values()) >= highest):
            return []
        shuffled = random.Random(seed).sample(sorted(rewards), len(rewards))
        read, top = self.read[index], math.inf if highest is None else highest
        return sorted(shuffled, key=lambda task: (rewards[task] >= top, read.get(task, 0), rewards[task]))[:count]

    def successes(self) -> dict[str, tuple[int, int]]:
        """Return for each prompt how many of its edits ran, and how many of those are expected to raise the reward."""
        counts: dict[str, tuple[int, int]] = {}
        if self.measured:
            effects = self.effects().expected.edits
            for edit in sorted({edit for index in self.measured for edit in self.edits[index]}):
                name = self.candidates[edit].edited or ""
                ran, helped = counts.get(name, (0, 0))
                counts[name] = (ran + 1, helped + (effects[edit] > 0))
        return counts

    def as_json(self) -> dict[str, Any]:
        """Return the state for `from_json`."""
        return {
            "candidates": [candidate.as_json() for candidate in self.candidates],
            "parents": self.parents,
            "edits": self.edits,
            "train": [list(rewards.items()) for rewards in self.train],
            "val": [list(rewards.items()) for rewards in self.val],
            "read": [list(counts.items()) for counts in self.read],
            "beam": self.beam,
            "best": self.best,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Search:
        """Return the state that `as_json` returned."""
        return cls(
            candidates=[Candidate.from_json(each) for each in stored["candidates"]],
            parents=stored["parents"],
            edits=[tuple(edits) for edits in stored["edits"]],
            train=[{int(task): reward for task, reward in each} for each in stored["train"]],
            val=[{int(task): reward for task, reward in each} for each in stored["val"]],
            read=[{int(task): count for task, count in each} for each in stored["read"]],
            beam=stored["beam"],
            best=stored["best"],
        )
