"""Carry the current trace into threads: while a trace is open, `Thread.start` and `ThreadPoolExecutor.submit` take it along.

`asyncio` tasks and `asyncio.to_thread` carry context variables by themselves. The two methods are replaced while at least one trace is
open and put back with the last one; code that runs outside a trace is not touched. A thread of a pool is not marked by the trace in
which it happened to be started: each piece of work brings its own.

It knows threads and the current trace. To carry it in another way (a new kind of executor), add its method to `_PATCHES`.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from leyden.tracer.trace import CURRENT

__all__ = ["hold", "release"]


def _carrying_start(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def start(self: threading.Thread) -> None:
        if CURRENT.get() is not None:
            context, run = contextvars.copy_context(), self.run

            def carried() -> None:
                vars(self).pop("run", None)  # no cycle, and no context kept alive, once it runs
                context.run(run)

            self.run = carried
        original(self)

    return start


def _carrying_submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if CURRENT.get() is None:
            return original(self, fn, *args, **kwargs)
        context = contextvars.copy_context()
        token = CURRENT.set(None)  # a pool thread that this call starts must not belong to this trace for good
        try:
            return original(self, context.run, fn, *args, **kwargs)
        finally:
            CURRENT.reset(token)

    return submit


class _Patch:
    """One method, replaced and put back."""

    def __init__(self, owner: type[Any], name: str, carrying: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._carrying = owner, name, carrying
        self._original: Any = None
        self._replacement: Any = None

    def apply(self) -> None:
        if self._replacement is None:
            self._original = getattr(self._owner, self._name)
            self._replacement = self._carrying(self._original)
            setattr(self._owner, self._name, self._replacement)

    def undo(self) -> None:
        # Where someone else has replaced it after us, ours is below theirs: it stays, does nothing outside a trace, and serves again.
        if getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
            self._replacement = None


_PATCHES = (
    _Patch(threading.Thread, "start", _carrying_start),
    _Patch(ThreadPoolExecutor, "submit", _carrying_submit),
)
_lock = threading.Lock()
_open_traces = 0


def hold() -> None:
    """One more trace is open."""
    global _open_traces
    with _lock:
        _open_traces += 1
        if _open_traces == 1:
            for patch in _PATCHES:
                patch.apply()


def release() -> None:
    """One trace fewer is open."""
    global _open_traces
    with _lock:
        _open_traces -= 1
        if _open_traces == 0:
            for patch in _PATCHES:
                patch.undo()
