"""Read a strategy's options from environment variables: by Leyden's names, or Agent Lightning's."""

from __future__ import annotations

import os

from leyden.errors import ConfigError


def named_variable(name: str) -> tuple[str, str] | None:
    """Return name and value of LEYDEN_<name>, or else of AGL_<name>; None if neither is set or both are empty."""
    found = ((full, os.environ.get(full)) for full in (f"LEYDEN_{name}", f"AGL_{name}"))
    return next(((full, value) for full, value in found if value), None)


def variable(name: str) -> str | None:
    """Return the value of LEYDEN_<name>, or else of AGL_<name>; None if neither is set."""
    found = named_variable(name)
    return None if found is None else found[1]


def managed_store() -> bool:
    """Return the value of MANAGED_STORE, True by default. Raise ConfigError if it is neither true nor false."""
    name, given = named_variable("MANAGED_STORE") or ("LEYDEN_MANAGED_STORE", "1")
    if given.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise ConfigError(f"{name} is {given!r}; possible: 0, 1, true, false, yes, no")
    return given.lower() in ("1", "true", "yes")
