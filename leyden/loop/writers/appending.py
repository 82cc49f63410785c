"""`AppendingWriter`: the base of writers that append the bytes of each row to a file."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any

from leyden.errors import CheckpointError
from leyden.loop.metrics import LogLevel, Row, RowKind
from leyden.loop.writers.base import LogWriter, file_path


class AppendingWriter(LogWriter, ABC):
    """Appends rows to one file. Subclasses implement `encode`, and `header` if the file has one.

    A new run replaces the file; a resumed one cuts it after the bytes that its checkpoint counts,
    so no row is lost or doubled. A kill loses no row whose `write` has returned.
    """

    def __init__(self, path: str | Path, *, rows: RowKind = "stage", loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(rows=rows, loglevel=loglevel)
        self.path = file_path(path, self, "result.jsonl")
        self._bytes = 0
        """The length of the file so far."""
        self._resume: int | None = None
        """The length at which the next `open` cuts the file; None: it begins an empty one."""
        self._file: IO[bytes] | None = None

    @abstractmethod
    def encode(self, row: Row) -> bytes:
        """Return the bytes that the row adds to the file."""

    def header(self) -> bytes:
        """Return the bytes that the file begins with."""
        return b""

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint: one for each file name."""
        return f"{type(self).__name__.lower()}:{self.path.name}"

    def open(self) -> None:
        """Open the file: empty for a new run, cut to the checkpoint's length for a resumed one.

        Raise CheckpointError if the file is shorter than the checkpoint says.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes, self._resume = self._resume or 0, None
        self._file = self.path.open("ab")
        size = self._file.tell()
        if size < self._bytes:
            raise CheckpointError(
                f"{self.path} has {size} bytes, the checkpoint counts {self._bytes}; "
                f"put the file back, or give {type(self).__name__} another path"
            )
        self._file.truncate(self._bytes)
        self._file.seek(self._bytes)
        if self._bytes == 0:
            self._add(self.header())

    def write(self, row: Row) -> None:
        """Append a row. Rows that were appended survive a kill of the process."""
        self._add(self.encode(row))

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if self._file:
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the number of bytes written so far, which are durable."""
        if self._file:
            os.fsync(self._file.fileno())
        return {**super().state_dict(), "bytes": self._bytes if self._resume is None else self._resume}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `open` keep the bytes that `state` counts, and cut off the rest."""
        super().load_state_dict(state)
        self._resume = state["bytes"]

    def _add(self, content: bytes) -> None:
        assert self._file is not None, f"{type(self).__name__}({str(self.path)!r}) is not open"
        self._file.write(content)
        self._file.flush()
        self._bytes = self._file.tell()
