"""`PostgresLightningStore`: the SQL store on PostgreSQL, durable, shared by any number of processes and machines.

It has a few threads with a connection each, some for writes and some for reads, so that long reads delay no write, and
one thread that listens for commits of other stores. A call returns when the server has flushed its change to the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from leyden._lib import ids
from leyden._lib.options import check_number
from leyden.errors import StoreClosed
from leyden.store.base import StoreCapabilities
from leyden.store.listener import Listener
from leyden.store.notify import Signals
from leyden.store.session_thread import Loops, QueuedOperation, check_process, deliver, result_of, settle
from leyden.store.sql.driver import Durability, Operation
from leyden.store.sql.postgres import Target, answers, connect, migrate, psycopg, store_error
from leyden.store.sql.postgres_session import Patience, PostgresSession
from leyden.store.sql.postgres_transaction import Guesses, PostgresTransaction
from leyden.store.sql.sql_store import SqlLightningStore
from leyden.store.sql.transaction import Transaction
from leyden.types import AttemptedRollout

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSES_SECONDS = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)
"""The pauses between retries of a claim whose rows other transactions have locked, usually for about 1 ms."""


class _Threads:
    """Runs operations in up to `max_threads` threads with a session each, the first at once, others on demand."""

    def __init__(self, url: str, name: str, max_threads: int, session: Callable[[], PostgresSession]) -> None:
        self._url = url
        self._name = name
        self._max_threads = max_threads
        self._session = session
        self._open = True
        self._gate = threading.Lock()
        self._jobs: SimpleQueue[QueuedOperation | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        # The threads also end with a store that is dropped without `close`, and with the program.
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._threads)
        self._start()

    async def run(
        self,
        operation: Operation[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        undo: Operation[None] | None = None,
    ) -> Any:
        """Run an operation in one of the threads, and return its result after its commit.

        undo: takes the result back if the caller was cancelled after the commit.
        """
        job = QueuedOperation(operation, args, kwargs, asyncio.get_running_loop().create_future(), undo)
        with self._gate:
            if not self._open:
                raise StoreClosed(f"{self._url} is closed; open it again")
            self._jobs.put(job)
            if self._jobs.qsize() > 1 and len(self._threads) < self._max_threads:
                self._start()
        return await result_of(self._jobs, job)

    def stop(self) -> None:
        with self._gate:
            self._open = False
        self._finalizer()

    def _start(self) -> None:
        name = f"leyden-store-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=_serve, args=(self._session(), self._jobs), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _serve(session: PostgresSession, jobs: SimpleQueue[QueuedOperation | None]) -> None:
    """Run a thread: execute jobs until the store closes.

    It keeps no reference to `_Threads`, so that a store that is dropped without `close` is collected, which ends the
    threads.
    """
    loops: Loops = weakref.WeakSet()
    session.connect()
    _work(session, jobs, loops)
    settle(loops)
    _work(session, jobs, loops)  # undoes operations whose callers were cancelled meanwhile
    session.close()


def _work(session: PostgresSession, jobs: SimpleQueue[QueuedOperation | None], loops: Loops) -> None:
    """Run the queued jobs up to the mark of the end (None), which is left for the next thread.

    loops: receives the event loops of the callers.
    """
    while (job := jobs.get()) is not None:
        if not job.wanted:
            continue
        try:
            job.answer = session.run(job.operation, job.args, job.kwargs)
        except BaseException as error:  # noqa: BLE001 -- the awaiting caller gets it
            job.error = error
        loops |= deliver(jobs, [job])
    jobs.put(None)  # for the next thread


def _stop(jobs: SimpleQueue[QueuedOperation | None], threads: Sequence[threading.Thread]) -> None:
    jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


class _PostgresDriver:
    """A `Driver` that runs operations on threads for writes and threads for reads."""

    def __init__(self, target: Target, connections: int, patience_seconds: float, signals: Signals) -> None:
        self.url = target.url
        self._pid = os.getpid()
        self._stopping = threading.Lock()
        self._closing = ending = threading.Event()  # a local name, so that the threads do not keep this driver alive
        sender = ids.span_id()  # names this store in its news, which the listener then skips
        guesses = Guesses()  # about the attempts that spans are added to, which save look-ups
        self._listener = listener = _listener(
            target, sender, signals, Patience(target, patience_seconds, self._closing)
        )

        def publish(transaction: PostgresTransaction) -> None:
            if transaction.claimable or transaction.finished or transaction.spans or transaction.labels:
                signals.publish(transaction.claimable, transaction.finished, transaction.spans, transaction.labels)
            if transaction.spans:
                listener.spans_were_added()
            if transaction.hiding:
                listener.check_spans_soon()

        def session(*, writes: bool) -> PostgresSession:
            return PostgresSession(
                target,
                sender,
                guesses,
                writes=writes,
                patience_seconds=patience_seconds,
                closing=ending,
                publish=publish,
            )

        readers = connections // 2
        self._writer = _Threads(self.url, "writer", connections - readers, lambda: session(writes=True))
        self._reader = _Threads(self.url, "reader", readers, lambda: session(writes=False))

    async def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        check_process(self.url, self._pid)
        return await self._reader.run(operation, args, kwargs)

    async def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,
    ) -> T:
        check_process(self.url, self._pid)
        return await self._writer.run(operation, args, kwargs, undo)

    async def close(self) -> None:
        check_process(self.url, self._pid)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with self._stopping:  # a second close waits for the first
            self._closing.set()
            self._reader.stop()
            self._writer.stop()
            self._listener.stop()


def _listener(target: Target, sender: str, signals: Signals, patience: Patience) -> Listener:
    """Migrate the database and return its listener. Wait while the server is unavailable."""
    is_up = warned = False
    while True:
        try:
            with closing(connect(target)) as connection:
                migrate(connection, target)
            return Listener(target, sender, signals)
        except psycopg().Error as error:
            if is_up or not isinstance(error, psycopg().OperationalError):
                raise store_error(target, error) from error
            # A server that answers now has just come back, or will refuse a second time.
            is_up = answers(target)
            if not is_up and not warned:
                warned = True
                logger.warning("%s does not answer yet (%s); trying again", target.url, " ".join(str(error).split()))
            if not is_up:
                patience.wait(error)


class PostgresLightningStore(SqlLightningStore):
    """A store in a PostgreSQL database (14 or newer). Every method is safe from any thread, event loop, process and
    machine.

    url: `postgresql://user:password@host:port/database`, with `?schema=NAME` for a schema other than `leyden` (created
        if missing; each holds one store) and any option of libpq. A pooler that gives each transaction another
        connection does not work, because it passes no notifications on.
    durability: both values wait for the server's disk; "power" also waits for its synchronous standbys, if it has some.
    connections: the most connections for writes and reads, half each; one more listens.
    patience_seconds: how long opening the store, and each call, wait for an unavailable server before they raise
        StoreError.

    Raise ConfigError if psycopg is not installed. Raise StoreError if the server stays away or refuses the login, or if
    a newer Leyden or another program wrote the schema. A pickled store holds its address with the password, and
    unpickles to another store on the same tables.
    """

    def __init__(
        self, url: str, *, durability: Durability = "process", connections: int = 8, patience_seconds: float = 30.0
    ) -> None:
        check_number("connections", connections, at_least=2, whole=True)  # one for writes and one for reads
        check_number("patience_seconds", patience_seconds, at_least=0)
        signals = Signals()
        driver = _PostgresDriver(Target.parse(url, durability), connections, patience_seconds, signals)
        super().__init__(driver, signals, durable=True)
        options = {"durability": durability, "connections": connections, "patience_seconds": patience_seconds}
        self._address = (url, options)

    @property
    def capabilities(self) -> StoreCapabilities:
        return {**super().capabilities, "zero_copy": True}

    def __reduce__(self) -> tuple[Any, ...]:
        url, options = self._address
        return partial(PostgresLightningStore, **options), (url,)

    async def _claim(self, limit: int, worker_id: str | None, claim_id: str | None) -> list[AttemptedRollout]:
        """Claim rollouts without waiting for the queue. While it finds nothing although rollouts are queued, because
        other transactions hold their rows, try again for about half a second.
        """
        for pause_seconds in _PAUSES_SECONDS:
            claimed = await super()._claim(limit, worker_id, claim_id)
            if claimed or not await self._driver.read(_is_anything_queued, (), {}):
                return claimed
            await asyncio.sleep(pause_seconds)
        loop = asyncio.get_running_loop()
        loop.call_later(_PAUSES_SECONDS[-1], self._signals.publish, 1, (), False)  # waiters look again
        return []


def _is_anything_queued(tx: Transaction) -> bool:
    return tx.one("is_anything_queued") is not None
