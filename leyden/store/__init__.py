"""The durable truth and the queue.

Lives here: the protocol (`base.py`), what each of its methods means over a SQL database (`sql/`), the stores that a
process can open (`memory.py`, `sqlite.py`, `postgres.py`), waiting (`notify.py`), the owner's schedule (`sweeper.py`), and
the way to a store in another process (`wire.py`, `server.py`, `client.py`). It knows nothing of agents, runners or training.

To add a method: the protocol, a function in `sql/body/`, a line in `sql/store.py`, in `wire.py` and in `client.py`, a
test in `tests/contracts/store/`. To add a database: a `Driver`, a `Transaction` and its migrations; then pass that contract
suite.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
