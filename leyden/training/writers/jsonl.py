"""`JsonlWriter`: rows as lines of JSON."""

from __future__ import annotations

from leyden._lib.json import json_line
from leyden.training.metrics import Row
from leyden.training.writers.appending import AppendingWriter


class JsonlWriter(AppendingWriter):
    """Writes one line of JSON for each row, such as {"iteration": 1, "stage": "train", ...}.

    NaN and infinity are written as null, because JSON lacks them. A new run replaces the file; a resumed one cuts it
    after the rows that its checkpoint counts.
    """

    def encode(self, row: Row) -> bytes:
        return json_line(row.flat()).encode()
