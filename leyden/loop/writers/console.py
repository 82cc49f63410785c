"""`ConsoleWriter`: rows as lines for a person."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from leyden.errors import ConfigError
from leyden.loop.metrics import EpisodeRow, LogLevel, MetricsAggregator, MetricsRow, Row, RowKind, StepRow
from leyden.loop.writers.base import LogWriter

__all__ = ["ConsoleWriter", "one_line"]


class ConsoleWriter(LogWriter):
    """One line for each row: `[  12] train  reward 0.5312  loss 0.1200`.

    stream: where to; None: what `sys.stdout` is at the time of each row.
    rows: "stage", "episode" or "step". Of episodes: a value, and in parentheses its mean since the collect began,
        `[  20/100] train episode 20  reward 1.0000 (0.9000)`.
    log_every_n_episode: print the episodes whose count in the collect is a multiple of it, and the last of `total_episodes`.
    loglevel: of the steps' contents; see `LogWriter`.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        rows: RowKind = "stage",
        loglevel: int = LogLevel.PERIODIC,
        log_every_n_episode: int = 1,
        total_episodes: int | None = None,
    ) -> None:
        super().__init__(rows=rows, loglevel=loglevel)
        if log_every_n_episode < 1:
            raise ConfigError(f"log_every_n_episode is {log_every_n_episode}; it must be at least 1")
        self._stream, self._every, self._total = stream, log_every_n_episode, total_episodes
        self._means = MetricsAggregator({})

    def clear(self) -> None:
        """Forget the means too."""
        super().clear()
        self._means.clear()

    def write(self, row: Row) -> None:
        """Print the row."""
        if isinstance(row, EpisodeRow):
            line = self._episode(row)
        elif isinstance(row, StepRow):
            values = {name: value for name, value in row.flat().items() if name not in ("iteration", "stage", "step")}
            line = f"[{row.step:4d}] {row.stage:5s}" + _listed(values)
        elif isinstance(row, MetricsRow):
            line = f"[{row.iteration:4d}] {row.stage:5s}" + _listed(row.metrics)
        else:
            line = _listed(row.flat()).strip()
        if line is not None:
            stream = self._stream or sys.stdout
            stream.write(line + "\n")
            stream.flush()

    def _episode(self, row: EpisodeRow) -> str | None:
        values = {**row.stats.logs, "reward": row.stats.reward, "length": row.stats.length}
        self._means.add(values)
        if self.episode_count % self._every and self.episode_count != self._total:
            return None
        means = self._means.metrics()
        shown = "".join(f"  {name} {_shown(value)} ({means[name]:.4f})" for name, value in values.items())
        of = "" if self._total is None else f"/{self._total}"
        return f"[{self.episode_count:4d}{of}] {row.stage:5s} episode {row.episode}{shown}"


def _listed(values: Mapping[str, Any]) -> str:
    return "".join(f"  {name} {_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else one_line(str(value))


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return "".join(character if character.isprintable() else " " for character in text)
