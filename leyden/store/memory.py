"""`InMemoryLightningStore`: the SQL store on a database in memory, for tests and development. It is lost with its
process.

It has one connection and one lock; an operation runs inline, in the calling thread.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from leyden.errors import StoreClosed, StoreError
from leyden.store import session_thread as worker
from leyden.store.notify import Signals
from leyden.store.sql.driver import Operation
from leyden.store.sql.session import Session
from leyden.store.sql.sql_store import SqlLightningStore
from leyden.store.sql.sqlite import connect, fill_empty

T = TypeVar("T")

_PRAGMAS: dict[str, str | int] = {"synchronous": "OFF", "temp_store": "MEMORY", "secure_delete": "OFF"}


class _MemoryDriver:
    """A `Driver` on one SQLite database in memory."""

    url = "memory://"

    def __init__(self, signals: Signals) -> None:
        connection = connect(":memory:", _PRAGMAS)
        fill_empty(connection)
        self._session = Session(connection, self.url, "only", signals.publish)
        self._close = weakref.finalize(self, connection.close)
        self._pid = worker.process_id
        self._open = True
        self._given = 0

    def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, T]:
        return self._run(operation, args, kwargs, reads=True)

    def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,  # never needed: nothing is awaited between commit and return
    ) -> Coroutine[Any, Any, T]:
        return self._run(operation, args, kwargs, reads=False)

    async def _run(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any], *, reads: bool) -> T:
        """Run an operation at once, in the caller's thread, under the session's lock.

        Every YIELD_EVERY operations the event loop gets a turn, because nothing else here awaits.
        """
        if worker.process_id != self._pid:
            raise StoreError(
                f"{self.url} is in the memory of process {self._pid}, and what its forked child {worker.process_id} wrote "
                "would be in a copy; serve it with LightningStoreServer, and give the child the server"
            )
        self._given += 1
        if self._given % worker.YIELD_EVERY == 0:
            await asyncio.sleep(0)
        with self._session.lock:
            if not self._open:
                raise StoreClosed(f"{self.url} is closed; open a new store")
            return self._session.alone(operation, args, kwargs, reads=reads)

    async def close(self) -> None:
        with self._session.lock:
            self._open = False
            self._close()


class InMemoryLightningStore(SqlLightningStore):
    """A store in this process's memory, lost with the process. Safe from any thread and any event loop."""

    def __init__(self) -> None:
        signals = Signals()
        super().__init__(_MemoryDriver(signals), signals, durable=False)
