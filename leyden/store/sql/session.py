"""Run operations on one SQLite connection: each in its own transaction, or many that share a commit.

The module knows transactions and the news to publish after them, and no thread. A thread must hold the session's `lock`
while it uses it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from leyden.store.sql.driver import Operation
from leyden.store.sql.sqlite import SqliteTransaction, as_leyden_error

Publish = Callable[[int, Sequence[str], bool, bool], None]
"""Called after a commit with how many rollouts were queued, which finished, whether spans were added, and whether
labels changed."""


def _publish_nothing(claimable: int, finished: Sequence[str], spans: bool, labels: bool) -> None:
    """Do nothing, because a reader changes nothing."""


class Work(Protocol):
    """One operation of a batch, and its result or error."""

    operation: Operation[Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    answer: Any
    error: BaseException | None

    @property
    def wanted(self) -> bool:
        """Whether a caller still awaits the result; otherwise the operation is skipped."""
        ...


class Session:
    """A connection and its transactions. A reader's transactions change and publish nothing."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        url: str,
        role: Literal["reader", "writer", "only"],
        publish: Publish = _publish_nothing,
    ) -> None:
        """Use a connection.

        role: "reader" and "writer" are two connections to one database. "only" is the sole connection to its database,
            and reads without a transaction, because no other can change what it reads.
        publish: called with the news of each commit.
        """
        self.lock = threading.Lock()
        """Held by the one thread that uses the session."""
        self.url = url
        self._connection = connection
        self._begin = "BEGIN" if role == "reader" else "BEGIN IMMEDIATE"
        self._is_only = role == "only"
        self._publish = publish
        self._execute = connection.cursor().execute  # `Connection.execute` makes a cursor each time
        self._transaction = SqliteTransaction(connection, url)

    def alone(
        self,
        operation: Operation[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        most: int | None = None,
        reads: bool = False,
    ) -> Any:
        """Run one operation, commit, and return its result. If it fails, roll back and raise its error; an error of the
        database becomes a StoreError.

        most: raise Long if the operation expects to touch more rows.
        reads: the operation changes nothing.
        """
        transaction = self._transaction
        begins = not (reads and self._is_only)
        try:
            if begins:
                self._execute("BEGIN" if reads else self._begin)
            transaction.begin(most)
            answer = operation(transaction, *args, **kwargs)
            if reads:
                transaction.keep_targets()  # nothing has changed, so what was read still holds
            else:
                transaction.write_totals()
            if begins:
                self._execute("COMMIT")
        except BaseException as error:
            self._undo("ROLLBACK")
            leyden_error = as_leyden_error(self.url, error)
            if leyden_error is not error:
                raise leyden_error from error
            raise
        if transaction.spans or transaction.claimable or transaction.finished or transaction.labels:
            self._publish(transaction.claimable, transaction.finished, transaction.spans, transaction.labels)
        return answer

    def together(self, batch: Sequence[Work]) -> None:
        """Run many operations, each in a savepoint, and commit once. If an operation raises, only its own changes are
        undone.

        The result or the error is stored in each `Work`. If the commit fails, all of them get its error.
        """
        claimable, spans, labels, changed = 0, False, False, False
        finished: list[str] = []
        try:
            self._execute(self._begin)
            for work in batch:
                if work.wanted and self._in_savepoint(work):
                    changed = True
                    claimable += self._transaction.claimable
                    finished += self._transaction.finished
                    spans = spans or self._transaction.spans
                    labels = labels or self._transaction.labels
            # After a rollback to a savepoint, COMMIT would still write to the file.
            self._execute("COMMIT" if changed else "ROLLBACK")
        except BaseException as error:  # noqa: BLE001 -- the batch is undone, and each caller gets the error
            self._undo("ROLLBACK")
            leyden_error = as_leyden_error(self.url, error)
            for work in batch:
                work.error = work.error or leyden_error
        else:
            if spans or claimable or finished or labels:
                self._publish(claimable, finished, spans, labels)

    def close(self) -> None:
        self._connection.close()

    def _in_savepoint(self, work: Work) -> bool:
        """Run an operation in a savepoint; return whether it succeeded. Raise if the whole transaction was given up."""
        self._execute("SAVEPOINT work")
        try:
            self._transaction.begin(None)
            work.answer = work.operation(self._transaction, *work.args, **work.kwargs)
            self._transaction.write_totals()
        except BaseException as error:
            work.error = as_leyden_error(self.url, error)
            if not self._connection.in_transaction:
                raise
            self._transaction.failed()
            self._execute("ROLLBACK TO work")
        self._execute("RELEASE work")
        return work.error is None

    def _undo(self, statement: str) -> None:
        self._transaction.failed()
        with suppress(sqlite3.Error):  # the database may have rolled back by itself
            self._execute(statement)
