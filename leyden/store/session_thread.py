"""Run operations from any thread and any event loop on one database session.

The module knows threads and event loops, and no operation. A short operation runs in the calling thread if the session
is free, because handing it to another thread and back would cost more than most operations take. Any other operation is
a job for the session's own thread. The jobs that wait there share one commit (group commit), and each event loop gets
its results by one call.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from leyden.errors import StoreClosed, StoreError
from leyden.store.sql.driver import Operation
from leyden.store.sql.session import Session
from leyden.store.sql.transaction import Long

_SHORT = 64
"""The most rows of a short operation. One on more rows takes longer than handing it to a thread."""
YIELD_EVERY = 32
"""After this many operations in the calling thread, which never wait, the event loop's other tasks get a turn."""
_BATCH = 1024
"""The most jobs that share a commit. The first of them waits for all."""

_SETTLE_SECONDS = 1.0
"""How long the thread waits at its end for an event loop that is blocked."""

Loops = weakref.WeakSet[asyncio.AbstractEventLoop]
"""Event loops that may still give results back."""

process_id = os.getpid()
"""The id of this process. Each operation reads it, and `os.getpid` takes 0.14 us."""


def _renew_process_id() -> None:
    global process_id
    process_id = os.getpid()


os.register_at_fork(after_in_child=_renew_process_id)


