"""Requests to the models that criticise and rewrite, read from files with fields such as `$prompt`.

Leyden's own are in the folder `prompts/`. To use another request, pass its file to `APO`.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from leyden.errors import ConfigError

CRITIQUE_FIELDS = ("prompt", "rollouts")
EDIT_FIELDS = ("prompt", "critique", "placeholders", "max_characters")
_OPTIONAL = ("placeholders", "max_characters")


class RequestTemplate:
    """A request to the reflection model, from a file with fields such as `$prompt`."""

    def __init__(self, path: str | Path, fields: Sequence[str]) -> None:
        """Read the request from `path`.

        fields: the names of possible fields, without `$`. The text must have all of them except `placeholders` and
            `max_characters`.
        Raise ConfigError if the file cannot be read, lacks a field, or has an unknown one.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the request {str(path)!r} cannot be read: {error}") from error
        self.text = text
        self._template = string.Template(text)
        if not self._template.is_valid():
            raise ConfigError(f"the request {str(path)!r} has a $ without a name; write $$ for a dollar sign")
        found = set(self._template.get_identifiers())
        wrong = sorted({*fields} - {*_OPTIONAL} - found) or sorted(found - {*fields})
        if wrong:
            names = ", ".join(f"${name}" for name in fields)
            raise ConfigError(f"the request {str(path)!r} lacks or does not know ${wrong[0]}; its fields are {names}")

    def fill(self, **values: object) -> str:
        return self._template.substitute(values)


def shipped_requests(kind: str) -> list[Path]:
    """Return the files of Leyden's own requests, sorted.

    kind: "critique" or "edit".
    """
    return sorted((Path(__file__).parent / "prompts").glob(f"{kind}_*.txt"))
