"""Writers with a file: the base class `FileWriter`, `AppendingWriter`, to which others add bytes, `JsonlWriter`."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any

from leyden._lib.atomic import append_privately
from leyden._lib.json import json_line
from leyden._lib.options import check_path
from leyden.errors import CheckpointError, ConfigError
from leyden.training.metrics import LogLevel, Row, RowKind
from leyden.training.writers.log_writer import LogWriter


class FileWriter(LogWriter):
    """Writes to one file, which is open from `open` to `close`."""

    _file: IO[Any] | None = None

    def __init__(self, path: str | Path, *, example: str, rows: RowKind, loglevel: int) -> None:
        """
        example: a file name, for the message about a path that is none or is a directory.
        Raise ConfigError for such a path.
        """
        super().__init__(rows=rows, loglevel=loglevel)
        name = type(self).__name__
        check_path(f"{name}'s path", path, example=example)
        self.path = Path(path)
        if self.path.is_dir():
            raise ConfigError(
                f"{name}({str(path)!r}): that is a directory; give the file, such as {str(self.path / example)!r}"
            )

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint: one for each file name."""
        return f"{type(self).__name__.lower()}:{self.path.name}"

    def close(self) -> None:
        self._sync()
        if self._file:
            self._file.close()
        self._file = None

    def _sync(self) -> None:
        if self._file:
            os.fsync(self._file.fileno())

    def _opened(self) -> IO[Any]:
        assert self._file is not None, f"{type(self).__name__}({str(self.path)!r}) is not open"
        return self._file


class AppendingWriter(FileWriter, ABC):
    """Appends rows to one file. Subclasses implement `encode`, and `header` if the file has one.

    A new run replaces the file; a resumed one cuts it after the bytes that its checkpoint counts, so no row is lost or
    doubled. A kill loses no row whose `write` has returned.
    """

    def __init__(self, path: str | Path, *, rows: RowKind = "stage", loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(path, example="result.jsonl", rows=rows, loglevel=loglevel)
        self._bytes = 0
        """The length of the file so far."""
        self._resume: int | None = None
        """The length at which the next `open` cuts the file; None: it begins an empty one."""

    @abstractmethod
    def encode(self, row: Row) -> bytes:
        """Return the bytes that the row adds to the file."""

    def header(self) -> bytes:
        """Return the bytes that the file begins with."""
        return b""

    def open(self) -> None:
        """Open the file: empty for a new run, cut to the checkpoint's length for a resumed one.

        Raise CheckpointError if the file is shorter than the checkpoint says.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes, self._resume = self._resume or 0, None
        self._file = append_privately(self.path)
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

    def state_dict(self) -> dict[str, Any]:
        self._sync()
        return {**super().state_dict(), "bytes": self._bytes if self._resume is None else self._resume}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._resume = state["bytes"]

    def _add(self, content: bytes) -> None:
        file = self._opened()
        file.write(content)
        file.flush()
        self._bytes = file.tell()


class JsonlWriter(AppendingWriter):
    """Writes one line of JSON for each row, such as {"iteration": 1, "stage": "train", ...}.

    NaN and infinity are written as null, because JSON lacks them. A new run replaces the file; a resumed one cuts it
    after the rows that its checkpoint counts.
    """

    def encode(self, row: Row) -> bytes:
        return json_line(row.flat()).encode()