class QueuedOperation:
    """An operation in the queue of a thread.

    future: receives the result; None if no caller needs it.
    undo: an operation that takes the result back if no caller receives it; None if there is none.
    """

    __slots__ = ("answer", "args", "error", "future", "kwargs", "loop", "operation", "undo")

    def __init__(
        self,
        operation: Operation[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        future: asyncio.Future[Any] | None = None,
        undo: Operation[None] | None = None,
    ) -> None:
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.future = future
        self.loop = None if future is None else future.get_loop()
        self.undo = undo
        self.answer: Any = None
        self.error: BaseException | None = None

    @property
    def wanted(self) -> bool:
        """Whether the caller still waits for the result."""
        return self.future is None or not self.future.cancelled()


class SessionThread:
    """Runs operations on `session`, until `stop`.

    inline: whether a short operation may run in the calling thread. It must not if a commit waits for the disk, which
        would block the event loop.
    """

    def __init__(self, session: Session, name: str, *, inline: bool) -> None:
        self._session = session
        self._inline = inline
        self._pid = process_id
        self._open = True
        self._given = 0
        self._gate = threading.Lock()
        self._jobs: SimpleQueue[QueuedOperation | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(session, self._jobs), name=name, daemon=True)
        self._thread.start()
        # The thread also ends with a store that is dropped without `close`, and with the program.
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)

    async def run(
        self,
        operation: Operation[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,
    ) -> Any:
        """Run an operation, and return its result after its commit.

        undo: takes the result back if the caller was cancelled after the commit.
        """
        try:
            return await self.run_here(operation, args, kwargs)
        except Long:
            pass
        job = QueuedOperation(operation, args, kwargs, asyncio.get_running_loop().create_future(), undo)
        with self._gate:
            self._check_open()
            self._jobs.put(job)
        return await result_of(self._jobs, job)

    async def run_here(
        self, operation: Operation[Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, reads: bool = False
    ) -> Any:
        """Run a short operation in the calling thread. Raise Long if it is not short, or if the session is in use.

        reads: the operation changes nothing.
        """
        check_process(self._session.url, self._pid)
        if not self._inline or not self._jobs.empty():
            raise Long
        self._given += 1
        if self._given % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        if not self._session.lock.acquire(blocking=False):
            raise Long
        try:
            self._check_open()
            return self._session.alone(operation, args, kwargs, most=_SHORT, reads=reads)
        finally:
            self._session.lock.release()

    def stop(self) -> None:
        """Refuse new operations, and block until the accepted ones are done. Safe to repeat."""
        with self._gate:
            self._open = False
        self._finalizer()

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosed(f"{self._session.url} is closed; open it again")


def check_process(url: str, pid: int) -> None:
    """Raise StoreError in a process forked from the one that opened the store.

    Call it before any lock is touched: a forked child has copies that are never released.
    """
    if process_id != pid:
        raise StoreError(
            f"{url} was opened by process {pid} and cannot be used in its forked child {process_id}; "
            "open another store there, after the fork"
        )


def _serve(session: Session, jobs: SimpleQueue[QueuedOperation | None]) -> None:
    """Run the thread: execute jobs until the mark of the end (None).

    It keeps no reference to `SessionThread`, so that a store that is dropped without `close` is collected, which ends
    the thread.
    """
    loops: Loops = weakref.WeakSet()
    _work(session, jobs, loops)
    settle(loops)
    jobs.put(None)
    _work(session, jobs, loops)  # undoes operations whose callers were cancelled meanwhile
    with session.lock:
        session.close()


def _work(session: Session, jobs: SimpleQueue[QueuedOperation | None], loops: Loops) -> None:
    """Run batches of queued jobs up to the mark of the end (None).

    loops: receives the event loops of the callers.
    """
    while batch := _next_batch(jobs):
        with session.lock:
            session.together(batch)
        loops |= deliver(jobs, batch)


def _next_batch(jobs: SimpleQueue[QueuedOperation | None]) -> list[QueuedOperation]:
    """Return all waiting jobs, at least one; empty if there will be no more."""
    job = jobs.get()
    batch: list[QueuedOperation] = []
    while job is not None:
        batch.append(job)
        if len(batch) == _BATCH:
            return batch
        try:
            job = jobs.get_nowait()
        except Empty:
            return batch
    if batch:
        jobs.put(None)  # the end comes after this batch
    return batch


def deliver(jobs: SimpleQueue[QueuedOperation | None], batch: Sequence[QueuedOperation]) -> Loops:
    """Resolve each job's future, with one call for each event loop. Return the loops in which a cancelled caller may
    still have its operation undone.
    """
    undoable: Loops = weakref.WeakSet()
    by_loop: dict[asyncio.AbstractEventLoop, list[QueuedOperation]] = {}
    for job in batch:
        if job.loop is not None:
            by_loop.setdefault(job.loop, []).append(job)
            if job.undo is not None:
                undoable.add(job.loop)
    for loop, finished in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, jobs, finished)
        except RuntimeError:  # the loop is closed, so no caller waits
            for job in finished:
                _take_back(jobs, job)
    return undoable


def settle(loops: Loops) -> None:
    """Wait until callers in these loops have received their results or queued their undoing."""
    for loop in list(loops):
        arrived = threading.Event()
        with suppress(RuntimeError):  # a closed loop has no callers
            # two turns of the loop: the first resolves futures, in the second their tasks have run
            loop.call_soon_threadsafe(loop.call_soon, arrived.set)
            arrived.wait(_SETTLE_SECONDS)


def _resolve(jobs: SimpleQueue[QueuedOperation | None], finished: Sequence[QueuedOperation]) -> None:
    """Resolve the futures of finished jobs, in their event loop. Undo those without a caller."""
    for job in finished:
        future = job.future
        assert future is not None
        if future.done():  # cancelled while the job was under way
            _take_back(jobs, job)
        elif job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.answer)


async def result_of(jobs: SimpleQueue[QueuedOperation | None], job: QueuedOperation) -> Any:
    """Return the result of a queued operation, or raise its error.

    jobs: the queue that the operation is in. If the caller is cancelled after the commit and before it receives the
        result, the operation's `undo` is put there.
    """
    future = job.future
    assert future is not None
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled():  # cancelled after the result was set, before the task ran
            _take_back(jobs, job)
        raise


def _take_back(jobs: SimpleQueue[QueuedOperation | None], job: QueuedOperation) -> None:
    """Queue the undoing of a committed operation whose result reached no caller, if it has one."""
    if job.undo is not None and job.error is None and job.answer:
        jobs.put(QueuedOperation(job.undo, (job.answer,), {}))


def _stop(jobs: SimpleQueue[QueuedOperation | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
