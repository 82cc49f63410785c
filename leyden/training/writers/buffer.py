"""`LogBuffer`: keeps the metrics of the episodes of a collect, and calls a function at each change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from leyden.errors import ConfigError
from leyden.training.metrics import EpisodeStats, LogLevel
from leyden.training.writers.log_writer import LogWriter

BufferCallback: TypeAlias = "Callable[[bool, bool, LogBuffer], None]"


class LogBuffer(LogWriter):
    """Keeps the metrics of the newest episode and their means over the collect; writes nothing.

    callback: called as `callback(on_episode, on_collect, log_buffer)`: with (True, False, self) after each episode, and
        with (False, True, self) at the end of a collect. `rl.Trainer` keeps its `metrics` up to date in this way.
    loglevel: take values logged at this level or above.

    An episode's metrics are its `reward`, `steps_per_episode`, and one value for each name that was logged in it. A
    metric that some episodes lack is averaged over the episodes that have it (Qlib divides by all).
    """

    def __init__(self, callback: BufferCallback, loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(loglevel)
        self.callback = callback
        self._reset()

    def _reset(self) -> None:
        self._latest: dict[str, float] | None = None
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def clear(self) -> None:
        super().clear()
        self._reset()

    def log_episode(self, episode: EpisodeStats) -> None:
        latest = {**episode.logs, "reward": episode.reward, "steps_per_episode": float(episode.length)}
        sums, counts = self._sums, self._counts
        for name, value in latest.items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1
        self._latest = latest
        self.callback(True, False, self)

    def on_env_all_done(self) -> None:
        self.callback(False, True, self)

    def episode_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest episode.

        Raise ConfigError (a ValueError) if none has ended in this collect.
        """
        if self._latest is None:
            raise ConfigError("no episode has ended yet in this collect; ask after the callback had on_episode=True")
        return dict(self._latest)

    def collect_metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the episodes of this collect so far; empty if none has ended."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        own = {"latest_metrics": self._latest, "aggregated_metrics": self._sums, "counts": self._counts}
        return {**super().state_dict(), **{name: value and dict(value) for name, value in own.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._latest = state["latest_metrics"]
        self._sums, self._counts = dict(state["aggregated_metrics"]), dict(state["counts"])
