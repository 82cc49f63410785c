"""Guess the number: the demo's multi-turn game.

The game picks a number from 0 to 9 and the player has four turns. Each answer says whether the number is higher or
lower, and which range is still open, in few tokens: `guess 0..9`, `higher 6..9`, `lower 6..7`, `right`. Perfect play
(halve the range) always wins; a player who ignores the answers wins one game in three.

This module knows neither models nor Leyden's store and gateway; an agent is whatever turns the last message into a
reply. To change the difficulty, change `NUMBERS` and `TURNS` and make the starting weights again (`make_weights`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from leyden.errors import ConfigError

NUMBERS = 10
"""The secret is one of 0 .. NUMBERS - 1; each is a single digit, hence a single token."""
TURNS = 4
"""Guesses in one game: the fewest with which halving the range always finds one of 10 numbers."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the game answers to one guess."""

    text: str
    """What the player reads next; after the last guess, how the game ended."""
    done: bool
    """No further guess is taken."""
    won: bool
    """The guess was the secret; implies `done`."""


@dataclass(slots=True)
class Game:
    """One game, from its first prompt to its end.

    secret: the number to find, 0 .. NUMBERS - 1; ConfigError otherwise.

    At every moment `0 <= low <= secret <= high < NUMBERS`.
    """

    secret: int
    low: int = field(default=0, init=False)
    """The smallest number that the answers so far leave open."""
    high: int = field(default=NUMBERS - 1, init=False)
    """The largest number that the answers so far leave open."""
    turns: int = field(default=0, init=False)
    """Guesses taken so far, at most TURNS."""
    done: bool = field(default=False, init=False)
    won: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.secret < NUMBERS:
            raise ConfigError(f"the secret is {self.secret}; it must be one of 0 to {NUMBERS - 1}")

    def prompt(self) -> str:
        """The player's first message: the range of all numbers, whatever the secret is."""
        return f"guess 0..{NUMBERS - 1}"

    def guess(self, text: str) -> Feedback:
        """Take the player's reply as the next guess.

        text: anything at all. A whole number is a guess, even one outside the open range (it teaches nothing); every
        other text loses the game at once.
        Raises ConfigError when the game is over: start another one.
        """
        if self.done:
            raise ConfigError(f"this game ended after {self.turns} turns; start a new Game to play on")
        self.turns += 1
        number = _whole_number(text)
        if number is None:
            return self._end(f"not a number; it was {self.secret}")
        if number == self.secret:
            return self._end("right", won=True)
        if number < self.secret:
            direction, self.low = "higher", max(self.low, number + 1)
        else:
            direction, self.high = "lower", min(self.high, number - 1)
        if self.turns == TURNS:
            return self._end(f"{direction}, and no turns left; it was {self.secret}")
        return Feedback(f"{direction} {self.low}..{self.high}", done=False, won=False)

    def _end(self, text: str, *, won: bool = False) -> Feedback:
        self.done, self.won = True, won
        return Feedback(text, done=True, won=won)


def sloppy_reply(game: Game, rng: random.Random, *, attention: float) -> str:
    """One reply of a player who knows the rules and seldom listens: the teacher of the starting weights.

    attention: the share of turns, 0 to 1, in which it picks from the range still open; in the others, any number.
    The same `rng` state gives the same reply. With attention 0 it wins 34 % of its games, with 0.25 45 %, with 1 76 %.
    """
    if rng.random() < attention:
        return str(rng.randint(game.low, game.high))
    return str(rng.randrange(NUMBERS))


def sloppy_probability(game: Game, reply: str, *, attention: float) -> float:
    """Return the probability with which `sloppy_reply` gives a reply: a number from 0 to NUMBERS - 1."""
    listening = 1 / (game.high - game.low + 1) if game.low <= int(reply) <= game.high else 0.0
    return attention * listening + (1 - attention) / NUMBERS


def _whole_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:  # also what int() raises for thousands of digits
        return None
