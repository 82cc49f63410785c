"""A registry of functions by name, each with the frozen dataclass that holds its constants.

The losses and the advantage estimators are such registries. An entry is found by its name or by the type of its
constants; another process is sent both. The module knows no loss and no estimator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from leyden._lib.options import check_choice, check_names
from leyden.errors import ConfigError


class Registered(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str: ...

    @property
    def constants(self) -> type[Any]:
        """The dataclass of the constants. No other entry has it."""
        ...


R = TypeVar("R", bound=Registered)


class Registry(dict[str, R]):
    """Entries by name, in the order of their registration."""

    def __init__(self, noun: str) -> None:
        super().__init__()
        self._noun = noun

    def add(self, entry: R) -> None:
        """Add an entry. Raise ConfigError for a name or a type of constants that is registered already."""
        if entry.name in self or any(other.constants is entry.constants for other in self.values()):
            raise ConfigError(
                f"{self._noun} {entry.name!r} or its constants {entry.constants.__name__} are registered already"
            )
        self[entry.name] = entry

    def find(self, constants: object) -> R:
        """Return the entry that these constants belong to. Raise ConfigError for any other value."""
        for entry in self.values():
            if entry.constants is type(constants):
                return entry
        known = ", ".join(sorted(entry.constants.__name__ for entry in self.values()))
        raise ConfigError(
            f"{self._noun} is {constants!r}; give a name ({', '.join(sorted(self))}) or constants ({known})"
        )

    def make(self, name: str, constants: Mapping[str, Any] | None = None) -> Any:
        """Return the constants of the entry with this name; those left out have their defaults. Raise ConfigError for
        an unknown name or constant, and for a constant out of its range.
        """
        check_choice(self._noun, name, self)
        kind = self[name].constants
        given = dict(constants or {})
        check_names(f"{self._noun} {name!r}", given, list(kind.__dataclass_fields__))
        return kind(**given)
