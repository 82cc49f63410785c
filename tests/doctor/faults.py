"""The table of faults: each is really made in a run, and the doctor's first finding must be the rule that names it.

To add a fault, write a function that makes a run in a folder that does not exist yet, and a line in `FAULTS` of the
module of its kind. `python -m tests.doctor.table` makes them all and writes the table of docs/doctor.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from leyden.doctor import Diagnosis, Evidence, diagnose
from leyden.training.runs import open_run


@dataclass(frozen=True)
class Case:
    """A run with a fault, or a healthy one."""

    name: str
    """The fault as a user would say it."""
    make: Callable[[Path], object]
    """Makes the run in this folder. If it returns a context manager, the fault lasts while that is open."""
    rule: str | None = None
    """The rule that must be the first finding; None: nothing must be found."""
    live: bool = False
    """Whether the doctor is asked to look at servers and processes, too."""
    unread: bool = False
    """Whether the fault leaves parts of the run that cannot be read."""
    recorded: bool = False
    """Whether its rows are written through the recorder, because a real run of that kind takes too long."""

    def look(self, directory: Path) -> tuple[Diagnosis, float]:
        """Make the run, and return what the doctor finds and the seconds that it took."""
        made = self.make(directory)
        with made if isinstance(made, AbstractContextManager) else contextlib.nullcontext():
            started = time.monotonic()
            diagnosis = diagnose(Evidence(open_run(directory)), live=self.live)
            seconds = time.monotonic() - started
        assert self.unread or not diagnosis.unread, diagnosis.unread
        assert seconds < 10
        return diagnosis, seconds
