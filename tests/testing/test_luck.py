"""A game of luck and skill has later answers, and their mean points are its skill."""

from __future__ import annotations

import pytest

from leyden.errors import ConfigError
from leyden.testing import LuckGame


def test_the_skill_of_a_game_is_that_of_its_later_answers() -> None:
    game = LuckGame(lucky=True, n_moves=3)
    assert (game.skill(["0", "9", "9"]), game.skill(["1", "9", "0"])) == (1.0, 0.5)
    assert (game.reward(["0", "9", "9"]), game.reward(["1", "9", "9"])) == (12.0, 2.0)


@pytest.mark.parametrize("n_moves", [1, 2.5])
def test_a_game_without_later_answers_is_refused(n_moves: float) -> None:
    with pytest.raises(ConfigError, match=r"n_moves is .*; it must be a whole number, at least 2"):
        LuckGame(lucky=True, n_moves=n_moves)  # type: ignore[arg-type]
