"""What is released: labels and the resources of their versions, in memory and in a file for a start without the store."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from leyden.types import NamedResources, VersionKey

logger = logging.getLogger(__name__)

_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


@dataclass(frozen=True)
class Released:
    """One state of the labels. It is replaced as a whole, so that a request sees one state."""

    labels: Mapping[str, VersionKey]
    resources: Mapping[VersionKey, NamedResources]


class ReleasedFile:
    """The last state, in a file that only this user can read, because resources may hold keys."""

    def __init__(self, path: Path | None) -> None:
        """path: None keeps nothing."""
        self._path = path

    def write(self, released: Released) -> None:
        """Replace the file. A failure is logged: serving goes on without it."""
        if self._path is None:
            return
        versions = [
            [list(key), _RESOURCES.dump_python(value, mode="json")] for key, value in released.resources.items()
        ]
        aside = self._path.with_name(f"{self._path.name}.new")
        try:
            aside.touch(mode=0o600)
            aside.write_text(json.dumps({"labels": released.labels, "versions": versions}))
            aside.replace(self._path)
        except OSError as error:
            logger.warning("what is released cannot be kept in %s: %s", self._path, error)

    def read(self) -> Released | None:
        """Return the state of the last `write`, None if there is none that can be read."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_text())
            labels = {label: (str(key[0]), int(key[1])) for label, key in found["labels"].items()}
            versions = {
                (str(key[0]), int(key[1])): _RESOURCES.validate_python(value) for key, value in found["versions"]
            }
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            logger.debug("no released versions in %s: %s", self._path, error)
            return None
        return Released(labels, versions)
