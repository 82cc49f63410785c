"""Read a store's file while another process may own and write it.

The module takes no lock and changes nothing, not even the directory. A file without a write-ahead log has no owner and
is read as it is; one with a log is read together with the log. SQLite does not notify other processes. A thread
therefore reads the number that changes with each commit 20 times a second, at 10 microseconds each, and waiters wake a
moment after a commit.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

from leyden.errors import StoreClosed, StoreError
from leyden.store.lockfile import check_one_name, owner_of
from leyden.store.notify import Signals
from leyden.store.session_thread import SessionThread
from leyden.store.sql.driver import Operation
from leyden.store.sql.session import Session
from leyden.store.sql.sqlite import check_schema, connect, store_error

T = TypeVar("T")

_POLL_SECONDS = 0.05
"""How often to look for changes of the file."""
_OPENING_SECONDS = 0.5
"""The seconds that an owner may take between creating its log and creating the log's index."""


_Stamp = tuple[int, int] | None
"""The time and size of the last change of a file without a log; None if there is a log, whose changes SQLite itself
reports."""


class ReadOnlyDriver:
    """Reads the store in the file at `path`. Raise StoreError for every write, and if there is no store to read."""

    def __init__(self, path: Path, signals: Signals) -> None:
        self.url = f"sqlite://{path}"
        self._path = path
        self._opening = threading.Lock()
        self._closed = False
        self._readers: list[tuple[SessionThread, _Stamp]] = []
        if path.is_file():
            check_one_name(path, self.url)
        self._newest_reader()
        self._watch = _FileWatch(path, self.url, signals)

    async def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """Run a read on the newest file at this path. If another file has replaced it meanwhile, read again."""
        while True:
            reader, stamp = self._newest_reader()
            try:
                answer: T = await reader.run(operation, args, kwargs)
            except StoreError:
                if _is_unchanged(self._path, stamp):
                    raise
            else:
                if _is_unchanged(self._path, stamp):
                    return answer

    async def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,
    ) -> NoReturn:
        """Raise StoreError, which names the process that owns the file and may change it."""
        owner = owner_of(self._path)
        if owner is None:
            way = "open it without read_only"
        else:
            where = (
                f"open its server {owner.server} instead"
                if owner.server
                else "make the change there, or have it serve the file with LightningStoreServer"
            )
            way = f"process {owner.pid} owns it: {where}"
        raise StoreError(f"{self.url} was opened read-only here and cannot be changed; {way}")

    def record_server(self, server: str | None) -> None:
        """Do nothing: other processes may open the file as well."""

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._watch.stop()
        with self._opening:
            self._closed = True
        for reader, _ in self._readers:
            reader.stop()

    def _newest_reader(self) -> tuple[SessionThread, _Stamp]:
        """Return a reader of the present file. Open a new one if another process has opened the file for writing since,
        even if it has closed it again.
        """
        with self._opening:
            if self._closed:
                raise StoreClosed(f"{self.url} is closed; open it again")
            if not self._readers or not _is_unchanged(self._path, self._readers[-1][1]):
                connection, stamp = _connect(self._path, self.url)
                session = Session(connection, self.url, "reader")
                self._readers.append((SessionThread(session, "leyden-store-reader", inline=True), stamp))
            return self._readers[-1]


class _FileWatch:
    """Wakes every waiter when the file has changed."""

    def __init__(self, path: Path, url: str, signals: Signals) -> None:
        over = threading.Event()
        thread = threading.Thread(
            target=_serve, args=(path, url, signals, over), name="leyden-store-watch", daemon=True
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _end, over, thread)

    def stop(self) -> None:
        """End the thread. Safe to repeat."""
        self._finalizer()


def _serve(path: Path, url: str, signals: Signals, over: threading.Event) -> None:
    """Run a thread: wake all waiters whenever the database changes, until `over` is set.

    A file without a log is compared by its time and size. Once there is a log, a connection reads SQLite's
    `data_version`, which changes with each commit of another process.
    """
    connection: sqlite3.Connection | None = None
    seen: object = _stamp_of(path)
    try:
        while not over.wait(_POLL_SECONDS):
            now: object = _stamp_of(path)
            if connection is None and now is None:
                connection, _ = _connect(path, url)
            if connection is not None:
                now = connection.execute("PRAGMA data_version").fetchone()
            if now != seen:
                seen = now
                signals.wake_all()
    except (StoreError, OSError, sqlite3.Error):
        signals.wake_all()  # each waiter reads for itself and gets the error
    finally:
        if connection is not None:
            connection.close()


def _end(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    if thread is not threading.current_thread():
        thread.join()


def _stamp_of(path: Path) -> _Stamp:
    """Return the file's time and size, or None if it has a log. Raise OSError without a file."""
    if path.with_name(f"{path.name}-wal").exists():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _is_unchanged(path: Path, stamp: _Stamp) -> bool:
    """Return whether the file that was opened with this stamp is still the present one.

    A file with a log always is, because its owner keeps the log while a reader has it open.
    """
    try:
        return stamp is None or stamp == _stamp_of(path)
    except OSError:
        return True  # the file was deleted, so no newer one can be opened


def _connect(path: Path, url: str) -> tuple[sqlite3.Connection, _Stamp]:
    """Return a connection for reading, and the stamp of the file that it reads. Raise StoreError if that fails."""
    if not path.is_file():
        raise StoreError(f"{url} does not exist; only a store that is there can be opened read-only")
    deadline = time.monotonic() + _OPENING_SECONDS
    while True:
        stamp = _stamp_of(path)
        try:
            return _reading(path, url, stamp), stamp
        except sqlite3.Error as error:
            # While an owner opens or closes the file, the log exists for a moment without its index.
            is_half_open = (getattr(error, "sqlite_errorname", None) or "").startswith("SQLITE_CANTOPEN")
            if not is_half_open or time.monotonic() > deadline:
                raise store_error(url, error) from error
            time.sleep(_POLL_SECONDS / 10)


def _reading(path: Path, url: str, stamp: _Stamp) -> sqlite3.Connection:
    """Return a connection for reading. Raise StoreError for a file that is no store.

    stamp: a file with a stamp has no log and so no writer. It is opened as immutable, so that SQLite makes no files
        beside it.
    """
    alone = "" if stamp is None else "&immutable=1"
    connection = connect(f"file:{quote(str(path))}?mode=ro{alone}", {"query_only": "ON", "temp_store": "MEMORY"})
    try:
        check_schema(connection, url)
    except BaseException:
        connection.close()
        raise
    return connection
