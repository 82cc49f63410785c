"""`ConsoleWriter`: rows as lines for a person."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

from leyden._lib.formatting import figure, one_line, printable_on
from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.training.metrics import EpisodeRow, LogLevel, MetricsAggregator, MetricsRow, Row, RowKind, StepRow
from leyden.training.writers.log_writer import LogWriter

_MAX_METRICS = 5
"""Metrics that fit in one line of a terminal."""
_FIRST = ("reward", "loss", "entropy", "kl", "tokens_per_second", "failed")
"""The metrics that say most about a run, the most important one first."""


class ConsoleWriter(LogWriter):
    """Prints one line for each row, such as `[  12] train  reward 0.5312  loss 0.12`.

    stream: where to print; None: to `sys.stdout`, as it is at the time of each row.
    metrics: names of the metrics to print, in this order; "all" for all of them. None: at most five, with the reward
        and the loss before others.
    digits: significant digits of a number.
    rows: "stage", "episode" or "step". A line of an episode has each value and in parentheses its
        mean since the collect began, `[  20/100] train episode 20  reward 1.0000 (0.9000)`.
    log_every_n_episode: print every n-th episode of a collect.
    total_episodes: the number of episodes in a collect. It is shown, and the last episode is always printed; None:
        unknown.
    loglevel: print the values that a step logged at this level or above.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        metrics: Sequence[str] | Literal["all"] | None = None,
        digits: int = 4,
        rows: RowKind = "stage",
        loglevel: int = LogLevel.PERIODIC,
        log_every_n_episode: int = 1,
        total_episodes: int | None = None,
    ) -> None:
        super().__init__(rows=rows, loglevel=loglevel)
        check_number("log_every_n_episode", log_every_n_episode, at_least=1, whole=True)
        check_number("total_episodes", total_episodes, at_least=0, whole=True, or_none="an unknown number")
        if isinstance(metrics, str) and metrics != "all":
            raise ConfigError(f"metrics is {metrics!r}; give a list of names, [{metrics!r}], or 'all'")
        check_number("digits", digits, at_least=1, whole=True)
        self._names = metrics if metrics is None or isinstance(metrics, str) else tuple(metrics)
        self._digits = digits
        self._stream, self._every, self._total = stream, log_every_n_episode, total_episodes
        self._means = MetricsAggregator({})

    def clear(self) -> None:
        super().clear()
        self._means.clear()

    def write(self, row: Row) -> None:
        if isinstance(row, EpisodeRow):
            line = self._episode(row)
        elif isinstance(row, StepRow):
            values = {name: value for name, value in row.flat().items() if name not in ("iteration", "stage", "step")}
            line = f"[{row.step:4d}] {row.stage:5s}" + self._listed(values)
        elif isinstance(row, MetricsRow):
            line = f"[{row.iteration:4d}] {row.stage:5s}" + self._listed(row.metrics)
        else:
            line = self._listed(row.flat()).strip()
        if line is not None:
            stream = self._stream or sys.stdout
            stream.write(printable_on(stream, one_line(line)) + "\n")
            stream.flush()

    def _episode(self, row: EpisodeRow) -> str | None:
        """Return the line of an episode; None if this one is not to be printed."""
        values = {**row.stats.logs, "reward": row.stats.reward, "length": row.stats.length}
        self._means.add(values)
        if self.episode_count % self._every and self.episode_count != self._total:
            return None
        means = self._means.metrics()
        shown = "".join(
            f"  {name} {self._shown(values[name])} ({self._shown(means[name])})" for name in self._chosen(values)
        )
        of = "" if self._total is None else f"/{self._total}"
        return f"[{self.episode_count:4d}{of}] {row.stage:5s} episode {row.episode}{shown}"

    def _listed(self, values: Mapping[str, Any]) -> str:
        return "".join(f"  {name} {self._shown(values[name])}" for name in self._chosen(values))

    def _chosen(self, values: Mapping[str, Any]) -> Sequence[str]:
        if self._names is None:
            if len(values) <= _MAX_METRICS:
                return list(values)
            return list(dict.fromkeys([*(name for name in _FIRST if name in values), *values]))[:_MAX_METRICS]
        return list(values) if isinstance(self._names, str) else [name for name in self._names if name in values]

    def _shown(self, value: Any) -> str:
        if isinstance(value, (int, float)):
            return figure(value, self._digits)
        return one_line(str(value))
