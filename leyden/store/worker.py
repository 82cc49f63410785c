"""A thread that owns one connection, and the jobs that event loops give it.

It knows SQLite's transactions and no operation. What is waiting when the thread comes round is one batch: a writer runs
each job in a savepoint and commits once (group commit), a reader runs each in a transaction of its own. Answers go back
with one call for each event loop and batch, after the commit.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

from leyden.errors import StoreClosed, StoreError
from leyden.store.sql.driver import Operation
from leyden.store.sql.sqlite import SqliteTransaction, store_error

__all__ = ["Job", "Publish", "SqliteThread"]

_BATCH = 1024
"""At most so many jobs share a commit, so that the first of them does not wait for ever."""

Publish = Callable[[int, Sequence[str]], None]
"""Told after a commit: how many rollouts were put in the queue, and which were finished."""


class Job:
    """One operation on its way through a thread, and the future that somebody awaits (none: an undo)."""

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


class SqliteThread:
    """Runs jobs on `connection`, in the order in which they were given, until `stop`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        url: str,
        role: Literal["writer", "reader"],
        publish: Publish | None = None,
    ) -> None:
        self._url = url
        self._pid = os.getpid()
        self._open = True
        self._gate = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        runs = _Runs(connection, url, role, self._jobs, publish)
        self._thread = threading.Thread(target=runs.serve, name=f"leyden-store-{role}", daemon=True)
        self._thread.start()
        # A store that is dropped without `close` lets its thread end, and so does the end of the program.
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)

    async def run(
        self,
        operation: Operation[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        undo: Operation[None] | None = None,
    ) -> Any:
        """The operation's answer, after its commit. See `Driver.write` for `undo`."""
        future = asyncio.get_running_loop().create_future()
        job = Job(operation, args, kwargs, future, undo)
        self._give(job)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # answered, and cancelled before the task could take it
                _take_back(self._jobs, job)
            raise

    def stop(self) -> None:
        """Accept no more jobs, and end after those that were accepted. Blocks until then; safe to repeat."""
        with self._gate:
            self._open = False
        self._finalizer()

    def _give(self, job: Job) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self._url} was opened by process {self._pid} and cannot be used in its forked child {os.getpid()}; "
                "open a store of its own there, after the fork"
            )
        with self._gate:
            if not self._open:
                raise StoreClosed(f"{self._url} is closed; open it again")
            self._jobs.put(job)


class _Runs:
    """What the thread does. It holds no reference to its `SqliteThread`, so that one can be dropped."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        url: str,
        role: Literal["writer", "reader"],
        jobs: SimpleQueue[Job | None],
        publish: Publish | None,
    ) -> None:
        self._connection = connection
        self._url = url
        self._run_batch = self._write if role == "writer" else self._read
        self._jobs = jobs
        self._publish = publish
        self._transaction = SqliteTransaction(connection, url)

    def serve(self) -> None:
        try:
            while batch := self._next_batch():
                self._run_batch(batch)
                _answer(self._jobs, batch)
        finally:
            self._connection.close()

    def _next_batch(self) -> list[Job]:
        """All jobs that wait, at least one; empty when there will be no more."""
        job = self._jobs.get()
        batch: list[Job] = []
        while job is not None:
            batch.append(job)
            if len(batch) == _BATCH:
                return batch
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return batch
        if batch:
            self._jobs.put(None)  # the end comes after this batch
        return batch

    def _write(self, batch: Sequence[Job]) -> None:
        claimable = 0
        finished: list[str] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                if self._in_savepoint(job):
                    claimable += self._transaction.claimable
                    finished += self._transaction.finished
            self._connection.execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 -- the whole batch is undone, and everybody is told
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            told = store_error(self._url, error) if isinstance(error, sqlite3.Error) else error
            for job in batch:
                job.error = job.error or told
            return
        if self._publish is not None and (claimable or finished):
            self._publish(claimable, finished)

    def _in_savepoint(self, job: Job) -> bool:
        """Run a job; False if it changed nothing. Raises only when the database gave up the whole transaction."""
        if job.future is not None and job.future.cancelled():
            return False
        self._connection.execute("SAVEPOINT job")
        try:
            self._transaction.begin()
            job.answer = job.operation(self._transaction, *job.args, **job.kwargs)
        except BaseException as error:
            job.error = store_error(self._url, error) if isinstance(error, sqlite3.Error) else error
            if not self._connection.in_transaction:
                raise
            self._connection.execute("ROLLBACK TO job")
        self._connection.execute("RELEASE job")
        return job.error is None

    def _read(self, batch: Sequence[Job]) -> None:
        for job in batch:
            if job.future is not None and job.future.cancelled():
                continue
            try:
                self._connection.execute("BEGIN")
                self._transaction.begin()
                job.answer = job.operation(self._transaction, *job.args, **job.kwargs)
            except BaseException as error:  # noqa: BLE001 -- given to whoever awaits the job
                job.error = store_error(self._url, error) if isinstance(error, sqlite3.Error) else error
            finally:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")


def _answer(jobs: SimpleQueue[Job | None], batch: Sequence[Job]) -> None:
    """Give each job's answer to whoever awaits it, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in batch:
        if job.loop is not None:
            by_loop.setdefault(job.loop, []).append(job)
    for loop, answered in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, jobs, answered)
        except RuntimeError:  # the loop is closed: nobody awaits there any more
            for job in answered:
                _take_back(jobs, job)


def _resolve(jobs: SimpleQueue[Job | None], answered: Sequence[Job]) -> None:
    for job in answered:
        future = job.future
        assert future is not None
        if future.done():  # cancelled while the job was under way
            _take_back(jobs, job)
        elif job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.answer)


def _take_back(jobs: SimpleQueue[Job | None], job: Job) -> None:
    """A committed answer reached nobody: undo it, where it says how."""
    if job.undo is not None and job.error is None and job.answer:
        jobs.put(Job(job.undo, (job.answer,), {}))


def _stop(jobs: SimpleQueue[Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
