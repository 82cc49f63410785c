"""Send statements to a PostgreSQL connection, prepared once, and together when one of their results is needed.

A `Pipeline` is a cursor over libpq's pipeline mode (`psycopg.pq`). `execute` queues a statement; reading its
`QueuedResult` sends all queued statements in one message. psycopg's own pipeline sends each statement by itself, which
costs a system call and a wake-up of the server for each. The error of a statement is raised when its result or a later
one is read, or by `finish`; then call `rollback`. The module knows no operation and no query.
"""

from __future__ import annotations

import re
import select
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from leyden.store.sql.postgres import psycopg
from leyden.store.sql.transaction import Row

_MAX_PREPARED = 250
"""The most statements that the server keeps prepared for a connection: more than an operation has, and fewer than pages
can have."""
_PARAMETER = re.compile(r"%(?:\((\w+)\)s|(s)|(%))")


class QueuedResult:
    """The outcome of a queued statement. Reading it waits, and raises psycopg.Error if the statement failed."""

    __slots__ = ("_pipeline", "batch", "prepares", "result")

    def __init__(self, pipeline: Pipeline, batch: int, prepares: _Key | None = None) -> None:
        self._pipeline = pipeline
        self.batch = batch
        """The number of the batch that the statement belongs to."""
        self.prepares = prepares
        """The statement that this request prepares; None for a request that executes one."""
        self.result: Any = None
        """The `PGresult`; None until it has arrived."""

    @property
    def rowcount(self) -> int:
        """The number of rows that the statement changed or found."""
        return self._pipeline.result_of(self).command_tuples or 0

    def fetchone(self) -> Row | None:
        """Return the first row; None if there is none."""
        rows = self.fetchall()
        return rows[0] if rows else None

    def fetchall(self) -> list[Row]:
        """Return all rows."""
        return self._pipeline.rows_of(self)


