"""The durable store and its queue.

`base.py` holds the protocol and `sql/` its implementation over a SQL database. `memory.py`, `sqlite.py` and
`postgres.py` hold the stores that a process can open. `notify.py` implements waiting, `sweeper.py` ends attempts whose
time is over. `wire.py`, `server.py` and `client.py` reach a store in another process. The package knows nothing of
agents, runners or training.

To add a method: extend the protocol, write a function in `sql/body/`, add a line each in `sql/sql_store.py`, `wire.py`
and `client.py`, and a test in `tests/contracts/store/`. To add a
database: write a `Driver`, a `Transaction` and its migrations, and pass that contract suite.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden.store.base import LightningStore as LightningStore
    from leyden.store.base import StoreCapabilities as StoreCapabilities
    from leyden.store.base import StoreStatistics as StoreStatistics
    from leyden.store.client import LightningStoreClient as LightningStoreClient
    from leyden.store.memory import InMemoryLightningStore as InMemoryLightningStore
    from leyden.store.opening import open_store as open_store
    from leyden.store.postgres import PostgresLightningStore as PostgresLightningStore
    from leyden.store.server import LightningStoreServer as LightningStoreServer
    from leyden.store.sqlite import SqliteLightningStore as SqliteLightningStore
    from leyden.store.sweeper import Sweeper as Sweeper
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__)
