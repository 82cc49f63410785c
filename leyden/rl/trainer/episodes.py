"""`EpisodeMetrics`: the episodes of one stage, made one value for each metric."""

from __future__ import annotations

from leyden.loop import EpisodeStats, LogBuffer, LogWriter, Row

__all__ = ["EpisodeMetrics"]


class EpisodeMetrics(LogWriter):
    """A writer that only counts: means over the episodes since `clear`. A metric that some episodes lack is averaged over the others."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = LogBuffer({})
        self.count = 0

    def clear(self) -> None:
        """Another stage begins."""
        self._buffer.clear()
        self.count = 0

    def log_episode(self, episode: EpisodeStats) -> None:
        """One more."""
        self.count += 1
        self._buffer.add({**episode.logs, "reward": episode.reward, "steps_per_episode": float(episode.length)})

    def metrics(self) -> dict[str, float]:
        """One value for each metric."""
        return self._buffer.metrics()

    def write(self, row: Row) -> None:
        """Rows of stages are for others."""
