"""`JsonlWriter`: rows as lines of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from leyden.loop.metrics import Row
from leyden.loop.writers.appending import AppendingWriter
from leyden.utils.json import is_list, is_object


class JsonlWriter(AppendingWriter):
    """Writes one line of JSON for each row, such as {"iteration": 1, "stage": "train", ...}.

    NaN and infinity are written as null, because JSON lacks them. A new run replaces the file; a
    resumed one cuts it after the rows that its checkpoint counts.
    """

    def encode(self, row: Row) -> bytes:
        """Return the row as one line of JSON."""
        return (json.dumps(_finite(row.flat()), allow_nan=False) + "\n").encode()


def _finite(value: Any) -> Any:
    """Return the value with None in place of NaN and infinity, also inside containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_object(value):
        return {name: _finite(part) for name, part in value.items()}
    if is_list(value):
        return [_finite(part) for part in value]
    return value
