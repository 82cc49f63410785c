"""Whoever hears of what happens in environments: the part of `leyden.loop.LogWriter` that they know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from leyden.loop import EpisodeStats


class EnvWriter(Protocol):
    """What a vectorised environment tells a writer, in the process that it was made in."""

    @property
    def wants_steps(self) -> bool:
        """Whether `on_env_step` is to be called: then workers send what each step logged."""
        ...

    def on_env_all_ready(self) -> None:
        """A collect begins."""
        ...

    def on_env_reset(self, env_id: int, obs: Any, /) -> None:
        """An episode has begun."""
        ...

    def on_env_step(self, env_id: int, obs: Any, reward: float, done: bool, info: Mapping[str, Any], /) -> None:
        """A step has been made."""
        ...

    def log_episode(self, episode: EpisodeStats, /) -> None:
        """An episode has ended."""
        ...

    def on_env_all_done(self) -> None:
        """The collect is over."""
        ...
