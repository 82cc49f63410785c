"""`JsonlWriter`: rows as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from leyden.errors import CheckpointError
from leyden.loop.metrics import MetricsRow, MetricValue
from leyden.loop.writers.base import LogWriter

__all__ = ["JsonlWriter"]


class JsonlWriter(LogWriter):
    """A JSON object for each row, with the keys of the CSV's columns. NaN and infinities are null, which strict readers accept.

    A new run replaces the file; a resumed one cuts it after the rows that its checkpoint counts.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._bytes = 0
        self._resume: dict[str, Any] | None = None
        self._file: IO[bytes] | None = None

    @property
    def state_key(self) -> str:
        """One for each file name."""
        return f"jsonlwriter:{self.path.name}"

    def open(self) -> None:
        """Begin the file, or cut it. Raises CheckpointError if the file is shorter than the checkpoint says."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state, self._resume = self._resume or {"bytes": 0}, None
        self._bytes = state["bytes"]
        self._file = self.path.open("ab")
        size = self._file.tell()
        if size < self._bytes:
            raise CheckpointError(
                f"{self.path} has {size} bytes, the checkpoint counts {self._bytes}; "
                "put the file back, or give JsonlWriter another path"
            )
        self._file.truncate(self._bytes)
        self._file.seek(self._bytes)

    def write(self, row: MetricsRow) -> None:
        """Add a line; a kill loses none that was added."""
        line = json.dumps({name: _finite(value) for name, value in row.flat().items()}, allow_nan=False) + "\n"
        file = self._opened()
        file.write(line.encode())
        file.flush()
        self._bytes = file.tell()

    def close(self) -> None:
        """Close the file; all of it is on disk then."""
        if self._file:
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Bytes so far, on disk."""
        if self._file:
            os.fsync(self._file.fileno())
        return {"bytes": self._bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep so many bytes."""
        self._resume = state

    def _opened(self) -> IO[bytes]:
        assert self._file is not None, f"JsonlWriter({str(self.path)!r}) is not open"
        return self._file


def _finite(value: MetricValue) -> MetricValue | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
