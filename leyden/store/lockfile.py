"""A lock beside a store's file, so that one process owns it. The lock ends with its owner.

The lock is the kernel's (`flock`), never the file's existence, so a killed owner leaves nothing to clean up. The file's
text only names the owner to the next process.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leyden.errors import StoreError


class LockFile:
    """The lock of the store's file at `path`, held from creation until `release`. Raise StoreError, naming the owner,
    if another process or another store object holds it.
    """

    def __init__(self, path: Path, url: str) -> None:
        self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 4096, 0)
            os.close(self._file)
            raise StoreError(_refusal(url, owner)) from None
        except BaseException:
            os.close(self._file)
            raise
        _drop_in_forked_children()
        self._close_data: Callable[[], object] = lambda: None
        self._identity: tuple[int, int] | None = None
        self._finalizer = weakref.finalize(self, os.close, self._file)
        self._owner = {"pid": os.getpid(), "url": url}
        try:
            self._write(self._owner)
        except BaseException:
            self._finalizer()
            raise
        _held.add(self)

    def record_server(self, server: str | None) -> None:
        """Record the URL of the owner's server, if any, for the error of the next process that opens the file."""
        self._write(self._owner if server is None else self._owner | {"server": server})

    def hold_data(self, path: Path, url: str) -> None:
        """Lock the store's file itself, so that it has one owner under all of its names. Call it before SQLite opens
        the file.

        Raise StoreError if another process or store object holds it, or if it has hard links, because each name would
        have its own write-ahead log.
        """
        check_one_name(path, url)
        status = path.stat()
        identity = status.st_dev, status.st_ino
        other = f"{url} is open already under another name; a file store has one owner at a time: use that name"
        # Closing any descriptor of the file would end SQLite's own locks on it in this process, so
        # it is not opened twice.
        if any(lock._identity == identity for lock in _held):
            raise StoreError(other)
        if sys.platform != "linux":  # where `flock` and SQLite's locks exclude each other
            self._identity = identity
            return
        data = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(data)
            raise StoreError(other) from None
        except OSError:  # a file system without these locks
            os.close(data)
        else:
            self._close_data = weakref.finalize(self, os.close, data)
        self._identity = identity

    def release(self) -> None:
        """Release the lock. Safe to repeat. Garbage collection of this object releases it too."""
        if self._finalizer.alive:
            _held.discard(self)
            self._close_data()
            os.ftruncate(self._file, 0)
            self._finalizer()

    def _write(self, owner: Mapping[str, object]) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(owner).encode(), 0)

    def drop_in_child(self) -> None:
        """Close a forked child's copy of the lock, which would outlive the owner."""
        self._close_data()
        self._finalizer()


class Owner(NamedTuple):
    """The owner of a store's file, as its lock file names it."""

    pid: int | None
    """None if the lock file cannot be read."""
    server: str | None
    """The URL of the owner's server."""


def check_one_name(path: Path, url: str) -> None:
    """Raise StoreError for a file with hard links."""
    links = path.stat().st_nlink
    if links > 1:
        raise StoreError(
            f"{url} has {links} names (hard links), and its newest records may be in the write-ahead log of another name; "
            "remove the other names, or copy the store with `leyden store export` or SQLite's `.backup`"
        )


def owner_of(path: Path) -> Owner | None:
    """Return the owner of the store at `path`; None if no living process owns it."""
    try:
        owner = _parse_owner(Path(f"{path}.lock").read_bytes())
    except OSError:
        return None
    if owner.pid is None:
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # another user's
        pass
    return owner


def _parse_owner(text: bytes) -> Owner:
    """Return the owner that a lock file names; an owner without a pid if the file is empty or damaged."""
    try:
        owner = json.loads(text)
        return Owner(int(owner["pid"]), owner.get("server"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Owner(None, None)


def _refusal(url: str, text: bytes) -> str:
    """Return the message for a lock that is held, by the content of the lock file."""
    pid, server = _parse_owner(text)
    if pid == os.getpid():
        return f"{url} is open in this process already; share that store object, or close it first"
    who = "another process" if pid is None else f"process {pid}"
    way = f"open {server}, where it is served" if server else "stop that process, or open another path"
    return f"{url} is in use by {who}; a file store has one owner at a time: {way}"


_held: weakref.WeakSet[LockFile] = weakref.WeakSet()
"""The locks that this process holds."""


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop_in_child()
    _held.clear()


@cache
def _drop_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_drop_all)
