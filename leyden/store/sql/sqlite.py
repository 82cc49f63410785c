"""SQLite behind the store: opening and migrating a database, transactions over a connection, and the meaning of its
errors.

It knows nothing of threads: `leyden/store/memory.py` and `leyden/store/sqlite.py` decide when a connection is used, and
by which thread. To change the schema, add the next `migrations/sqlite/NNNN_*.sql`; a released one never changes.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from leyden._lib.clock import unix_time
from leyden.errors import ConfigError, StoreError, StoreFull
from leyden.store.sql.queries import adding, counting, load_queries, migrations, statements_for
from leyden.store.sql.transaction import Long, Row, SpanTarget, Total
from leyden.types import Rollout

_APPLICATION_ID = 0x4C595244  # "LYRD" in the file's header: a Leyden store
_TARGETS = 256
"""The most attempts whose targets are kept. Spans of that many attempts may arrive in turns without a look-up."""
_REMEDIES = {
    "SQLITE_BUSY": "another program holds a lock on it; close that program",
    "SQLITE_CANTOPEN": "check that the directory exists and can be written to",
    "SQLITE_CORRUPT": "the file is damaged; restore a copy, or save what can be read with `sqlite3 FILE .recover`",
    "SQLITE_FULL": "the disk is full; free some space and repeat the call",
    "SQLITE_IOERR_WRITE": "free some space (a quota, or a limit of the size of files, is one too), or look at the system's log",
    "SQLITE_IOERR": "the disk did not answer; look at the system's log",
    "SQLITE_NOTADB": "the file is not an SQLite database; give another path",
    "SQLITE_PERM": "check the permissions of the file and its directory",
    "SQLITE_READONLY": "check the permissions of the file and its directory",
}
_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE")
"""Beginnings of SQLite's error names for a full disk, a quota, and a limit on file sizes."""


def connect(target: str, pragmas: dict[str, str | int]) -> sqlite3.Connection:
    """Return a connection in autocommit mode, for explicit transactions, to be used by one thread at a time."""
    # Without an adapter sqlite3 looks for one whenever it binds such a value, which takes 0.2 us.
    for kind in (type(None), bytes):
        sqlite3.register_adapter(kind, lambda value: value)
    connection = sqlite3.connect(
        target, isolation_level=None, check_same_thread=False, cached_statements=256, timeout=5.0, uri=True
    )
    try:
        for pragma, value in pragmas.items():
            connection.execute(f"PRAGMA {pragma} = {value}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def migrate(connection: sqlite3.Connection, url: str) -> None:
    """Bring a database to this version's schema, in one transaction.

    Raise StoreError for a database that a newer Leyden wrote, or another program.
    """
    scripts = migrations("sqlite")
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection, url)
        if version > len(scripts):
            raise _newer(url, version)
        for script in scripts[version:]:
            for statement in statements(script):
                connection.execute(statement)
        if version < len(scripts):
            connection.execute(f"PRAGMA user_version = {len(scripts)}")
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def fill_empty(connection: sqlite3.Connection) -> None:
    """Give a new database in memory this version's schema. Copying an empty database that this process has migrated
    takes 0.1 ms; migrating takes 5.
    """
    _empty().backup(connection)


@cache
def _empty() -> sqlite3.Connection:
    connection = connect(":memory:", {})
    migrate(connection, ":memory:")
    return connection


def check_schema(connection: sqlite3.Connection, url: str) -> None:
    """Raise StoreError for a database of another schema version. It changes nothing."""
    version, known = _version(connection, url), len(migrations("sqlite"))
    if version == 0:
        raise StoreError(f"{url} holds no store yet; open it once without read_only")
    if version < known:
        raise StoreError(
            f"{url} was written by an older Leyden (schema {version}, this one needs {known}); "
            f"`leyden store upgrade {url}` brings it up to date"
        )
    if version > known:
        raise _newer(url, version)


def store_error(url: str, error: sqlite3.Error) -> StoreError:
    """Return the caller's error for a database error: what happened, where, and the remedy."""
    name: str = getattr(error, "sqlite_errorname", None) or ""
    remedy = next((remedy for kind, remedy in _REMEDIES.items() if name.startswith(kind)), None)
    kind = StoreFull if name.startswith(_FULL) else StoreError
    return kind(f"{url}: {error}" + (f"; {remedy}" if remedy else ""))


def as_leyden_error(url: str, error: BaseException) -> BaseException:
    """Return a StoreError or ConfigError for an error of the database, and any other error itself."""
    if isinstance(error, sqlite3.Error):
        return store_error(url, error)
    if isinstance(error, UnicodeEncodeError | OverflowError):  # of binding a parameter
        return ConfigError(f"{url} cannot hold a value that was given: {error}")
    return error


