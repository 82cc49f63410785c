"""Qlib's collectors and writers of logs.

They differ from Leyden's in their arguments and their calls: at the end of an episode, a writer's `log_episode(length,
rewards, contents)` is called, with the logged contents of each step. A writer that overrides no method writes nothing.
"""

from __future__ import annotations

import csv
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from leyden.errors import ConfigError
from leyden.training import LogBuffer as NativeLogBuffer
from leyden.training import LogCollector as NativeLogCollector
from leyden.training import LogLevel
from leyden.training import LogWriter as NativeLogWriter

_COUNTERS: Final = ("episode_count", "step_count", "global_step", "global_episode")
"""The attributes of a writer that are its state."""


class LogCollector(NativeLogCollector):
    """Collects the values of one step. Raise ConfigError for a name that is added twice in a step."""

    def _add(self, name: str, value: Any, loglevel: int) -> None:
        if name in self._logs:
            raise ConfigError(
                f"the metric {name!r} is added twice in one step; use another name, or reset the collector"
            )
        super()._add(name, value, loglevel)

    def logs(self) -> dict[str, Any]:
        """Return the logged values by name, each an array of two objects: level and value."""
        pairs: dict[str, Any] = {}
        for name, (level, value) in super().logs().items():
            pair = pairs[name] = np.empty(2, object)
            pair[0], pair[1] = level, value
        return pairs


