"""Keeps SQLite's write-ahead log short, on a thread of its own, so that no commit waits for a checkpoint.

It knows a session and the log's size. A checkpoint copies the log into the database and waits for the disk twice; most
of that happens beside the writer, and only the last step, which lets the log begin again, holds the session.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import weakref
from pathlib import Path

from leyden.store.sql.session import Session

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)

_LOOK_EVERY = 64
"""Writes between two looks at the log."""
_LIMIT_BYTES = 32 * 2**20
"""A longer log is copied into the database; large, so that a page which many commits change is copied once."""


class Checkpointer:
    """Shortens the log of the database at `path`, which `session` writes, until `stop`. It owns `connection`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, session: Session) -> None:
        self._writes = 0
        self._look = threading.Event()
        self._over = threading.Event()
        log = path.with_name(f"{path.name}-wal")
        thread = threading.Thread(
            target=_serve,
            args=(log, connection, session, self._look, self._over),
            name="leyden-store-checkpointer",
            daemon=True,
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._look, self._over, thread)

    def wrote(self) -> None:
        """There was a write."""
        self._writes += 1
        if self._writes % _LOOK_EVERY == 0:
            self._look.set()

    def stop(self) -> None:
        """End the thread and close its connection. Safe to repeat."""
        self._finalizer()


def _serve(
    log: Path, connection: sqlite3.Connection, session: Session, look: threading.Event, over: threading.Event
) -> None:
    while look.wait() and not over.is_set():
        look.clear()
        try:
            if log.stat().st_size > _LIMIT_BYTES:
                _checkpoint(connection, session)
        except (OSError, sqlite3.Error) as error:
            logger.warning("%s could not be shortened, and will be tried again: %s", log, error)
    connection.close()


def _checkpoint(connection: sqlite3.Connection, session: Session) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # the bulk of it, while others write
    with session.lock:  # a reader may still need the log; then this answers "busy", and the next look tries again
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _stop(look: threading.Event, over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    look.set()
    if thread is not threading.current_thread():
        thread.join()
