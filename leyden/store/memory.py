"""`InMemoryLightningStore`: the SQL store on a database in memory. For tests and development: it survives nothing.

It knows one connection and one lock; an operation runs inline, in the thread that calls.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from leyden.errors import StoreClosed
from leyden.store.notify import Signals
from leyden.store.sql.driver import Operation
from leyden.store.sql.sqlite import SqliteTransaction, connect, migrate, store_error
from leyden.store.sql.store import SqlLightningStore

__all__ = ["InMemoryLightningStore"]

T = TypeVar("T")

_PRAGMAS: dict[str, str | int] = {"synchronous": "OFF", "temp_store": "MEMORY", "secure_delete": "OFF"}


class _MemoryDriver:
    url = "memory://"

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._lock = threading.Lock()
        self._connection = connect(":memory:", _PRAGMAS)
        migrate(self._connection, self.url)
        self._transaction = SqliteTransaction(self._connection, self.url)
        self._close = weakref.finalize(self, self._connection.close)

    async def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        with self._lock:
            try:
                return operation(self._begin(), *args, **kwargs)
            except sqlite3.Error as error:
                raise store_error(self.url, error) from error

    async def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None]
        | None = None,  # nothing is awaited here, so nobody can be cancelled between commit and answer
    ) -> T:
        with self._lock:
            transaction = self._begin()
            self._connection.execute("BEGIN")
            try:
                answer = operation(transaction, *args, **kwargs)
                self._connection.execute("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise store_error(self.url, error) from error
                raise
            claimable, finished = transaction.claimable, transaction.finished
        if claimable or finished:
            self._signals.publish(claimable, finished)
        return answer

    async def close(self) -> None:
        with self._lock:
            self._close()

    def _begin(self) -> SqliteTransaction:
        if not self._close.alive:
            raise StoreClosed(f"{self.url} is closed; open a new store")
        self._transaction.begin()
        return self._transaction


class InMemoryLightningStore(SqlLightningStore):
    """A store in this process's memory, gone with it. Every method is safe from any thread and any event loop."""

    def __init__(self) -> None:
        signals = Signals()
        super().__init__(_MemoryDriver(signals), signals, durable=False)
