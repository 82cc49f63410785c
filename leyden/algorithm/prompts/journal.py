"""`Journal`: a file with the answers of the reflection model.

Each answer has a key, its *place* in the search. When a run that was killed in the middle of a round is resumed, it
reads the answers that it had received, and asks nothing twice. The file also shows a person why each prompt was
changed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from leyden._lib.atomic import append_privately
from leyden.errors import CheckpointError


class Journal:
    """The answers of the reflection model, each by its place in the search, in a file of JSON lines."""

    def __init__(self, path: Path | None = None) -> None:
        """path: None: answers are kept in memory only."""
        self._path = path
        self._answers: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        """The tokens of the calls of earlier processes, by place."""
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        """Cut off an incomplete last line, which a crash left. Raise CheckpointError for any other unreadable line."""
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self._answers[entry["place"]] = entry["answer"]
                self._faults[entry["place"]] = entry.get("fault", "")
                if "tokens" in entry:
                    self.tokens[entry["place"]] = int(entry["tokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path}, line {number} is no answer ({error}); remove the line, and the model is asked again"
                ) from error
        if len(whole) < len(content):
            os.truncate(path, len(whole))

    def get(self, place: str) -> str | None:
        return self._answers.get(place)

    def fault(self, place: str) -> str:
        """Return why the answer at a place is not whole; empty if it is."""
        return self._faults.get(place, "")

    def add(self, place: str, answer: str, *, fault: str = "", **about: Any) -> None:
        """Record an answer at a place. It is on disk when this returns.

        fault: why the answer is not whole; empty if it is.
        about: further fields for readers of the file.
        """
        self._answers[place], self._faults[place] = answer, fault
        if self._path is not None:
            with append_privately(self._path) as file:
                entry = {"place": place, **about, **({"fault": fault} if fault else {}), "answer": answer}
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
