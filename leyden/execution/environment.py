"""What the environment says about where a run's parts are, under our names or under Agent Lightning's."""

from __future__ import annotations

import os

from leyden.errors import ConfigError


def variable(name: str) -> str | None:
    """Return the value of LEYDEN_<name>, or else of AGL_<name>."""
    return os.environ.get(f"LEYDEN_{name}") or os.environ.get(f"AGL_{name}")


def managed_store() -> bool:
    """Return what MANAGED_STORE says, True by default. Raise ConfigError if it is neither true nor false."""
    given = (variable("MANAGED_STORE") or "1").lower()
    if given not in ("0", "1", "true", "false", "yes", "no"):
        raise ConfigError(f"LEYDEN_MANAGED_STORE is {given!r}; possible: 0, 1")
    return given in ("1", "true", "yes")
