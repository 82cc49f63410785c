"""Guess the number: the demo's game of several turns.

The game picks a number from 0 to 9, and the player has four turns. The game begins with `guess 0..9`. Each of its
replies says in few tokens whether the number is higher or lower, and which range is still open: `higher 6..9`, `lower
6..7`, `right`. Halving the range always wins. A player who ignores the replies wins one game in three.

The module knows neither models nor Leyden's store and gateway: any function from the last message to a reply can play.
To change the difficulty, change `NUMBERS` and `TURNS`, and make the starting weights again
(`benchmarks/make_weights.py`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from leyden.errors import ConfigError

NUMBERS = 10
"""The secret is one of 0 .. NUMBERS - 1; each is a single digit, hence a single token."""
TURNS = 4
"""Guesses in one game. With four, halving the range always finds one of 10 numbers."""


@dataclass(frozen=True, slots=True)
class GuessReply:
    """The game's reply to one guess."""

    text: str
    """The message to the player; after the last guess it says how the game ended."""
    done: bool
    """Whether the game is over and takes no further guess."""
    won: bool
    """Whether the guess was the secret. Implies `done`."""


@dataclass(slots=True)
class Game:
    """One game, from its first prompt to its end.

    `0 <= low <= secret <= high < NUMBERS` always holds.
    secret: the number to find, from 0 to NUMBERS - 1.
    Raise ConfigError for another number.
    """

    secret: int
    low: int = field(default=0, init=False)
    """The smallest number that the replies so far leave open."""
    high: int = field(default=NUMBERS - 1, init=False)
    """The largest number that the replies so far leave open."""
    turns: int = field(default=0, init=False)
    """Guesses taken so far, at most TURNS."""
    done: bool = field(default=False, init=False)
    won: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.secret < NUMBERS:
            raise ConfigError(f"the secret is {self.secret}; it must be one of 0 to {NUMBERS - 1}")

    def prompt(self) -> str:
        """Return the first message to the player, which names the range of all numbers."""
        return f"guess 0..{NUMBERS - 1}"

    def guess(self, text: str) -> GuessReply:
        """Take the player's reply as the next guess.

        text: any text. A whole number is a guess, even outside the open range, where it teaches nothing. Any other text
            loses the game at once.
        Raise ConfigError if the game is over.
        """
        if self.done:
            raise ConfigError(f"this game ended after {self.turns} turns; start a new Game to play on")
        self.turns += 1
        try:
            number = int(text)
        except ValueError:  # no number, or one with thousands of digits
            return self._end(f"not a number; it was {self.secret}")
        if number == self.secret:
            return self._end("right", won=True)
        if number < self.secret:
            direction, self.low = "higher", max(self.low, number + 1)
        else:
            direction, self.high = "lower", min(self.high, number - 1)
        if self.turns == TURNS:
            return self._end(f"{direction}, and no turns left; it was {self.secret}")
        return GuessReply(f"{direction} {self.low}..{self.high}", done=False, won=False)

    def _end(self, text: str, *, won: bool = False) -> GuessReply:
        self.done, self.won = True, won
        return GuessReply(text, done=True, won=won)


def sloppy_reply(game: Game, rng: random.Random, *, attention: float) -> str:
    """Return one reply of the player whom the starting weights imitate, who seldom listens.

    attention: the share of turns, 0 to 1, in which the player picks a number from the open range. In the other turns it
        picks any number.
    The player wins 34 % of its games with attention 0, 45 % with 0.25, and 76 % with 1.
    """
    if rng.random() < attention:
        return str(rng.randint(game.low, game.high))
    return str(rng.randrange(NUMBERS))


def sloppy_probability(game: Game, reply: str, *, attention: float) -> float:
    """Return the probability that `sloppy_reply` returns `reply`.

    reply: the text of a number from 0 to NUMBERS - 1.
    """
    listening = 1 / (game.high - game.low + 1) if game.low <= int(reply) <= game.high else 0.0
    return attention * listening + (1 - attention) / NUMBERS
