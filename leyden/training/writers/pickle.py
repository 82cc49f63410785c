"""`PickleWriter`: rows as pickles of plain containers, and a reader that runs no code of the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from leyden.errors import CheckpointError
from leyden.training.metrics import Row
from leyden.training.writers.appending import AppendingWriter

_PROTOCOL: Final = 4


class PickleWriter(AppendingWriter):
    """Writes each row as a pickle of a dict of numbers, strings and lists.

    Floats keep every bit; arrays become lists. Read the file with `read_pickled_rows`. A new run replaces the file; a
    resumed one cuts it after the rows that its checkpoint counts.
    """

    def encode(self, row: Row) -> bytes:
        return pickle.dumps(row.flat(), protocol=_PROTOCOL)


class _Plain(pickle.Unpickler):
    """Refuses every class and function that a pickle names, so that no code of the file runs."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise CheckpointError(
            f"a pickled row asks for {module_name}.{global_name}; PickleWriter writes plain containers only"
        )


def read_pickled_rows(path: str | Path) -> Generator[dict[str, Any]]:
    """Yield the rows of a PickleWriter's file, in order. No code of the file is run.

    Raise CheckpointError if the file holds anything but plain containers, or ends within a row.
    """
    content = io.BytesIO(Path(path).read_bytes())
    end = len(content.getbuffer())
    while content.tell() < end:
        begins = content.tell()
        try:
            row = _Plain(content).load()
        except (pickle.UnpicklingError, EOFError, ValueError, IndexError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is damaged in the row that begins at byte {begins}: {error}") from error
        yield row
