"""Carry the current trace into threads and processes.

While a trace is open, threads and processes that are started in it continue the trace.

| started by | gets |
|---|---|
| `threading.Thread`, `ThreadPoolExecutor`, `multiprocessing.pool.ThreadPool` | the context |
| `multiprocessing.Process`, by any start method | the trace, for the life of the process |
| `ProcessPoolExecutor`, `multiprocessing.Pool` | the trace, for each piece of work |
| `subprocess`, `asyncio.create_subprocess_*` | environment variables (`Trace.environment`) |

A variable that a program's own `env` changes keeps that value. `asyncio` tasks and `asyncio.to_thread` carry context
variables by themselves. The methods are replaced while at least one trace is open, and restored when the last one
closes. A call outside a trace works as before. A worker of a pool does not belong to the trace in which it was started,
because each piece of work brings its own. A child of a bare `os.fork()` is in no trace, so emitting there raises an
error instead of losing the span.

The module knows these starters and the current trace. To support another one (a new kind of executor), add its method
to `_patches`.
"""

from __future__ import annotations

import contextvars
import functools
import multiprocessing.pool
import multiprocessing.process
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as otel_context

from leyden.tracing.instrumentation.instrumentation import Patch
from leyden.tracing.trace import CURRENT, Trace

_ENV_POSITION = 10
"""The position of `env` among the positional arguments of Popen, after `self`."""


# ---- threads -------------------------------------------------------------------------------------


