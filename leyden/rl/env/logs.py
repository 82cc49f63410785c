"""What environments log: values with a level, and whoever hears of them. The one place where `leyden.rl.env` names the loop's logging."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import numpy as np

from leyden.errors import InvalidMetrics
from leyden.rl.episode import EpisodeStats

__all__ = ["EnvWriter", "LogCollector", "LogLevel", "Logs"]

Logs: TypeAlias = dict[str, tuple[int, Any]]
"""name -> (level, value)."""


class LogLevel(IntEnum):
    """How much a value matters; a collector drops those below its own level."""

    DEBUG = 10
    PERIODIC = 20
    INFO = 30
    CRITICAL = 40


class LogCollector:
    """The values of one step."""

    def __init__(self, min_loglevel: int = LogLevel.PERIODIC) -> None:
        self.min_loglevel = min_loglevel
        self._logs: Logs = {}

    def add_string(self, name: str, value: str, loglevel: int = LogLevel.PERIODIC) -> None:
        """Note a string."""
        self._add(name, value, loglevel)

    def add_scalar(self, name: str, value: Any, loglevel: int = LogLevel.PERIODIC) -> None:
        """Note a number, or anything with one in its `item()`."""
        if type(value) is not float:
            number: Any = value.item() if hasattr(value, "item") else value
            if not isinstance(number, int | float):
                raise InvalidMetrics(f"metric {name!r} is {value!r}; add_scalar takes numbers")
            value = float(number)
        self._add(name, value, loglevel)

    def add_array(self, name: str, value: Any, loglevel: int = LogLevel.PERIODIC) -> None:
        """Note an array."""
        self._add(name, value if hasattr(value, "columns") else np.asarray(value), loglevel)

    def add_any(self, name: str, value: Any, loglevel: int = LogLevel.PERIODIC) -> None:
        """Note anything."""
        self._add(name, value, loglevel)

    def logs(self) -> Logs:
        """What was noted since the last `reset`."""
        return dict(self._logs)

    def reset(self) -> None:
        """Forget everything."""
        self._logs.clear()

    def _add(self, name: str, value: Any, loglevel: int) -> None:
        if loglevel < self.min_loglevel:
            return
        if name in self._logs:
            raise InvalidMetrics(f"metric {name!r} was logged twice in one step; use two names, or log their sum")
        self._logs[name] = (int(loglevel), value)


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
