"""Carry the current trace into threads: while a trace is open, `Thread.start` and `ThreadPoolExecutor.submit` take it along.

asyncio's tasks and `asyncio.to_thread` carry context variables by themselves. The patch is installed when the first trace opens and
removed when the last one closes; code outside any trace behaves as if it were not there.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from leyden.tracer.context import current_trace

__all__ = ["carrying_threads"]

_lock = threading.Lock()
_open_traces = 0
_start = threading.Thread.start
_submit = ThreadPoolExecutor.submit
_POOL_WORKER = "_worker"  # concurrent.futures.thread's own loop: it serves many, so it carries none


def _carrying_start(thread: threading.Thread) -> None:
    target = getattr(thread, "_target", None)
    if current_trace.get() is not None and getattr(target, "__name__", "") != _POOL_WORKER:
        context, run = contextvars.copy_context(), thread.run
        thread.run = lambda: context.run(run)
    _start(thread)


def _carrying_submit(
    pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    if current_trace.get() is None:
        return _submit(pool, function, *args, **kwargs)
    return _submit(pool, contextvars.copy_context().run, function, *args, **kwargs)


@contextlib.contextmanager
def carrying_threads() -> Generator[None]:
    """While inside, threads started under a trace belong to it."""
    global _open_traces
    with _lock:
        _open_traces += 1
        if _open_traces == 1:
            threading.Thread.start = _carrying_start  # pyright: ignore[reportAttributeAccessIssue] -- the patch
            ThreadPoolExecutor.submit = _carrying_submit
    try:
        yield
    finally:
        with _lock:
            _open_traces -= 1
            if _open_traces == 0:
                threading.Thread.start = _start
                ThreadPoolExecutor.submit = _submit
