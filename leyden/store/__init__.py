"""The durable truth and the queue.

Lives here: the protocol (`base.py`), what each of its methods means over a SQL database (`sql/`), the stores that a
process can open (`memory.py`, `sqlite.py`), waiting (`notify.py`) and the owner's schedule (`sweeper.py`). It knows
nothing of agents, runners or training.

To add a method: the protocol, a function in `sql/body/`, a line in `sql/store.py`, a test in
`tests/contracts/store.py`. To add a database: a `Driver`, a `Transaction` and its migrations; then pass that contract
suite.
"""

from leyden.store.base import LightningStore, StoreCapabilities, StoreStatistics
from leyden.store.memory import InMemoryLightningStore
from leyden.store.opening import open_store
from leyden.store.sqlite import SqliteLightningStore
from leyden.store.sweeper import Sweeper

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "SqliteLightningStore",
    "StoreCapabilities",
    "StoreStatistics",
    "Sweeper",
    "open_store",
]
