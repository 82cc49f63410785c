"""Stores by their address."""

from __future__ import annotations

from pathlib import Path

from leyden.errors import ConfigError
from leyden.store.memory import InMemoryLightningStore
from leyden.store.sql.store import SqlLightningStore
from leyden.store.sqlite import Durability, SqliteLightningStore

__all__ = ["open_store"]


def open_store(url: str | Path, *, durability: Durability | None = None) -> SqlLightningStore:
    """The store at `memory://`, `sqlite:///absolute/path` or a plain path.

    durability: of a file, "process" (the default) or "power". Raises ConfigError for another address, and what the
    store raises.
    """
    scheme, separator, rest = str(url).partition("://")
    if not separator:
        return SqliteLightningStore(url, durability=durability or "process")
    if scheme == "sqlite" and rest.startswith("/"):
        return SqliteLightningStore(rest, durability=durability or "process")
    if scheme == "memory" and not rest:
        if durability is not None:
            raise ConfigError(f"memory:// survives nothing, so durability={durability!r} means nothing; leave it out")
        return InMemoryLightningStore()
    raise ConfigError(f"cannot open a store at {str(url)!r}; possible: memory://, sqlite:///absolute/path, or a path")