class Pipeline:
    """A queue of statements for one connection, which has no other user."""

    def __init__(self, connection: Any) -> None:
        pg = psycopg()
        self._error: type[Exception] = pg.Error
        self._lost: type[Exception] = pg.OperationalError
        self._error_of = pg.errors.error_from_result
        self._failed = {pg.pq.ExecStatus.FATAL_ERROR, pg.pq.ExecStatus.PIPELINE_ABORTED}
        self._is_open = pg.pq.ConnStatus.OK
        self._connection = connection.pgconn
        self._values = pg.adapt.Transformer(connection)
        self._any_format = pg.adapt.PyFormat.AUTO
        self._readable = select.poll()
        self._readable.register(self._connection.socket, select.POLLIN)
        self._either = select.poll()
        self._either.register(self._connection.socket, select.POLLIN | select.POLLOUT)
        self._awaited: deque[QueuedResult | None] = deque()
        """Statements without a result, oldest first. None stands for the end of a batch. After an error the server
        skips the rest of the batch."""
        self._batch = 0
        """The number of the batch that is being queued, which is the number of ended batches."""
        self._prepared: OrderedDict[_Key, bytes] = OrderedDict()
        self._n_prepared = 0
        self._connection.enter_pipeline_mode()

    def execute(self, statement: str, parameters: dict[str, Any] | Sequence[Any] = ()) -> QueuedResult:
        """Queue a statement in psycopg's form: `%(name)s` with a dict of parameters, or `%s` with a sequence.

        Raise psycopg.DataError, and queue nothing, for a value that PostgreSQL cannot take.
        """
        text, names = _numbered(statement)
        values = [parameters[name] for name in names] if isinstance(parameters, dict) else parameters
        if not values:
            return self._queue((text, ()), None, None)
        packed = self._pack(values)
        types: tuple[int, ...] = self._values.types
        return self._queue((text, types), packed, self._values.formats)

    def put(self, statement: str, values: Sequence[Any]) -> QueuedResult:
        """Queue a statement with `%s`. The server gives its parameters the types of their columns."""
        packed = self._pack(values)
        return self._queue((_numbered(statement)[0], ()), packed, self._values.formats)

    def commit(self) -> None:
        """Queue a COMMIT; end and send the batch."""
        self._awaited.append(QueuedResult(self, self._batch))
        self._connection.send_query_params(b"COMMIT", None)  # in plain text, so that a reader of the traffic sees it
        self._end_batch()
        self._send()

    def finish(self) -> None:
        """End the batch and wait for all of it. Raise the first error."""
        if not self._awaited or self._awaited[-1] is not None:
            self._end_batch()
        self._send()
        while self._awaited:
            self._receive()

    def rollback(self) -> None:
        """Undo the transaction, whatever its state, and drop the queued statements."""
        self._end_batch()
        undone = self.execute("ROLLBACK")
        self._end_batch()
        self._send()
        while self._awaited:
            try:
                self._receive()
            except self._error:  # an error of a statement that is undone
                if self._connection.status != self._is_open:
                    raise
        self.result_of(undone)

    def result_of(self, outcome: QueuedResult) -> Any:
        """Return the `PGresult` of a statement."""
        if outcome.batch == self._batch:
            # End the batch, because the server's limit on idle clients is in force only between
            # batches.
            self._end_batch()
            self._send()
        while outcome.result is None:
            self._receive()
        return outcome.result

    def rows_of(self, outcome: QueuedResult) -> list[Row]:
        """Return all rows that a statement found."""
        result = self.result_of(outcome)
        if not (n_rows := result.ntuples):
            return []
        self._values.set_pgresult(result)
        return self._values.load_rows(0, n_rows, tuple)

    def _pack(self, values: Sequence[Any]) -> Sequence[Any]:
        return self._values.dump_sequence(values, [self._any_format] * len(values))

    def _queue(self, key: _Key, packed: Sequence[Any] | None, formats: Sequence[Any] | None) -> QueuedResult:
        """Add an execution of a statement to the batch, prepared at its first use."""
        name = self._prepared.get(key)
        if name is None:
            name = self._prepare(key)
        else:
            self._prepared.move_to_end(key)
        self._connection.send_query_prepared(name, packed, formats)
        outcome = QueuedResult(self, self._batch)
        self._awaited.append(outcome)
        return outcome

    def _prepare(self, key: _Key) -> bytes:
        if len(self._prepared) == _MAX_PREPARED:
            _, oldest = self._prepared.popitem(last=False)
            self._connection.send_query_params(b"DEALLOCATE " + oldest, None)
            self._awaited.append(QueuedResult(self, self._batch))
        self._n_prepared += 1
        name = self._prepared[key] = b"leyden_%d" % self._n_prepared
        text, types = key
        self._connection.send_prepare(name, text, types or None)
        self._awaited.append(QueuedResult(self, self._batch, prepares=key))
        return name

    def _end_batch(self) -> None:
        self._connection.pipeline_sync()
        self._awaited.append(None)
        self._batch += 1

    def _send(self) -> None:
        """Send the queued statements, and read results meanwhile, because a server whose results wait stops reading."""
        while self._connection.flush():
            if any(event & select.POLLIN for _, event in self._either.poll()):
                self._connection.consume_input()

    def _receive(self) -> None:
        """Read the result of the oldest pending statement, or a batch's end. Raise psycopg.Error if it is an error."""
        result = self._next_result()
        outcome = self._awaited.popleft()
        if outcome is None:
            self._check_end(result)
            return
        outcome.result = result
        if result.status not in self._failed:
            self._connection.get_result()  # the None that follows each statement's only result
            return
        if outcome.prepares is not None:
            self._prepared.pop(outcome.prepares, None)
        with suppress(self._error):  # the server may have closed the connection behind it
            self._next_result()
        raise self._error_of(result, encoding="utf-8")

    def _check_end(self, result: Any) -> None:
        """Raise psycopg.Error unless `result` is the end of a batch. Statements outside of a transaction are committed
        with the end, after their results have been sent.
        """
        if result is None:
            raise self._lost("the server's reply stopped before the end of a batch")
        if result.status in self._failed:
            self._awaited.appendleft(None)  # the end is still to come
            self._next_result()  # the None that follows each error
            raise self._error_of(result, encoding="utf-8")

    def _next_result(self) -> Any:
        while self._connection.is_busy():
            self._readable.poll()
            self._connection.consume_input()
        return self._connection.get_result()


_Key = tuple[bytes, tuple[int, ...]]
"""A prepared statement: its text, and the types of its parameters. () leaves the types to the server."""


@lru_cache(maxsize=1024)
def _numbered(statement: str) -> tuple[bytes, Sequence[str]]:
    """Return a statement with `$1`, `$2` and so on for its parameters, and their names in order."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[3]:
            return "%"
        name = found[1]
        if name is None or name not in names:
            names.append(name or "")
            return f"${len(names)}"
        return f"${names.index(name) + 1}"

    text = _PARAMETER.sub(number, statement)
    return text.encode(), names
