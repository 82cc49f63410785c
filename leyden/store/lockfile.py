"""One process owns a store's file: a lock beside it, which dies with its owner.

The lock is the kernel's (`flock`), never the file's existence, so a killed owner leaves nothing to clean up. The file's
text only tells the next one who owns it.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from functools import cache
from pathlib import Path

from leyden.errors import StoreError

__all__ = ["LockFile"]


class LockFile:
    """The lock beside `path`, held from creation until `release`. Raises StoreError with the owner when it is taken."""

    def __init__(self, path: Path, url: str) -> None:
        self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 4096, 0)
            os.close(self._file)
            raise StoreError(_refusal(url, owner)) from None
        except BaseException:
            os.close(self._file)
            raise
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps({"pid": os.getpid(), "url": url}).encode(), 0)
        _drop_in_forked_children()
        self._finalizer = weakref.finalize(self, os.close, self._file)
        _held.add(self)

    def release(self) -> None:
        """Let others own the store. Safe to repeat; an owner that is only dropped releases it too."""
        if self._finalizer.alive:
            _held.discard(self)
            os.ftruncate(self._file, 0)
            self._finalizer()

    def drop_in_child(self) -> None:
        """Close a forked child's copy of the lock, which would outlive the owner."""
        self._finalizer()


def _refusal(url: str, owner: bytes) -> str:
    try:
        pid = json.loads(owner)["pid"]
    except (ValueError, KeyError, TypeError):
        pid = None
    if pid == os.getpid():
        return f"{url} is open in this process already; share that store object, or close it first"
    who = "another process" if pid is None else f"process {pid}"
    return f"{url} is in use by {who}; a file store has one owner at a time: stop that process, or open another path"


_held: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop_in_child()
    _held.clear()


@cache
def _drop_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_drop_all)
