"""`FitWatch`: runs the cheap rules while a run works, and logs what they find."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from leyden.doctor.diagnosis import diagnose
from leyden.doctor.evidence import Evidence
from leyden.doctor.rules import RULES
from leyden.errors import LeydenError
from leyden.training.runs import open_run

logger = logging.getLogger(__name__)

_SECONDS = 60.0
"""The time between two looks, of which each logs one finding at most."""


class FitWatch:
    """Looks at the end of the files of a run that works. `look` is to be called often, in a thread of its own.

    directory: the run's folder.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._looked_at = directory, time.monotonic()
        self._logged = set[str]()
        """The names of the rules whose findings were logged."""

    def look(self) -> None:
        """Log the first new finding, once a minute. What the log has warned of is not repeated."""
        if time.monotonic() - self._looked_at < _SECONDS:
            return
        self._looked_at = time.monotonic()
        try:
            evidence = Evidence(open_run(self._directory), str(self._directory), tail=True)
        except LeydenError as error:  # the folder was moved or removed; the run itself goes on
            logger.debug("the run in %s is not looked at: %s", self._directory, error)
            return
        rules = [each for each in RULES if each.during_fit and each.name not in self._logged]
        warned = {each.name for each in rules if each.warned and evidence.logged(each.warned)}
        for name, found in diagnose(evidence, rules=rules).findings.items():
            if name not in warned:
                self._logged.add(name)
                evidence_shown = "; ".join(found.evidence[:2])
                logger.warning(
                    "%s (%s). %s `leyden doctor %s` shows more",
                    found.cause,
                    evidence_shown,
                    found.remedy,
                    evidence.source,
                )
                return
