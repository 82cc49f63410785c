"""`EpisodeLost`, an episode that a vectorised environment could not finish, and `EnvWriter`.

A finished episode is described by `leyden.training.EpisodeStats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from leyden.training import EpisodeStats


@dataclass(frozen=True, slots=True)
class EpisodeLost:
    """An episode that was not finished: its simulator failed or hung, or its worker died."""

    env_id: int
    seed_index: int | None
    """The position of the episode's seed in the data set; None for an episode without a seed."""
    seed_number: int | None
    """The number of seeds that were taken before the episode's own; None without a seed."""
    step: int
    """The number of steps that the episode had made."""
    reason: str
    """Why it was lost, in one line."""
    again: bool = False
    """Whether the seed will be run again; False: it is left out of the collect."""


class EnvWriter(Protocol):
    """The methods of `leyden.training.LogWriter` that a vectorised environment calls.

    They are called in the process that made the vectorised environment, never in a worker.
    """

    @property
    def wants_steps(self) -> bool:
        """Whether `on_env_step` is to be called. Workers then send the values of every step."""
        ...

    def on_env_all_ready(self) -> None:
        """Called at the beginning of a collect, before any episode begins."""
        ...

    def on_env_reset(self, env_id: int, obs: Any, /) -> None:
        """Called when an environment begins an episode.

        obs: its first observation.
        """
        ...

    def on_env_step(self, env_id: int, obs: Any, reward: float, done: bool, info: Mapping[str, Any], /) -> None:
        """Called after each step, with its result.

        done: the episode has ended.
        """
        ...

    def log_episode(self, episode: EpisodeStats, /) -> None:
        """Called with the statistics of each episode that has ended."""
        ...

    def on_env_all_done(self) -> None:
        """Called at the end of a collect, when all environments have stopped."""
        ...