class LogWriter(NativeLogWriter):
    """The base class of writers, which writes nothing itself.

    Override `log_episode(length, rewards, contents)`, `log_step(reward, contents)` or any of the `on_env_...` methods.
    """

    def __init__(self, loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(loglevel)

    def __class_getitem__(cls, types: Any) -> type[LogWriter]:
        return cls

    def __init_subclass__(cls, **options: Any) -> None:
        own: Callable[..., None] | None = cls.__dict__.get("log_episode")
        super().__init_subclass__(**options)
        if own is not None:
            cls.log_episode = _of_either_form(own, cls.log_episode)

    @staticmethod
    def aggregation(array: Sequence[Any], name: str | None = None) -> Any:
        """Return the sum of rewards, the mean of other floats, or else the first value."""
        if not len(array):
            raise AssertionError("the values to aggregate are empty; an episode has at least one step")
        if all(isinstance(value, float) for value in array):
            return np.sum(array) if name == "reward" else np.mean(array)
        return array[0]

    def log_episode(  # pyright: ignore[reportIncompatibleMethodOverride] -- Qlib's form, which the base class takes too
        self, length: int, rewards: list[float], contents: list[dict[str, Any]]
    ) -> None:
        """Handle the end of an episode: its rewards and its logged contents, one for each step."""

    @property
    def active_env_ids(self) -> set[int]:
        """The ids of the environments that have an episode under way."""
        return set(self._running)

    @property
    def episode_lengths(self) -> dict[int, int]:
        """The steps of each environment's episode so far, by environment."""
        return {env: running.length for env, running in self._running.items()}

    @property
    def episode_rewards(self) -> dict[int, list[float]]:
        """The rewards of each environment's episode so far, by environment."""
        return {env: running.rewards for env, running in self._running.items()}

    @property
    def episode_logs(self) -> dict[int, list[dict[str, Any]]]:
        """The contents of the steps of each environment's episode so far."""
        return {env: running.contents for env, running in self._running.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. Episodes under way are not part of the state."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counters."""
        for name in _COUNTERS:
            setattr(self, name, int(state.get(name, 0)))


def _of_either_form(own: Callable[..., None], native: Callable[..., None]) -> Callable[..., None]:
    """Return a `log_episode` for both kinds of callers: an environment passes one EpisodeStats to `native`, a subclass
    passes Qlib's three values to `own`.
    """

    @functools.wraps(own)
    def log_episode(self: Any, *values: Any, **named: Any) -> None:
        if len(values) == 1 and not named:
            native(self, *values)
        else:
            own(self, *values, **named)

    return log_episode


LogWriter.log_episode = _of_either_form(LogWriter.__dict__["log_episode"].__wrapped__, LogWriter.log_episode)


class LogBuffer(NativeLogBuffer):
    """Keeps the metrics of the newest episode and of the present collection, and reports each change to a callback."""

    def collect_metrics(self) -> dict[str, float]:
        """Return each metric's mean over all episodes of this collection. As in Qlib, an episode without the metric
        counts as 0.
        """
        return {name: total / self.episode_count for name, total in self._sums.items()}


def _of_episode(contents: list[dict[str, Any]], kinds: tuple[type, ...]) -> dict[str, Any]:
    """Return the aggregate of each logged name over an episode's steps.

    kinds: the types of values to keep; other values are ignored.
    """
    values: dict[str, list[Any]] = {}
    for step in contents:
        for name, value in step.items():
            if isinstance(value, kinds):
                values.setdefault(name, []).append(value)
    return {name: LogWriter.aggregation(several, name) for name, several in values.items()}


class ConsoleWriter(LogWriter):
    """Logs every n-th episode: each metric, and in parentheses its mean over this collection so far.

    The lines go to the logger `qlib.rl.utils.log`, and to the terminal if no handler is configured. Each line begins
    with the attribute `prefix`.

    log_every_n_episode: n.
    total_episodes: the number of episodes of a collection, for the beginning of each line; the last one is always
        logged. None: unknown.
    float_format, counter_format: format specs, with their colon, of metrics and of the count.
    """

    def __init__(
        self,
        log_every_n_episode: int = 20,
        total_episodes: int | None = None,
        float_format: str = ":.4f",
        counter_format: str = ":4d",
        loglevel: int = LogLevel.PERIODIC,
    ) -> None:
        super().__init__(loglevel)
        self.log_every_n_episode, self.total_episodes = log_every_n_episode, total_episodes
        self.float_format, self.counter_format = float_format, counter_format
        self.prefix = ""
        self.console_logger = module_logger("qlib.rl.utils.log")
        self.clear()

    def clear(self) -> None:
        """Reset the counters and the means."""
        super().clear()
        self.metric_counts: dict[str, int] = {}
        self.metric_sums: dict[str, float] = {}

    def log_episode(self, length: int, rewards: list[float], contents: list[dict[str, Any]]) -> None:
        """Add the episode to the means, and log it if it is the n-th or the last one."""
        values = _of_episode(contents, (float,))
        for name, value in values.items():
            self.metric_counts[name] = self.metric_counts.get(name, 0) + 1
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value
        if self.episode_count % self.log_every_n_episode == 0 or self.episode_count == self.total_episodes:
            self.console_logger.info(self.generate_log_message(values))

    def generate_log_message(self, logs: dict[str, float]) -> str:
        """Return the line of an episode."""
        count = ("{" + self.counter_format + "}").format(self.episode_count)
        begin = f"[Step {count}]" if self.total_episodes is None else f"[{count}/{self.total_episodes}]"
        figure = "{" + self.float_format + "}"
        shown = "".join(
            f"  {name} {figure.format(value)} ({figure.format(self.metric_sums[name] / self.metric_counts[name])})"
            for name, value in logs.items()
        )
        return f"{self.prefix + ' ' if self.prefix else ''}{begin} {shown}"


class CsvWriter(LogWriter):
    """Writes `result.csv` to a directory at the end of a collection: one row for each episode.

    output_dir: made if it is missing; its parent must exist.
    """

    SUPPORTED_TYPES = (float, str, np.datetime64)

    def __init__(self, output_dir: Path, loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(loglevel)
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(exist_ok=True)
        self.clear()

    def clear(self) -> None:
        """Reset the counters, and drop the rows."""
        super().clear()
        self.all_records: list[dict[str, Any]] = []

    def log_episode(self, length: int, rewards: list[float], contents: list[dict[str, Any]]) -> None:
        """Keep the episode's row."""
        self.all_records.append(_of_episode(contents, (*self.SUPPORTED_TYPES, *_timestamps())))

    def on_env_all_done(self) -> None:
        """Write the file, replacing an older one."""
        columns = list(dict.fromkeys(name for record in self.all_records for name in record))
        with (self.output_dir / "result.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, columns, restval="")
            table.writeheader()
            table.writerows(self.all_records)


def _timestamps() -> tuple[type, ...]:
    """Return pandas' Timestamp as a type to write, if the program has loaded pandas."""
    import sys

    pandas: Any = sys.modules.get("pandas")
    return () if pandas is None else (pandas.Timestamp,)


def module_logger(name: str, level: int = logging.INFO) -> logging.Logger:
    """Return the logger of a name at `level`. Without a handler, its lines go to the terminal."""
    found = logging.getLogger(name)
    found.setLevel(level)
    if not found.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        logging.getLogger("qlib").addHandler(handler)
    return found
