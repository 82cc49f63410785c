"""Name the resource of the machine whose exhaustion made an operation fail.

This module knows exceptions, but neither agents nor stores. To cover another resource, add it to `_RESOURCES`.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from typing import cast

from leyden._lib.text import describe_error
from leyden._lib.throttle import Throttle


@dataclass(frozen=True, slots=True)
class _Exhaustible:
    """A resource that can run out, and the errors by which that is recognised."""

    name: str
    remedy: str
    numbers: tuple[int, ...] = ()
    """Values of `OSError.errno`."""
    codes: tuple[str, ...] = ()
    """Names of SQLite's errors, codes of PostgreSQL's."""
    texts: tuple[str, ...] = ()
    """Parts of messages, for errors that another process or library has made into text."""

    def is_named_by(self, error: BaseException) -> bool:
        """Return whether this error, without its causes, says that the resource has run out."""
        if isinstance(error, MemoryError) and errno.ENOMEM in self.numbers:
            return True
        if isinstance(error, OSError) and error.errno in self.numbers:
            return True
        if {getattr(error, "sqlite_errorname", None), getattr(error, "sqlstate", None)} & set(self.codes):
            return True
        message = describe_error(error)
        return any(text in message for text in self.texts)


_RESOURCES = (
    _Exhaustible(
        "the disk is full",
        "free some space; what was not stored is tried again on a resume",
        (errno.ENOSPC, errno.EDQUOT),
        ("SQLITE_FULL", "53100"),
        (os.strerror(errno.ENOSPC), "disk is full"),
    ),
    _Exhaustible(
        "no file descriptors are left",
        "raise the limit (ulimit -n), or lower concurrency; agents that open a client for each rollout should close it",
        (errno.EMFILE, errno.ENFILE),
        (),
        (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE)),
    ),
    _Exhaustible("GPU memory is used up", "lower the batch or its token budget", texts=("CUDA out of memory",)),
    _Exhaustible(
        "memory is used up",
        "lower n_runners or concurrency; memory_bytes= of the ipc and cs strategies limits each runner",
        (errno.ENOMEM,),
        ("SQLITE_NOMEM", "53200"),
        (os.strerror(errno.ENOMEM),),
    ),
    _Exhaustible(
        "no more threads or processes can be started",
        "raise the limit (ulimit -u), or lower concurrency of agents that are not async",
        (),
        (),
        ("can't start new thread",),
    ),
    _Exhaustible(
        "the database takes no more connections", "raise max_connections, or use fewer processes", (), ("53300",)
    ),
)

_warnings = Throttle()
"""Admits one warning a minute for each resource, because hundreds of attempts may fail at once."""


def exhausted_resource(error: BaseException) -> str | None:
    """Return the exhausted resource that caused `error`, with a remedy; None for another cause. Causes, contexts and
    members of exception groups count.
    """
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        for resource in _RESOURCES:
            if resource.is_named_by(cause):
                return f"{resource.name}: {resource.remedy}"
        waiting += [each for each in (cause.__context__, cause.__cause__) if each is not None]
        if isinstance(cause, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", cause).exceptions
    return None


def warn_if_exhausted(logger: logging.Logger, subject: str, error: BaseException) -> None:
    """Log a warning if an exhausted resource caused `error`, at most once a minute for each resource."""
    found = exhausted_resource(error)
    if found is not None and _warnings.admits(found):
        logger.warning("%s failed because %s", subject, found)
