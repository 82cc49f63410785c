"""`LuckGame`: a game of several moves whose true advantages are known, and whose first move is luck.

It is for algorithms that credit single model calls. The reward of a whole game says little about the later moves,
because the first one is worth more than all of them and cannot be learnt: the task decides which first answer is lucky,
and the player does not see it. The game knows no model and no agent. An answer is text, of which the first character
counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leyden._lib.options import check_number

DIGITS = "0123456789"


def points_of(answer: str) -> float:
    """Return the points of a later answer: 0 for "0" to 1 for "9", and 0 for any other text."""
    return max(DIGITS.find(answer[0]), 0) / 9 if answer else 0.0


def is_even(answer: str) -> bool:
    """Return whether an answer begins with an even digit."""
    return bool(answer) and answer[0] in DIGITS[::2]


@dataclass(frozen=True, slots=True)
class LuckGame:
    """A game of `n_moves` answers, at least two.

    The first answer earns `luck` points if it is even and `lucky` is true, or if it is odd and `lucky` is false. Each
    later answer earns a ninth of its digit, so 9 is the best. The first answer does not matter if half of the tasks are
    `lucky`.
    """

    lucky: bool
    n_moves: int = 4
    luck: float = 10.0

    def __post_init__(self) -> None:
        check_number("n_moves", self.n_moves, at_least=2, whole=True)

    def reward(self, answers: Sequence[str]) -> float:
        """Return the points of a game's first answers: the game's reward if all `n_moves` are given."""
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
        """Return the true advantage of each answer of a whole game, shape (`n_moves`,).

        probabilities: probability of each answer of the player, the same at every move.
        """
        values = [self.value(answers[:n], probabilities) for n in range(self.n_moves + 1)]
        return [after - before for before, after in itertools.pairwise(values)]
