"""Keep SQLite's write-ahead log short and the database's file small, on a thread for which no commit waits.

A checkpoint copies the log into the database and waits for the disk twice. Most of that happens while the writer works;
only the last step holds the session. Writing then begins at the start of the log again, and the log's file keeps its
length, because overwriting a page costs a third of adding one. SQLite uses pages again that retention freed. If there
are many, they are given back to the disk, a few at a time.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
import threading
import time
import weakref
from bisect import bisect_left
from pathlib import Path

from leyden.store.sql.session import Session

logger = logging.getLogger(__name__)

_CHECK_EVERY = 64
"""The number of writes between two checks of the log's size."""
LOG_BYTES = 16 * 2**20
"""A longer log is copied into the database. It is large, so that a page that many commits change is copied once."""
_SPARE_PAGES, _SPARE_SHARE = 4096, 0.25
"""Free pages that stay in the file for later writes: this many (16 MB), or this share of it."""
_STEP_PAGES = 32
"""Pages that one step removes from the file while a writer waits: usually 0.1 ms, rarely 5."""
_LOG_HEADER = struct.Struct(">8xI4x8s8x")
"""The log's header: the size of a page, and the salt of the frames that belong to it (sqlite.org/fileformat2.html,
4.1)."""
_FRAME_HEADER = struct.Struct(">8x8s8x")
"""A frame's header: the salt that was the log's when the frame was written. The page follows."""


class Checkpointer:
    """Shortens the database at `path` and its log, which `session` writes, until `stop`. It owns `connection`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, session: Session) -> None:
        self._writes = 0
        self._check = threading.Event()
        self._over = threading.Event()
        log = path.with_name(f"{path.name}-wal")
        thread = threading.Thread(
            target=_serve,
            args=(log, connection, session, self._check, self._over),
            name="leyden-store-checkpointer",
            daemon=True,
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._check, self._over, thread)

    def wrote(self) -> None:
        """Count a write. At every `_CHECK_EVERY`th, wake the thread to check the log's size."""
        self._writes += 1
        if self._writes % _CHECK_EVERY == 0:
            self._check.set()

    def stop(self) -> None:
        """End the thread and close its connection. Safe to repeat."""
        self._finalizer()


def _serve(
    log: Path, connection: sqlite3.Connection, session: Session, check: threading.Event, over: threading.Event
) -> None:
    """Shorten a large log and return free pages to the disk, after writes, until `over` is set.

    Runs in a thread that owns `connection`. `check` wakes it.
    """
    while check.wait() and not over.is_set():
        check.clear()
        try:
            if _bytes_in_use(log) > LOG_BYTES:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # most of it, while others write
                with session.lock:  # the rest; the next commit writes at the log's start, unless a reader still uses it
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            while not over.is_set():
                pages, free = (
                    connection.execute(f"PRAGMA {count}").fetchone()[0] for count in ("page_count", "freelist_count")
                )
                if free <= max(_SPARE_PAGES, _SPARE_SHARE * pages):
                    break
                with session.lock:
                    started = time.monotonic()
                    # `execute` would stop at the first page
                    connection.executescript(f"PRAGMA incremental_vacuum({_STEP_PAGES})")
                time.sleep(time.monotonic() - started)  # so that writers get as much time
        except (OSError, sqlite3.Error) as error:
            logger.warning("%s: the log could not be shortened, and will be tried again: %s", session.url, error)
    connection.close()


def _bytes_in_use(log: Path) -> int:
    """Return how many bytes were written to the log since writing last began at its start.

    The log's index has this number too, but no process may open and close the index beside SQLite: closing a file
    releases all locks that the process holds on it, and the next process that opens the database would take the index
    for abandoned and truncate it under the writer. The log itself holds no locks.
    """
    with log.open("rb", buffering=0) as file:
        header = file.read(_LOG_HEADER.size)
        if len(header) < _LOG_HEADER.size:
            return 0
        page_size, salt = _LOG_HEADER.unpack(header)
        frame_size = _FRAME_HEADER.size + page_size

        def is_older(frame: int) -> bool:
            found = os.pread(file.fileno(), _FRAME_HEADER.size, _LOG_HEADER.size + frame * frame_size)
            return len(found) < _FRAME_HEADER.size or _FRAME_HEADER.unpack(found)[0] != salt

        size = os.fstat(file.fileno()).st_size
        return frame_size * bisect_left(range(size // frame_size), True, key=is_older)


def _stop(check: threading.Event, over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    check.set()
    if thread is not threading.current_thread():
        thread.join()
