"""`CsvWriter`: rows as a table that spreadsheets and pandas read."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leyden._lib.atomic import open_aside
from leyden.errors import CheckpointError
from leyden.training.metrics import ROW_KINDS, LogLevel, Row, RowKind
from leyden.training.writers.appending import FileWriter


class CsvWriter(FileWriter):
    """Writes one line of CSV for each row. A stage's row has the columns iteration, stage and seconds, then one for
    each metric; a missing metric is an empty cell.

    path: the file; a directory raises ConfigError.
    rows: "stage", "episode" or "step"; the first columns are the `fields` of that kind of row.
    loglevel: write the values that a step logged at this level or above.

    A new run replaces the file; a resumed one cuts it after the rows that its checkpoint counts. A metric that appears
    later adds a column, for which the whole file is written again. Lists are written as JSON, and numbers so that
    reading them gives the same number.
    """

    def __init__(self, path: str | Path, *, rows: RowKind = "stage", loglevel: int = LogLevel.PERIODIC) -> None:
        super().__init__(path, example="result.csv", rows=rows, loglevel=loglevel)
        self._columns: list[str] = []
        self._n_rows = 0
        self._resume: dict[str, Any] | None = None

    def open(self) -> None:
        """Open the file: empty for a new run, cut after the checkpoint's rows for a resumed one.

        Raise CheckpointError if the file lacks rows or columns that the checkpoint counts.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state, self._resume = self._resume or {"rows": 0, "columns": ROW_KINDS[self.row_kind].fields}, None
        self._n_rows, self._columns = state["rows"], list(state["columns"])
        self._rewrite(self._read(self._n_rows))

    def write(self, row: Row) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        self._sync()
        so_far = self._resume or {"rows": self._n_rows, "columns": list(self._columns)}
        return {**super().state_dict(), **so_far}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._resume = {"rows": state["rows"], "columns": list(state["columns"])}

    def _read(self, n_rows: int) -> list[dict[str, str]]:
        """Return the first rows of the file, without later ones, which a kill may have cut in half.

        Raise CheckpointError if rows or columns are missing.
        """
        if n_rows == 0:
            return []
        try:
            # surrogateescape: a kill may have cut a character in half, after the rows that count
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
        """Replace the file by the header and these rows in one step, and open it for appending."""
        if self._file:
            self._file.close()
        with open_aside(self.path, private=False) as aside:
            table = csv.DictWriter(aside, self._columns, extrasaction="ignore", restval="")
            table.writeheader()
            table.writerows(rows)
        self._file = self.path.open("a", encoding="utf-8", newline="")
