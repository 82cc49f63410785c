"""The demo's game: its rules hold whatever the player says."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leyden.cli.demo.game import NUMBERS, TURNS, Game, sloppy_reply
from leyden.errors import ConfigError

SECRETS = range(NUMBERS)
replies = st.one_of(st.text(), st.integers().map(str), st.integers(0, NUMBERS - 1).map(str))


@given(secret=st.sampled_from(SECRETS), texts=st.lists(replies, min_size=TURNS, max_size=TURNS))
@example(secret=3, texts=["9" * 5000, "", "", ""])
@example(secret=3, texts=["-1", "10", " 2\n", "３"])  # int() reads full-width digits too: that is a win
def test_any_reply_leaves_a_legal_state(secret: int, texts: list[str]) -> None:
    game = Game(secret)
    for turn, text in enumerate(texts, start=1):
        low, high = game.low, game.high
        feedback = game.guess(text)
        assert 0 <= low <= game.low <= secret <= game.high <= high < NUMBERS
        assert game.turns == turn <= TURNS
        assert (feedback.done, feedback.won) == (game.done, game.won)
        assert feedback.done or not feedback.won
        if feedback.done:
            break
        assert feedback.text in (f"higher {game.low}..{game.high}", f"lower {game.low}..{game.high}")
    assert game.done, "the last turn must end the game"
    with pytest.raises(ConfigError, match="start a new Game"):
        game.guess("0")


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("round_up", [0, 1])
def test_halving_the_range_always_wins(secret: int, round_up: int) -> None:
    game = Game(secret)
    while not game.done:
        game.guess(str((game.low + game.high + round_up) // 2))
    assert game.won


@given(st.text().filter(lambda text: not any(character.isdigit() for character in text)))
def test_a_reply_that_is_no_number_loses_at_once(text: str) -> None:
    game = Game(4)
    feedback = game.guess(text)
    assert feedback.done and not feedback.won
    assert "it was 4" in feedback.text


def test_a_game_reads_as_a_person_would_expect() -> None:
    game = Game(7)
    assert game.prompt() == "guess 0..9"
    assert [game.guess(text).text for text in ("5", "8", "6", "7")] == [
        "higher 6..9",
        "lower 6..7",
        "higher 7..7",
        "right",
    ]
    game = Game(7)
    assert [game.guess("9").text for _ in range(TURNS)] == [*["lower 0..8"] * 3, "lower, and no turns left; it was 7"]


def test_the_first_prompt_does_not_betray_the_secret() -> None:
    assert len({Game(secret).prompt() for secret in SECRETS}) == 1


@pytest.mark.parametrize("secret", [-1, NUMBERS])
def test_a_secret_outside_the_range_is_refused(secret: int) -> None:
    with pytest.raises(ConfigError, match=str(secret)):
        Game(secret)


@given(seed=st.integers(0, 2**32), secret=st.sampled_from(SECRETS), attention=st.floats(0, 1))
def test_the_sloppy_player_repeats_itself_for_the_same_seed(seed: int, secret: int, attention: float) -> None:
    def play() -> list[str]:
        rng, game, said = random.Random(seed), Game(secret), list[str]()
        while not game.done:
            said.append(sloppy_reply(game, rng, attention=attention))
            game.guess(said[-1])
        return said

    said = play()
    assert said == play()
    assert all(0 <= int(text) < NUMBERS for text in said)


@pytest.mark.parametrize(("attention", "expected"), [(0.0, 1 - (1 - 1 / NUMBERS) ** TURNS), (1.0, 0.76)])
def test_attention_decides_how_often_the_sloppy_player_wins(attention: float, expected: float) -> None:
    rng = random.Random(0)
    games = [Game(rng.randrange(NUMBERS)) for _ in range(5000)]
    for game in games:
        while not game.done:
            game.guess(sloppy_reply(game, rng, attention=attention))
    # 5,000 games: a standard error below 0.007
    assert sum(game.won for game in games) / len(games) == pytest.approx(expected, abs=0.03)
