"""Run the statements of one operation on PostgreSQL, with the locks that they need, in few messages.

Many stores in many processes may work on one database at the same time. These rules keep operations correct:

- An operation that changes a rollout, its attempts or its spans locks the rollout's row first.
  Locks (`_LOCKS`) precede the look-ups with which operations begin, in separate statements: at
  READ COMMITTED each statement sees what was committed before it began, so a look-up after the lock
  reads the latest state, which holds until the commit. Locking in the look-up itself would not do:
  if it had to wait, its joined rows would be those from before the wait.
- A claim takes rows that no other transaction holds (SKIP LOCKED). A skipped row may be given back
  without a notification, so a claim that finds nothing looks again as long as rows are queued
  (`PostgresLightningStore`), and delays no other operation meanwhile.
- If two operations make the same id at once, a unique index refuses the second, which runs again
  and finds the first one's row.
- Operations on several rollouts lock them in one order. If two operations wait for each other all
  the same (workers, ids in different orders), PostgreSQL ends one of them, which runs again.
- Reads see one snapshot (REPEATABLE READ, READ ONLY), and wait for no lock.

REPEATABLE READ for writes would need no locks, but let every writer of a busy attempt fail whenever another commits.

A round trip to the server costs more than the statements in it, so an operation takes as few messages as its reads
allow. Statements are queued, and sent when an outcome is read or with the COMMIT. Most operations take two messages:
the first holds BEGIN, the locks and the look-ups, the second all writes. Enqueuing, and spans of an attempt that this
store claimed or to which it added the last ones, are one message (`Guesses`), and so is each part of an operation on
many rollouts (`ahead`).

A further span of a running attempt is a single statement, which is its own transaction. It is committed when the end of
its batch has arrived, not when its result has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, cast

from leyden.store.sql.postgres import Target, placeholders, psycopg, statements
from leyden.store.sql.postgres_pipeline import Pipeline, QueuedResult
from leyden.store.sql.queries import counting, statements_for
from leyden.store.sql.transaction import Row, SpanTarget, Total
from leyden.types import Rollout

_LOCKS = {
    "get_rollout": ("lock_rollout",),
    "get_rollout_with_attempt": ("lock_rollout",),
    "get_rollout_key": ("lock_rollout",),
    "get_span_target": ("lock_rollout", "lock_span_writers"),
    "expect_span_target": ("lock_rollout", "lock_span_writers"),
    "pin_rollout": ("lock_rollout",),
    "prune_rollout": ("lock_rollout_of_seq",),
    "get_run": ("lock_run",),
    "unpin": ("lock_pin",),
    "get_claim": ("lock_claim_id",),
    "get_resources": ("lock_resources",),
    "insert_resources": ("lock_resources",),
    "has_version": ("lock_resources",),
    "get_label": ("lock_resources",),
    "get_feedback": ("lock_feedback",),
}
"""The locks that a writing operation must hold before it runs a query, in the order in which all
operations take them."""
_LATEST = "get_latest_resources_version"
"""The look-up that enqueuing begins with. Its result is guessed (`Guesses.latest_resources`)."""
_REFUSING = {"insert_span": "insert_new_span"}
"""For each INSERT that skips an existing row, the INSERT that fails on it."""
_SHARDS = 16
"""Rows of `totals`, as many as the migration makes."""
_TARGET = tuple(column.name for column in fields(SpanTarget))
_EXPECTED = "rollout_id", "attempt_id", *_TARGET
_values_of = attrgetter(*_TARGET)
_MAX_GUESSES = 256
"""The most attempts whose targets are kept. Spans of that many attempts may arrive in turns without a look-up."""
_HIDING = {"select_new_positions": "are_spans_hidden"}
"""For each query that may find nothing because its rows are not visible yet, the query that says whether there are such
rows."""

_BEGIN_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NOW = "SELECT extract(epoch FROM now())::double precision"
_COUNT_COMMIT = "SELECT count_commit(%s, %s)"
_NOTIFY = "SELECT pg_notify(%s, %s)"


class Guesses:
    """The span targets that the last operations of one store left, and the latest resources that they saw. Other stores
    may have written since.

    An operation assumes that a guess holds and lets the database check it on the way, which saves the look-up that
    everything else would wait for. A single span of a running attempt is one statement, which checks the guess too
    (`insert_expected_span`). Otherwise the check is a separate statement (`expect_span_target`,
    `expect_latest_resources_version`).
    If the guess is wrong, the operation runs again with the look-up, and no guess is made for that attempt any more,
    because other stores add spans to it too.
    """

    def __init__(self) -> None:
        self.latest_resources: Row | None = None
        """The id and the version of the resources that were written last, two None if there were none; None if they are
        not known."""
        self._targets: dict[tuple[str, str], tuple[Any, ...] | None] = {}
        self._gate = threading.Lock()

    def get(self, key: tuple[str, str]) -> SpanTarget | None:
        """Return a copy of the span target that is assumed for an attempt (rollout id, attempt id), or None."""
        guess = self._targets.get(key)
        return None if guess is None else SpanTarget(*guess)

    def retract(self, key: tuple[str, str]) -> None:
        """Drop the span target that is assumed for this attempt, and assume none for it again."""
        with self._gate:
            if key in self._targets:
                self._targets[key] = None

    def keep(self, targets: Mapping[tuple[str, str], SpanTarget]) -> None:
        """Keep the targets that an operation left as guesses for the next one."""
        with self._gate:
            for key, target in targets.items():
                if self._targets.get(key, ()) is not None:
                    self._targets[key] = _values_of(target)
            while len(self._targets) > _MAX_GUESSES:
                del self._targets[next(iter(self._targets))]


class PostgresTransaction:
    """`transaction.Transaction` over one connection, reused for each operation after `begin`.

    Statements are queued, and travel together when an operation reads an outcome or commits (`postgres_pipeline.py`),
    so an operation that reads once and then writes is two messages. The error of a statement whose outcome is never
    read is raised then.
    """

    def __init__(self, connection: Any, target: Target, guesses: Guesses, *, writes: bool) -> None:
        self.store_url = target.url
        self.hiding = False
        """Whether the operation found no new spans although some are committed that it may not show yet, so that
        waiters must read again soon."""
        self._channel = target.channel
        self._cursor = Pipeline(connection)
        self._queries = statements()
        self._guesses = guesses
        self._locks = _LOCKS if writes else {}
        self._writes = writes
        self._locked: set[str] = set()
        self._reset()

    @property
    def now(self) -> float:
        """The time at which the operation began, by the server's clock, which all stores share."""
        if self._now is not None:
            return self._now
        clock = self._clock or self._begun().execute(_NOW)
        now = self._now = cast(float, clock.fetchall()[0][0])
        return now

    @now.setter
    def now(self, seconds: float) -> None:
        self._now = seconds

    @property
    def clock(self) -> float | None:
        return self._now

    def begin(self, connection: int | None, number: int, *, again: bool = False) -> None:
        """Begin another operation, without news so far.

        connection: its number, or None for a reader.
        number: of this commit on the connection. The database keeps it, so that a commit whose reply is lost can be
            checked.
        again: the operation ran before, and conflicted with another one.
        """
        self._reset()
        self._counting = connection, number
        self._again = again

    def commit(self, news: Sequence[str]) -> None:
        """Write the totals, notify the other stores, and commit.

        news: the payloads of notifications.

        All of this is one message to the server, together with the operation's last writes. A single span is a
        statement and its own transaction. A reader does not wait for the reply, because nothing depends on it.
        """
        if self._single is not None and not (self._has_begun or self._tallied or news):
            self._send_single()
            self._cursor.finish()
        else:
            self._finish(news)
        self.committed()

    def committed(self, at: float | None = None) -> None:
        """Complete the results of an operation that was committed, and keep its guesses for the next operations.

        at: when the operation began (Unix seconds of the server's clock); None: read it from the server's reply.
        """
        if at is not None:
            self._now = at
        for rollout in self._dated:
            rollout.start_time = self.now
        if self._targets_hold:
            self._guesses.keep(self.targets)
        if self._latest is not None:
            self._guesses.latest_resources = self._latest

    def _finish(self, news: Sequence[str]) -> None:
        cursor = self._begun()
        if not self._writes:
            cursor.commit()
            return
        totals = ""
        if self._tallied:  # updated after the SELECT: who waits for this row holds nothing that others wait for
            changes = ", ".join(f"{total} = {total} + %s" for total in self._tallied)
            totals = f"WITH totalled AS (UPDATE totals SET {changes} WHERE shard = pg_backend_pid() %% {_SHARDS}) "
        values = [*self._tallied.values(), *self._counting]
        if self._has_counted and not (totals or news):
            pass
        elif len(news) == 1:
            cursor.execute(f"{totals}{_COUNT_COMMIT}, pg_notify(%s, %s)", [*values, self._channel, *news])
        else:
            cursor.execute(f"{totals}{_COUNT_COMMIT}", values)
            for text in news:
                cursor.execute(_NOTIFY, (self._channel, text))
        if self._dated and self._clock is None:
            self._clock = cursor.execute(_NOW)
        cursor.commit()
        cursor.finish()

    def rollback(self) -> None:
        self._cursor.rollback()

    def alone(self, query: str, /, **parameters: Any) -> Row | None:
        """Run a statement outside of any operation, and return the first row of its result."""
        found = self._cursor.execute(self._queries[query], parameters)
        self._cursor.finish()
        return found.fetchone()

    def expect(self, rows: int | None, /) -> None:
        """Do nothing: an operation has its own thread, and may take its time."""

    def known_target(self, rollout_id: str, attempt_id: str) -> SpanTarget | None:
        """Return the target that this operation knows, or else a guess, which is checked later.

        No guess is made if the look-up was sent already (`ahead`), or if the operation runs again.
        """
        key = rollout_id, attempt_id
        if (known := self.targets.get(key)) is not None or ("get_span_target", *key) in self._ahead:
            return known
        guess = self._guesses.retract(key) if self._again else self._guesses.get(key)
        if guess is not None:
            if self._unchecked is not None or self._single is not None:
                self._begun()  # sends the check of an earlier guess, of another attempt
            self._unchecked = *key, *_values_of(guess)
            self.targets[key] = guess
        return guess

    def keep_targets(self) -> None:
        self._targets_hold = True

    def date(self, rollout: Rollout, /) -> None:
        if self._now is None:
            self._dated.append(rollout)
        else:
            rollout.start_time = self._now

    def tally(self, changes: Mapping[Total, int], /) -> None:
        for total, by in changes.items():
            self._tallied[total] = self._tallied.get(total, 0) + by

    def lock(self, rollout_ids: Iterable[str], /) -> None:
        missing = sorted({*rollout_ids} - self._locked)
        if len(missing) == 1:  # PostgreSQL would plan `lock_rollouts` again each time
            self._send("lock_rollout", {"rollout_id": missing[0]})
        elif missing:
            found = self._send("lock_rollouts", {"rollout_ids": missing})
            if found.rowcount != len(missing):  # some do not exist yet: the operation adds them
                self._send("lock_new_rollouts", {})
        self._locked.update(missing)

    def ahead(self, query: str, asked: Sequence[dict[str, Any]], /) -> None:
        least = 2 if self._writes else 1  # a writer's single look-up may be a guess, and is the first message anyway
        if len({parameters["rollout_id"] for parameters in asked}) == len(asked) >= least:
            for parameters in asked:
                self._ahead[query, *parameters.values()] = self._execute(query, parameters)

    def run(self, query: str, /, **parameters: Any) -> None:
        if query == "run_attempt" and self._held is not None:
            self._running = parameters
        elif query == "set_rollout_status" and self._running is not None:
            beat = [self._running[name] for name in ("last_span", "bytes", "spans", "now")]
            self._hold("insert_expected_first_span", (parameters["status"],), (self._running["status"],), beat)
            self._begun()  # so that a reader of the traffic sees the COMMIT of a change of status
        else:
            self._execute(query, parameters)

    def change(self, query: str, /, **parameters: Any) -> int:
        return self._read(self._execute(query, parameters)).rowcount

    def insert(self, query: str, /, **parameters: Any) -> int:
        return self._read(self._execute(query, parameters)).fetchall()[0][0]

    def put(self, query: str, values: Sequence[Any], /) -> None:
        """Queue a statement. The heartbeat that follows a single new span, and the new statuses of its attempt and
        rollout, are one statement with the span and the check of its guess.
        """
        if self._held is not None and query == "beat_heart":
            self._hold("insert_expected_span", (), (), values[:4])
            return
        self._begun().put(self._queries[query], values)

    def put_many(self, query: str, rows: Sequence[Sequence[Any]], /) -> None:
        cursor = self._begun()
        for statement, values in statements_for(rows, self._queries[query]):
            cursor.put(statement, values)

    def put_new(self, query: str, rows: Sequence[Sequence[Any]], /) -> int:
        if not self._again:  # a row that is there is refused, and the operation is run again
            if self._unchecked is not None and len(rows) == 1:
                self._held = rows[0]
            else:
                self.put_many(_REFUSING[query], rows)
            return len(rows)
        cursor = self._begun()
        put = [cursor.put(*statement) for statement in statements_for(rows, self._queries[query])]
        return sum(outcome.rowcount for outcome in put)

    def one(self, query: str, /, **parameters: Any) -> Row | None:
        if query != _LATEST or not self._writes:
            return self._asked(query, parameters).fetchone()
        latest = None if self._again else self._guesses.latest_resources
        if latest is not None:
            self._execute("expect_latest_resources_version", {"resources_id": latest[0], "version": latest[1]})
        else:
            latest = self._latest = self._asked(query, parameters).fetchone() or (None, None)
        return None if latest[0] is None else latest

    def all(self, query: str, /, **parameters: Any) -> list[Row]:
        return self._asked(query, parameters).fetchall()

    def page(self, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        rows = self._read(self._send_text(self._queries[query] + placeholders(suffix), parameters)).fetchall()
        if not rows and query in _HIDING:
            self.hiding = self.one(_HIDING[query]) is not None
        return rows

    def count(self, query: str, where: str, parameters: dict[str, Any], /, *, most: int) -> int:
        statement = counting(self._queries[query], placeholders(where), most)
        return self._send_text(statement, parameters).fetchall()[0][0]

    def _asked(self, query: str, parameters: dict[str, Any]) -> QueuedResult:
        asked = self._ahead.pop((query, *parameters.values()), None) if self._ahead else None
        return self._read(asked or self._execute(query, parameters))

    def _execute(self, query: str, parameters: dict[str, Any]) -> QueuedResult:
        for lock in self._locks.get(query, ()):
            held = parameters["rollout_id"] if lock == "lock_rollout" else lock
            if held not in self._locked:
                self._send(lock, parameters)
            if lock in ("lock_rollout", "lock_span_writers"):
                self._locked.add(held)
        return self._send(query, parameters)

    def _send(self, query: str, parameters: dict[str, Any]) -> QueuedResult:
        return self._send_text(self._queries[query], parameters)

    def _send_text(self, statement: str, parameters: dict[str, Any]) -> QueuedResult:
        cursor = self._begun()
        try:
            return cursor.execute(statement, parameters)
        except psycopg().DataError:
            askable = {name: _askable(value) for name, value in parameters.items()}
            if askable == parameters:
                raise
            return cursor.execute(statement, askable)

    def _begun(self) -> Pipeline:
        """Return the pipeline for another statement, after everything that must precede it: BEGIN, a single span, or
        the check of the last guess with the span that is held back for it.
        """
        if not self._has_begun:
            self._has_begun = True
            self._cursor.execute(_BEGIN_WRITE if self._writes else _BEGIN_READ)
        if self._single is not None:
            self._send_single()
        guess, self._unchecked, span, self._held = self._unchecked, None, self._held, None
        running, self._running = self._running, None
        if guess is not None:
            self._execute("expect_span_target", dict(zip(_EXPECTED, guess, strict=True)))
        if span is not None:
            self._cursor.put(self._queries["insert_new_span"], span)
        if running is not None:
            self._execute("run_attempt", running)
        return self._cursor

    def _hold(self, query: str, rollout: Sequence[Any], attempt: Sequence[Any], beat: Sequence[Any]) -> None:
        """Hold back the statement that adds the span of a guessed attempt.

        rollout, attempt: their new statuses, if they change.
        beat: the first values of `beat_heart`.
        """
        assert self._unchecked is not None and self._held is not None
        rollout_id, attempt_id, seq, rollout_status, attempts, number, *expected = self._unchecked
        connection, commits = self._counting
        locked = (*rollout, rollout_id, seq, rollout_status, attempts)
        beaten = (*attempt, *beat, number, attempt_id, *expected)
        self._single = self._queries[query], [*locked, *beaten, commits, connection, *self._held]
        self._locked.update((rollout_id, "lock_span_writers"))
        self._unchecked = self._held = self._running = None

    def _send_single(self) -> None:
        assert self._single is not None
        self._cursor.put(*self._single)
        self._single = None
        self._has_counted = True

    def _read(self, outcome: QueuedResult) -> QueuedResult:
        """Return an outcome that is about to be read. The clock is read in the same message, because an operation that
        looks something up mostly needs it.
        """
        if self._writes and self._clock is None:
            self._clock = self._begun().execute(_NOW)
        return outcome

    def _reset(self) -> None:
        """Reset the state of the last operation: its clock, prefetched rows, news, counts and locks."""
        self._now: float | None = None
        self._clock: QueuedResult | None = None
        self._again = False
        self._unchecked: tuple[Any, ...] | None = None
        self._held: Sequence[Any] | None = None
        self._running: dict[str, Any] | None = None
        self._single: tuple[str, Sequence[Any]] | None = None
        self._has_begun = False
        self._has_counted = False
        self._ahead: dict[tuple[Any, ...], QueuedResult] = {}
        self.claimable = 0
        self.labels = False
        self.finished: list[str] = []
        self.spans = False
        self.targets: dict[tuple[str, str], SpanTarget] = {}
        self.hiding = False
        self._dated: list[Rollout] = []
        self._latest: Row | None = None
        self._tallied: dict[Total, int] = {}
        self._targets_hold = False
        self._locked.clear()


def _askable(value: Any) -> Any:
    """Return a substitute for a text with U+0000, which cannot be sent, and which no stored name contains."""
    if isinstance(value, list):
        return [_askable(entry) for entry in cast(list[Any], value)]
    return value.replace("\0", "\1") if isinstance(value, str) else value
