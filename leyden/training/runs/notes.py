"""Names, tags and notes that people give to recorded runs, in `notes.jsonl` of a run's folder.

Each line says who wrote it, and when. The run rewrites `run.json` and never this file, so a running run can have notes
too; lines are appended under a lock, so that two people can write at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from leyden._lib.atomic import append_locked
from leyden._lib.json import json_line
from leyden.errors import ConfigError

NOTES = "notes.jsonl"
NoteKind: TypeAlias = Literal["note", "tag", "untag", "name"]
_LONGEST: dict[NoteKind, int] = {"note": 10_000, "tag": 50, "untag": 50, "name": 200}
"""Characters."""


@dataclass(frozen=True, slots=True)
class Note:
    """One line: a note, a tag that is put on a run or taken off it, or a new name."""

    kind: NoteKind
    text: str
    time: float
    """Unix seconds."""
    by: str
    """The person who wrote it."""

    def __post_init__(self) -> None:
        texts = isinstance(self.text, str) and isinstance(self.by, str)
        if self.kind not in get_args(NoteKind) or not texts or not isinstance(self.time, int | float):
            raise TypeError("Note() has a wrong kind, or a text, person or time of a wrong type")


@dataclass(frozen=True, slots=True)
class RunNotes:
    """What people have said about a run."""

    name: str | None = None
    """The last name that was given; None: the run has the name that it began with."""
    tags: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    """The notes in the order in which they were written."""


def notes_of(lines: Iterable[Note]) -> RunNotes:
    name, tags, notes = None, dict[str, None](), list[Note]()
    for line in lines:
        if line.kind == "name":
            name = line.text
        elif line.kind == "note":
            notes.append(line)
        elif line.kind == "tag":
            tags[line.text] = None
        else:
            tags.pop(line.text, None)
    return RunNotes(name, tuple(tags), tuple(notes))


def add_notes(directory: Path, read: Callable[[], RunNotes], by: str, changes: Iterable[tuple[NoteKind, str]]) -> None:
    """Append changes to the notes in a run's folder, and wait until the disk has them.

    read: returns the run's notes as they are now; called while the file is locked.
    Raise ConfigError, and change nothing, for a text that is empty, too long or of a wrong form, for a tag to take off
    that the run does not have, and for a folder that cannot be written.
    """
    changes = list(changes)
    for kind, text in changes:
        longest = _LONGEST[kind]
        is_fine = text == text.strip() and 0 < len(text) <= longest and (kind == "note" or text.isprintable())
        if is_fine and kind != "note" and kind != "name":
            is_fine = not set(" ,") & set(text) and not text.startswith("-")
        if not is_fine:
            form = {"note": "characters", "name": "printable characters"}.get(
                kind, "letters, without spaces and commas"
            )
            raise ConfigError(f"the {kind} is {text!r:.200}; give 1 to {longest:,} {form}")

    def lines() -> str:
        has, now = read().tags, time.time()
        for kind, text in changes:
            if kind == "untag" and text not in has:
                raise ConfigError(f"the run has no tag {text!r}; its tags: {', '.join(has) or 'none'}")
        new = [Note(kind, text, now, by) for kind, text in changes if kind != "tag" or text not in has]
        return "".join(json_line(asdict(each)) for each in new)

    try:
        append_locked(directory / NOTES, lines)
    except OSError as error:
        raise ConfigError(f"{directory / NOTES} cannot be written: {error.strerror}; nothing was changed") from error
