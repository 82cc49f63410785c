"""`LuckGame`: a game of several moves whose true advantages are known, and whose first move is
luck.

It is for algorithms that credit single model calls. The reward of a whole game says little of the
later moves, because the first one is worth more than all of them and cannot be learnt: which answer
is lucky is the task, and the player does not see it. It knows no model and no agent; an answer is
text, and its first character counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DIGITS = "0123456789"


def points_of(answer: str) -> float:
    """Return the points of a later answer: 0 for "0" to 1 for "9", and 0 for any other text."""
    return DIGITS.find(answer[:1]) / 9 if answer[:1] in DIGITS[1:] and answer else 0.0


def is_even(answer: str) -> bool:
    """Return whether an answer begins with an even digit."""
    return bool(answer) and answer[0] in DIGITS[::2]


@dataclass(frozen=True, slots=True)
class LuckGame:
    """A game of `n_moves` answers.

    The first answer earns `luck` points if it is even and `lucky` is true, or the other way round.
    Each later answer earns up to one point, the more the larger its digit. So the best policy says
    9, but for its first answer, which does not matter: over many tasks, luck is even.
    """

    lucky: bool
    n_moves: int = 4
    luck: float = 10.0

    def reward(self, answers: Sequence[str]) -> float:
        """Return the points of some first answers; of `n_moves` answers they are the game's
        reward.
        """
        if not answers:
            return 0.0
        return self.luck * (is_even(answers[0]) == self.lucky) + sum(map(points_of, answers[1:]))

    def skill(self, answers: Sequence[str]) -> float:
        """Return the mean points of the later answers; 1 is best."""
        return sum(map(points_of, answers[1:])) / (self.n_moves - 1)

    def value(self, answers: Sequence[str], probabilities: Mapping[str, float]) -> float:
        """Return the expected reward after some answers.

        probabilities: probability of each answer of the player, the same at every move.
        """
        if not answers:
            return sum(p * self.value([answer], probabilities) for answer, p in probabilities.items())
        mean_points = sum(p * points_of(answer) for answer, p in probabilities.items())
        return self.reward(answers) + mean_points * (self.n_moves - len(answers))

    def advantages(self, answers: Sequence[str], probabilities: Mapping[str, float]) -> list[float]:
        """Return the true advantage of each answer of a whole game, shape (`n_moves`,)."""
        values = [self.value(answers[:n], probabilities) for n in range(self.n_moves + 1)]
        return [after - before for before, after in itertools.pairwise(values)]
