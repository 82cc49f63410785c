"""The durable truth and the queue.

Lives here: the protocol (`base.py`), what each of its methods means over a SQL database (`sql/`), the stores that a
process can open (`memory.py`, `sqlite.py`, `postgres.py`), waiting (`notify.py`), the owner's schedule (`sweeper.py`), and
the way to a store in another process (`wire.py`, `server.py`, `client.py`). It knows nothing of agents, runners or training.

To add a method: the protocol, a function in `sql/body/`, a line in `sql/store.py`, in `wire.py` and in `client.py`, a
test in `tests/contracts/store/`. To add a database: a `Driver`, a `Transaction` and its migrations; then pass that contract
suite.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leyden.store.base import LightningStore, StoreCapabilities, StoreStatistics
from leyden.store.memory import InMemoryLightningStore
from leyden.store.opening import open_store
from leyden.store.postgres import PostgresLightningStore
from leyden.store.sqlite import SqliteLightningStore
from leyden.store.sweeper import Sweeper

if TYPE_CHECKING:
    from leyden.store.client import LightningStoreClient
    from leyden.store.server import LightningStoreServer

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "PostgresLightningStore",
    "SqliteLightningStore",
    "StoreCapabilities",
    "StoreStatistics",
    "Sweeper",
    "open_store",
]

_HTTP = {"LightningStoreClient": "leyden.store.client", "LightningStoreServer": "leyden.store.server"}


def __getattr__(name: str) -> Any:
    """What needs an HTTP library is imported when it is first used."""
    if name not in _HTTP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HTTP[name]), name)
