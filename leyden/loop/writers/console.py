"""`ConsoleWriter`: rows as lines for a person."""

from __future__ import annotations

import sys
from typing import TextIO

from leyden.loop.metrics import MetricsRow, MetricValue
from leyden.loop.writers.base import LogWriter

__all__ = ["ConsoleWriter", "one_line"]


class ConsoleWriter(LogWriter):
    """One line for each row: `[  12] train  reward 0.5312  loss 0.1200`.

    stream: where to; None: what `sys.stdout` is at the time of each row.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, row: MetricsRow) -> None:
        """Print the row."""
        metrics = "".join(f"  {name} {_shown(value)}" for name, value in row.metrics.items())
        stream = self._stream or sys.stdout
        stream.write(f"[{row.iteration:4d}] {row.stage:5s}{metrics}\n")
        stream.flush()


def _shown(value: MetricValue) -> str:
    return f"{value:.4f}" if isinstance(value, float) else one_line(str(value))


def one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return "".join(character if character.isprintable() else " " for character in text)