def _carrying_start(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Return a `Thread.start` that runs the thread in a copy of the caller's context while a trace is open."""

    def start(self: threading.Thread) -> None:
        if CURRENT.get() is not None:
            context, run = contextvars.copy_context(), self.run

            def carried() -> None:
                vars(self).pop("run", None)  # otherwise the thread object would keep the context alive
                context.run(run)

            self.run = carried
        original(self)

    return start


def _carrying_submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Return a `ThreadPoolExecutor.submit` whose calls run in a copy of the caller's context while a trace is open."""

    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if CURRENT.get() is None:
            return original(self, fn, *args, **kwargs)
        context = contextvars.copy_context()
        with _outside_traces():  # a worker that the pool starts now belongs to no trace
            return original(self, context.run, fn, *args, **kwargs)

    return submit


class _InContext:
    """A function whose every call runs in a copy of the context in which it was made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._context = function, contextvars.copy_context()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._context.copy().run(self._function, *args, **kwargs)


# ---- processes -----------------------------------------------------------------------------------


class _CarriedRun:
    """The `run` of a process object that is being started. It is pickled with the object, or inherited by a fork, and
    opens the trace in the child.
    """

    def __init__(self, process: multiprocessing.process.BaseProcess, trace: Trace) -> None:
        self._process, self._carried = process, trace.packed()

    def __call__(self) -> None:
        vars(self._process).pop("run", None)  # uncovers the process's own `run`
        self._carried.run(self._process.run)


def _carrying_process(original: Callable[..., None]) -> Callable[..., None]:
    """Return a `Process.start` whose child continues the current trace, if there is one."""

    def start(self: multiprocessing.process.BaseProcess) -> None:
        trace = CURRENT.get()
        if trace is None:
            return original(self)
        vars(self)["run"] = _CarriedRun(self, trace)  # hides the process's `run` until it has started
        try:
            with _outside_traces():
                return original(self)
        finally:
            vars(self).pop("run", None)

    return start


def _carrying_process_submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Return a `ProcessPoolExecutor.submit` whose worker runs the call in the current trace, if there is one."""

    def submit(self: ProcessPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        trace = CURRENT.get()
        if trace is None:
            return original(self, fn, *args, **kwargs)
        carried = trace.packed()
        with _outside_traces():
            return original(self, carried.run, fn, *args, **kwargs)

    return submit


def _outside_trace(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _outside_traces():
            original(self, *args, **kwargs)

    return functools.wraps(original)(init)


def _apply_with_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Pool` whose workers run the function in the current trace, if there is one. A worker thread
    gets a copy of the context, a worker process the packed trace.
    """

    def apply(self: multiprocessing.pool.Pool, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trace = CURRENT.get()
        if trace is None:
            return original(self, func, *args, **kwargs)
        if isinstance(self, multiprocessing.pool.ThreadPool):
            return original(self, _InContext(func), *args, **kwargs)
        return original(self, functools.partial(trace.packed().run, func), *args, **kwargs)

    return apply


# ---- programs ------------------------------------------------------------------------------------


def _popen_with_trace(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        trace = CURRENT.get()
        if trace is not None:
            if len(args) > _ENV_POSITION:
                args = (*args[:_ENV_POSITION], _merged(trace, args[_ENV_POSITION]), *args[_ENV_POSITION + 1 :])
            else:
                kwargs["env"] = _merged(trace, kwargs.get("env"))
        original(self, *args, **kwargs)

    return functools.wraps(original)(init)


def _spawn_with_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    def spawn(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = CURRENT.get()
        if trace is not None:
            kwargs["env"] = _merged(trace, kwargs.get("env"))
        return original(self, *args, **kwargs)

    return spawn


def _merged(trace: Trace, given: Mapping[Any, Any] | None) -> Mapping[Any, Any]:
    """Return a program's environment: `given`, and the trace's variables unless the call itself changes them.

    given: the call's `env`; None: this process's environment.
    """
    if given is None:
        return {**os.environ, **trace.environment()}
    changed = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    return {**changed, **{n: v for n, v in trace.environment().items() if changed.get(n) == os.environ.get(n)}}


# ---- while a trace is open -----------------------------------------------------------------------


@contextmanager
def _outside_traces() -> Generator[None]:
    """Leave the current trace during the block, in which a pool may start workers that would keep it for good."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


@functools.cache
def _patches() -> Sequence[Patch]:
    pool = multiprocessing.pool.Pool
    return (
        Patch(threading.Thread, "start", _carrying_start),
        Patch(ThreadPoolExecutor, "submit", _carrying_submit),
        Patch(multiprocessing.process.BaseProcess, "start", _carrying_process),
        Patch(ProcessPoolExecutor, "submit", _carrying_process_submit),
        Patch(pool, "__init__", _outside_trace),
        *(Patch(pool, name, _apply_with_trace) for name in ("apply_async", "_map_async", "imap", "imap_unordered")),
        Patch(subprocess.Popen, "__init__", _popen_with_trace),
    )


@functools.cache
def _patches_of_uvloop() -> Sequence[Patch]:
    """Return the patches of uvloop's loop, which starts programs without `subprocess`."""
    loop = sys.modules["uvloop"].Loop
    return tuple(Patch(loop, name, _spawn_with_trace) for name in ("subprocess_exec", "subprocess_shell"))


class _Patched:
    """The number of open traces, and the patches, which are applied while there is at least one."""

    lock = threading.Lock()
    open_traces = 0
    applied: Sequence[Patch] = ()


def hold() -> None:
    """Count one more open trace; the first one applies the patches."""
    _watch_forks()
    with _Patched.lock:
        _Patched.open_traces += 1
        if _Patched.open_traces == 1:
            _Patched.applied = (*_patches(), *(_patches_of_uvloop() if "uvloop" in sys.modules else ()))
            for patch in _Patched.applied:
                patch.apply()


def release() -> None:
    """Count one open trace fewer; the last one undoes the patches."""
    with _Patched.lock:
        _Patched.open_traces -= 1
        if _Patched.open_traces == 0:
            for patch in _Patched.applied:
                patch.undo()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_trace)


def _leave_trace() -> None:
    """Leave the trace in a forked child, and replace the lock. The connection to the store stayed in the parent, and so
    did the threads, one of which may have held the lock.
    """
    _Patched.lock = threading.Lock()
    if CURRENT.get() is not None:
        CURRENT.set(None)
        otel_context.attach(otel_context.Context())
