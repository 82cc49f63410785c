"""`CsvWriter`: rows as a table that spreadsheets and pandas read."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from leyden.errors import CheckpointError
from leyden.loop.metrics import ROW_KINDS, LogLevel, Row, RowKind
from leyden.loop.writers.base import LogWriter, file_path
from leyden.utils.atomic import open_aside


class CsvWriter(LogWriter):
    """Write one line of CSV for each row. For a stage that is iteration, stage, seconds, then a
    column for each metric; a metric that the row lacks is empty.

    path: of the file; a directory is refused (ConfigError).
    rows: "stage", "episode" or "step"; the first columns are the `fields` of that kind of row.
    Lists are written as JSON.
    loglevel: of the steps' contents; see `LogWriter`.

    A metric that appears later adds a column: the file is written anew, aside. A new run replaces
    the file; a resumed one cuts it after the rows that its checkpoint counts. Numbers are written
    so that reading them gives the same number.
    """

    def __init__(self, path: str | Path, *, rows: RowKind = "stage", loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(rows=rows, loglevel=loglevel)
        self.path = file_path(path, self, "result.csv")
        self._columns: list[str] = []
        self._n_rows = 0
        self._resume: dict[str, Any] | None = None
        self._file: IO[str] | None = None

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint: one for each file name."""
        return f"csvwriter:{self.path.name}"

    def open(self) -> None:
        """Begin the file, or cut it.

        Raise CheckpointError if the file lacks rows that the checkpoint counts.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state, self._resume = self._resume or {"rows": 0, "columns": ROW_KINDS[self.row_kind].fields}, None
        self._n_rows, self._columns = state["rows"], list(state["columns"])
        self._rewrite(self._read(self._n_rows))

    def write(self, row: Row) -> None:
        """Append a row. Rows that were appended survive a kill of the process."""
        values = {
            name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in row.flat().items()
        }
        if new := [name for name in values if name not in self._columns]:
            before = self._read(self._n_rows)
            self._columns += new
            self._rewrite(before)
        file = self._opened()
        csv.DictWriter(file, self._columns).writerow(values)
        file.flush()
        self._n_rows += 1

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if self._file:
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows and the columns written so far. They are durable."""
        if self._file:
            os.fsync(self._file.fileno())
        so_far = self._resume or {"rows": self._n_rows, "columns": list(self._columns)}
        return {**super().state_dict(), **so_far}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the rows that `state` counts. `open` drops later rows, and columns that
        only they had.
        """
        super().load_state_dict(state)
        self._resume = {"rows": state["rows"], "columns": list(state["columns"])}

    def _opened(self) -> IO[str]:
        assert self._file is not None, f"CsvWriter({str(self.path)!r}) is not open"
        return self._file

    def _read(self, n_rows: int) -> list[dict[str, str]]:
        """Return the first `n_rows` rows.

        Ignore the rest, such as a row that a kill cut in half.
        """
        if n_rows == 0:
            return []
        try:
            # a kill may have cut a character in half, after the rows that count
            with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
                reader = csv.DictReader(file, restval="")
                rows = list(itertools.islice(reader, n_rows))
                missing = [name for name in self._columns if name not in (reader.fieldnames or ())]
        except FileNotFoundError:
            rows, missing = [], []
        if len(rows) < n_rows or missing:
            lacks = f"columns {missing}" if missing else f"rows: it has {len(rows)}, the checkpoint counts {n_rows}"
            raise CheckpointError(f"{self.path} lacks {lacks}; put the file back, or give CsvWriter another path")
        return rows

    def _rewrite(self, rows: Iterable[dict[str, str]]) -> None:
        if self._file:
            self._file.close()
        with open_aside(self.path) as aside:
            table = csv.DictWriter(aside, self._columns, extrasaction="ignore", restval="")
            table.writeheader()
            table.writerows(rows)
        self._file = self.path.open("a", encoding="utf-8", newline="")
