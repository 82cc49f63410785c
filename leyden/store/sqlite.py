"""`SqliteLightningStore`: the SQL store on a file, durable, owned by one process.

It has one writer thread (group commit) and one reader thread, so that a long read delays no write. A call returns when
its change is committed to the write-ahead log, where it survives the death of any process. `durability="power"` also
waits for the disk, so that it survives a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from leyden._lib.atomic import private_directory
from leyden.errors import ConfigError, StoreError, StoreFull
from leyden.store.base import StoreCapabilities
from leyden.store.lockfile import LockFile
from leyden.store.notify import Signals
from leyden.store.read_only import ReadOnlyDriver
from leyden.store.session_thread import SessionThread
from leyden.store.sql.driver import Durability, Operation
from leyden.store.sql.session import Session
from leyden.store.sql.sql_store import SqlLightningStore
from leyden.store.sql.sqlite import connect, migrate, store_error
from leyden.store.sql.transaction import Long
from leyden.store.sql.wal import LOG_BYTES, Checkpointer

T = TypeVar("T")

_SYNCHRONOUS: Mapping[Durability, str] = {"process": "NORMAL", "power": "FULL"}


class _FileDriver:
    """A `Driver` on one file that this process owns."""

    def __init__(self, path: Path, durability: Durability, signals: Signals) -> None:
        self.url = f"sqlite://{path}"
        self._closing = threading.Lock()
        lock = _take_ownership(path, self.url)
        try:
            writer, reader, keeper = _open(path, self.url, durability)
        except BaseException:
            lock.release()
            raise
        session = Session(writer, self.url, "writer", signals.publish)
        self._writer = SessionThread(session, "leyden-store-writer", inline=durability == "process")
        self._reader = SessionThread(Session(reader, self.url, "reader"), "leyden-store-reader", inline=True)
        self._checkpointer = Checkpointer(path, keeper, session)
        self._lock = lock  # the last attribute, so that it is released last if the store is dropped without `close`

    async def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        # Short reads run on the writer's connection: what was just written is in its cache, while
        # each commit empties the reader's.
        try:
            return await self._writer.run_here(operation, args, kwargs, reads=True)
        except Long:
            return await self._reader.run(operation, args, kwargs)

    def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,
    ) -> Coroutine[Any, Any, T]:
        self._checkpointer.wrote()
        return self._writer.run(operation, args, kwargs, undo=undo)

    def record_server(self, server: str | None) -> None:
        self._lock.record_server(server)

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with self._closing:  # a second close waits for the first
            self._checkpointer.stop()
            self._reader.stop()
            self._writer.stop()
            self._lock.release()


class SqliteLightningStore(SqlLightningStore):
    """A store in the SQLite file at `path`, created if it is missing. Every method is safe from any thread and any
    event loop.

    One process owns the file. Raise StoreError, naming the owner, while another process (or another store of this one)
    has it open, and for a file that is damaged or that a newer Leyden or another program wrote.

    read_only: open a store that exists, whatever process owns and writes it, also in a directory without write
        permission. Every write raises StoreError.
    """

    def __init__(self, path: str | Path, *, durability: Durability = "process", read_only: bool = False) -> None:
        if durability not in _SYNCHRONOUS:
            raise ConfigError(f"durability must be one of {', '.join(_SYNCHRONOUS)}, got {durability!r}")
        self.path = Path(path).expanduser().resolve()
        signals = Signals()
        driver = ReadOnlyDriver(self.path, signals) if read_only else _FileDriver(self.path, durability, signals)
        super().__init__(driver, signals, durable=True)
        self._record_server = driver.record_server
        self._read_only = read_only

    @property
    def capabilities(self) -> StoreCapabilities:
        """The capabilities of this store. A read-only file counts as swept, by its owner."""
        return {**super().capabilities, "swept": self._read_only}

    def record_server(self, server: str | None) -> None:
        """Record the URL of the store's server, if any, for the error of the next process that opens the file."""
        self._record_server(server)


def _take_ownership(path: Path, url: str) -> LockFile:
    """Create the file and its directory if missing, and return the held lock. Raise StoreFull if the disk is full,
    StoreError if another process owns the file or it cannot be written.
    """
    try:
        private_directory(path.parent)
        lock = LockFile(path, url)
        with contextlib.suppress(FileExistsError):  # only this user may read prompts and responses
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            lock.hold_data(path, url)
        except BaseException:
            lock.release()
            raise
        return lock
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "check that the directory can be written to"
        raise (StoreFull if full else StoreError)(f"{url}: {error}; {remedy}") from error


def _open(path: Path, url: str, durability: Durability) -> list[sqlite3.Connection]:
    """Return connections for the writer, the reader and the checkpointer. Migrate the database first."""
    target = f"file:{quote(str(path))}"
    pragmas: dict[str, str | int] = {
        "synchronous": _SYNCHRONOUS[durability],
        "temp_store": "MEMORY",
        "secure_delete": "OFF",
        "wal_autocheckpoint": 0,
        "journal_size_limit": LOG_BYTES,
    }
    opened: list[sqlite3.Connection] = []
    try:
        opened.append(connect(target, {"auto_vacuum": "INCREMENTAL", "journal_mode": "WAL"} | pragmas))
        migrate(opened[0], url)
        opened.append(connect(target, {"query_only": "ON"} | pragmas))
        opened.append(connect(target, {"busy_timeout": 0} | pragmas))
    except BaseException as error:
        for connection in opened:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise store_error(url, error) from error
        raise
    return opened
