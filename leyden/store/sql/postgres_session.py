"""Run operations on one PostgreSQL connection, each completely and exactly once, even if the connection breaks.

The module knows when an operation may run again, and no thread. An operation is a function, so running it again means
calling it again:

- If it failed before its commit was sent, or conflicted with another operation (a deadlock, the
  same new id), it has changed nothing.
- If the connection broke during the commit, another connection reads how many commits the broken
  one has made, which shows whether the commit happened.

An unavailable server is tried again until `patience_seconds` have passed; then the caller gets StoreError.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from leyden.errors import StoreError
from leyden.store.sql.driver import Operation
from leyden.store.sql.postgres import Target, connect, psycopg, store_error
from leyden.store.sql.postgres_transaction import Guesses, PostgresTransaction

_IN_THE_WAY = {"40001", "40P01", "23505", "22012"}
"""The codes of errors after which an operation runs again at once: serialization failure, deadlock, the same id made
twice, a wrong guess (`expect_span_target`)."""
_TRIES = 20
"""The most tries of one operation that conflicts with others. More conflicts are no coincidence."""
_LOST = ("08", "57P0", "LY001")
"""Beginnings of the codes of errors that mean a lost connection, or one that another process has declared lost
(`count_commit`)."""
_PAYLOAD = 7000
"""Bytes of one notification; PostgreSQL allows 8000."""


def news_of(sender: str, claimable: int, finished: Sequence[str], spans: bool, labels: bool = False) -> list[str]:
    """Return the news of a commit as the payloads of as few notifications as possible (`Listener` reads them)."""
    texts: list[str] = []
    group: list[str] = []
    size = 0
    for rollout_id in finished:
        size += len(json.dumps(rollout_id)) + 1
        if size > _PAYLOAD:
            texts.append(_news(sender, 0, group, False, False))
            group, size = [], len(json.dumps(rollout_id)) + 1
        group.append(rollout_id)
    if group or claimable or spans or labels:
        texts.append(_news(sender, claimable, group, spans, labels))
    return texts


def _news(sender: str, claimable: int, finished: Sequence[str], spans: bool, labels: bool) -> str:
    text = json.dumps([sender, claimable, finished, spans, labels], separators=(",", ":"))
    return text if len(text) <= _PAYLOAD + 200 else json.dumps([sender])  # a single id that is too long


class PostgresSession:
    """A connection and its transactions, for one thread at a time. A reader changes and publishes nothing."""

    def __init__(
        self,
        target: Target,
        sender: str,
        guesses: Guesses,
        *,
        writes: bool,
        patience_seconds: float,
        closing: threading.Event,
        publish: Callable[[PostgresTransaction], None],
    ) -> None:
        """Connect at the first operation.

        sender: names this store in its notifications, so that its own listener skips them.
        guesses: the state of attempts that this store's operations left. All its sessions share it.
        writes: whether the session is a writer.
        closing: set when the store closes.
        publish: called with each transaction that was committed, for the waiters of this process.
        """
        self._target = target
        self._sender = sender
        self._guesses = guesses
        self._writes = writes
        self._patience_seconds = patience_seconds
        self._closing = closing
        self._publish = publish
        self._connection: Any = None
        self._transaction: PostgresTransaction | None = None
        self._number: int | None = None
        """The number of the connection in the database; None for a reader."""
        self._commits = 0
        """How many commits the connection has sent."""

    def connect(self) -> None:
        """Connect before the first operation. If that fails, the first operation tries again."""
        with suppress(_Lost):
            self._connected()

    def run(self, operation: Operation[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, and return its result after the commit. Raise the operation's error; it has changed nothing
        then.

        Raise StoreError when the server stays away; the message says so if the outcome of the commit is unknown.
        """
        patience = Patience(self._target, self._patience_seconds, self._closing)
        tries = 0
        while True:
            try:
                return self._once(operation, args, kwargs, again=tries > 0)
            except _Lost as lost:
                # A connection that has just counted the commits is used at once. After a pause it
                # might be lost, too.
                patience.wait(lost.__cause__, pause=self._connection is None)
            except (psycopg().Error, UnicodeEncodeError) as error:
                tries += 1
                if getattr(error, "sqlstate", None) not in _IN_THE_WAY or tries == _TRIES:
                    raise store_error(self._target, error) from error
                time.sleep(random.uniform(0, 0.002 * tries))

    def close(self) -> None:
        if self._number is not None and self._transaction is not None:
            with suppress(psycopg().Error):  # a later migration removes its row
                self._transaction.alone("close_connection", connection=self._number)
        self._drop_connection()

    def _once(self, operation: Operation[Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, again: bool) -> Any:
        """Run an operation once, commit, and return its result. Raise _Lost if the connection broke and nothing was
        committed.

        again: the operation ran before, and was rolled back because of a conflict.
        """
        transaction = self._connected()
        self._commits += 1
        number = self._commits
        try:
            transaction.begin(self._number, number, again=again)
            answer = operation(transaction, *args, **kwargs)
        except BaseException as error:
            if not self._undone(transaction, error):
                raise _Lost from error
            raise
        self._commit(transaction, number)
        self._publish(transaction)
        return answer

    def _commit(self, transaction: PostgresTransaction, commits: int) -> None:
        """Commit, and send the news of the transaction with it.

        A connection may break before its reply arrives. The database counts the commits of each writing connection, so
        the count tells whether this commit happened. Raise _Lost if it did not.
        """
        news: list[str] = []
        if self._writes:
            news = news_of(self._sender, transaction.claimable, transaction.finished, False, transaction.labels)
        number = self._number
        try:
            transaction.commit(news)
        except psycopg().Error as error:
            if self._undone(transaction, error):
                raise
            made, began = (0, 0.0) if number is None else self._count_commits(number)
            if made < commits:
                raise _Lost from error
            transaction.committed(began)

    def _count_commits(self, number: int) -> tuple[int, float]:
        """Count a broken connection's commits; say when the last one began (Unix seconds). Prevent further ones."""
        doubt = "a change was being committed and may or may not be there: "
        patience = Patience(self._target, self._patience_seconds, self._closing, doubt)
        while True:
            try:
                row = self._connected().alone("count_commits", connection=number)
            except (_Lost, psycopg().Error) as error:
                self._drop_connection()
                patience.wait(error.__cause__ or error)
            else:
                return (0, 0.0) if row is None else (row[0], row[1])

    def _connected(self) -> PostgresTransaction:
        """Return the connection's transaction, connecting first if there is none. Raise _Lost on failure."""
        if self._connection is None or self._transaction is None:
            try:
                self._connection = connect(self._target)
                self._transaction = PostgresTransaction(
                    self._connection, self._target, self._guesses, writes=self._writes
                )
                if self._writes:
                    opened = self._transaction.alone("open_connection")
                    assert opened is not None
                    self._number, self._commits = opened[0], 0
            except psycopg().Error as error:
                self._drop_connection()
                raise _Lost from error
        return self._transaction

    def _drop_connection(self) -> None:
        connection = self._connection
        self._connection = self._transaction = self._number = None
        if connection is not None:
            connection.close()

    def _undone(self, transaction: PostgresTransaction, error: BaseException) -> bool:
        """Roll back, and return True. If the connection is lost, drop it and return False."""
        state = getattr(error, "sqlstate", None) or ""
        if not self._connection.closed and not state.startswith(_LOST):
            try:
                transaction.rollback()
            except psycopg().Error:
                pass
            else:
                return True
        self._drop_connection()
        return False


class _Lost(Exception):
    """The connection is lost, and the operation has changed nothing. The cause is the database's error."""


class Patience:
    """Pauses that grow each time, until `seconds` have passed or the store is being closed."""

    def __init__(self, target: Target, seconds: float, closing: threading.Event, doubt: str = "") -> None:
        self._target = target
        self._seconds = seconds
        self._closing = closing
        self._doubt = doubt
        self._deadline = time.monotonic() + seconds
        self._pause_seconds = 0.01

    def wait(self, error: BaseException | None, *, pause: bool = True) -> None:
        """Sleep for the next back-off pause before another try, if `pause`.

        Raise StoreError with the message of `error`, the last failure, when the patience has run out or the store is
        being closed.
        """
        if time.monotonic() > self._deadline or self._closing.is_set():
            why = (
                "is being closed and does not answer"
                if self._closing.is_set()
                else f"did not answer for {self._seconds:g} s"
            )
            raise StoreError(
                f"{self._target.url} {why}; {self._doubt}{' '.join(str(error).split())}; "
                "check that the server runs and can be reached"
            ) from error
        if not pause:
            return
        self._closing.wait(self._pause_seconds * random.uniform(0.5, 1.0))
        self._pause_seconds = min(2 * self._pause_seconds, 1.0)