class SqliteTransaction:
    """`transaction.Transaction` over one connection, reused for each operation after `begin`."""

    def __init__(self, connection: sqlite3.Connection, store_url: str) -> None:
        self.store_url = store_url
        self.targets: dict[tuple[str, str], SpanTarget] = {}
        self._targets_hold = False
        self._cursor = connection.cursor()
        self._queries = load_queries()
        self._positional = _positional_queries()
        self._tallied: dict[Total, int] = {}
        self.begin(None)

    def begin(self, most: int | None) -> None:
        """Begin an operation, without news so far, on at most `most` rows (None: any number)."""
        self._most = most
        self.now = unix_time()
        self.claimable = 0
        self.finished: list[str] = []
        self.spans = False
        self.labels = False
        if self._tallied:
            self._tallied = {}
        if not self._targets_hold or len(self.targets) > _TARGETS:
            self.targets.clear()
        self._targets_hold = False

    @property
    def clock(self) -> float:
        return self.now

    def date(self, rollout: Rollout, /) -> None:
        rollout.start_time = self.now

    def known_target(self, rollout_id: str, attempt_id: str) -> SpanTarget | None:
        return self.targets.get((rollout_id, attempt_id))

    def keep_targets(self) -> None:
        self._targets_hold = True

    def failed(self) -> None:
        """Drop the targets that the operation kept, because it was rolled back."""
        self._targets_hold = False

    def tally(self, changes: Mapping[Total, int], /) -> None:
        for total, by in changes.items():
            if total != "enqueued":  # `get_totals` knows it from the highest number
                self._tallied[total] = self._tallied.get(total, 0) + by

    def write_totals(self) -> None:
        """Write the changes that the operation passed to `tally`.

        Call it at the end, before the commit.
        """
        if self._tallied:
            self._cursor.execute(adding(tuple(self._tallied)), tuple(self._tallied.values()))

    def expect(self, rows: int | None, /) -> None:
        if self._most is not None and (rows is None or rows > self._most):
            raise Long

    def lock(self, rollout_ids: Iterable[str], /) -> None:
        """Do nothing: the database has one writer at a time, so rollouts need no locks."""

    def ahead(self, query: str, asked: Sequence[dict[str, Any]], /) -> None:
        """Do nothing: the database is in this process, so reading ahead saves nothing."""

    def run(self, query: str, /, **parameters: Any) -> None:
        statement, values = self._positional[query]
        self._cursor.execute(statement, values(parameters))

    def change(self, query: str, /, **parameters: Any) -> int:
        statement, values = self._positional[query]
        return self._cursor.execute(statement, values(parameters)).rowcount

    def insert(self, query: str, /, **parameters: Any) -> int:
        statement, values = self._positional[query]
        key = self._cursor.execute(statement, values(parameters)).lastrowid
        assert key is not None
        return key

    def put(self, query: str, values: Sequence[Any], /) -> None:
        self._cursor.execute(self._queries[query], values)

    def put_many(self, query: str, rows: Sequence[Sequence[Any]], /) -> None:
        self.put_new(query, rows)

    def put_new(self, query: str, rows: Sequence[Sequence[Any]], /) -> int:
        execute = self._cursor.execute
        if len(rows) == 1:
            return execute(self._queries[query], rows[0]).rowcount
        return sum(execute(*statement).rowcount for statement in statements_for(rows, self._queries[query]))

    def one(self, query: str, /, **parameters: Any) -> Row | None:
        statement, values = self._positional[query]
        return self._cursor.execute(statement, values(parameters)).fetchone()

    def all(self, query: str, /, **parameters: Any) -> list[Row]:
        statement, values = self._positional[query]
        return self._cursor.execute(statement, values(parameters)).fetchall()

    def page(self, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        return self._cursor.execute(self._queries[query] + suffix, parameters).fetchall()

    def count(self, query: str, where: str, parameters: dict[str, Any], /, *, most: int) -> int:
        statement = counting(self._queries[query], where, most)
        return self._cursor.execute(statement, parameters).fetchone()[0]


_Values = Callable[[Mapping[str, Any]], Sequence[Any]]
_PARAMETER = re.compile(r":([a-z_]\w*)")


@cache
def _positional_queries() -> Mapping[str, tuple[str, _Values]]:
    """Return for each query's name its text with `?` for named parameters, and a function that puts their values in
    order. The database then need not look up parameters' names.
    """
    return {
        name: (_PARAMETER.sub("?", text), _in_order(_PARAMETER.findall(text))) for name, text in load_queries().items()
    }


def _in_order(names: Sequence[str]) -> _Values:
    match names:
        case []:
            return lambda _: ()
        case [name]:
            return lambda parameters: (parameters[name],)
        case _:
            return itemgetter(*names)


def _version(connection: sqlite3.Connection, url: str) -> int:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != _APPLICATION_ID and (tables or version):
        raise StoreError(f"{url} is a database of another program; give a path of its own to the store")
    return version


def _newer(url: str, version: int) -> StoreError:
    return StoreError(
        f"{url} was written by a newer Leyden (schema {version}, this one knows {len(migrations('sqlite'))}); upgrade it"
    )


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a migration. Raise StoreError for one that does not end."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        raise StoreError(f"a migration ends in the middle of a statement: {statement.strip()[:80]!r}")
