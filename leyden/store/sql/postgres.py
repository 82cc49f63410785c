"""PostgreSQL behind the store: where it is, connecting and migrating, transactions over a connection, and what its errors mean.

It knows nothing of threads or retries: `postgres_session.py` says when an operation is run again. Many stores in many
processes may work on one database, so an operation is never alone here. Why it is correct all the same:

- Whoever changes a rollout, its attempts or its spans locks the rollout's row first. The look-ups with which operations begin
  are preceded by their lock (`_LOCKS`), in a statement of its own: at READ COMMITTED each statement sees what was committed
  before it began, so what is read behind the lock is the latest, and stays so until the commit. (Locking in the look-up
  itself would not do: where it had to wait, its joined rows would be those of before.)
- A claim takes rows that nobody holds (SKIP LOCKED). What it steps over may be given back, and nobody would say so; a claim that
  finds nothing looks again as long as something is there (`PostgresLightningStore`), and holds up nobody meanwhile.
- Where two make the same id at once, a unique index refuses the second, which is run again and finds the first one's.
- Operations on several rollouts lock them in one order; where two wait for each other all the same (workers, ids in different
  orders), PostgreSQL ends one of them, which is run again.
- Reads see one snapshot (REPEATABLE READ, READ ONLY), and wait for nobody.

REPEATABLE READ for writes would need no locks, but let every writer of a busy attempt fail whenever another commits.
To change the schema, add the next `migrations/postgres/NNNN_*.sql`; a released one never changes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from leyden.errors import ConfigError, LeydenError, StoreError
from leyden.store.sql.driver import Durability
from leyden.store.sql.queries import counting, load_queries, statements_for
from leyden.store.sql.transaction import Row, SpanTarget, Total
from leyden.utils.extras import install_extra

_OLDEST = 14
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,50}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^:\[\]]*)(:\d*)?")
_ILL_FORMED = (
    "the PostgreSQL address cannot be read (it is not shown: it may hold a password); "
    "in a user name and a password write % @ : / ? # [ ] as %25 %40 %3A %2F %3F %23 %5B %5D"
)
_SECRETS = {"password", "sslpassword"}
_PARAMETER = re.compile(r"(?<!:):([a-z_]\w*)|\?|%")

_LOCKS = {
    "get_rollout": "lock_rollouts",
    "get_rollout_with_attempt": "lock_rollouts",
    "get_rollout_key": "lock_rollouts",
    "get_span_target": "lock_rollouts",
    "pin_rollout": "lock_rollouts",
    "forget_rollout": "lock_rollout_of_seq",
    "get_run": "lock_run",
    "unpin": "lock_pin",
    "get_claim": "lock_claim_id",
    "get_resources": "lock_resources",
    "insert_resources": "lock_resources",
    "has_version": "lock_resources",
}
"""What an operation that writes must hold before it runs a query."""
_SHARDS = 16
"""Rows of `totals`, as many as the migration makes."""
_HIDING = {"select_new_positions": "are_spans_hidden"}
"""What tells whether a query that found nothing had something that it may not show yet."""

_DEFAULTS = {
    "connect_timeout": 10,
    "fallback_application_name": "leyden",
    "target_session_attrs": "read-write",  # of several hosts the primary, whichever that is by now
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_SESSION = (
    "SET search_path TO {schema}; SET synchronous_commit TO {durability}; SET standard_conforming_strings TO on; SET jit TO off;"
    # Every query has its index; the statistics of a table that has just been filled would have it scanned.
    " SET enable_seqscan TO off;"
    # A store whose machine is gone must not hold its locks, and who waits for them must outlive that.
    " SET idle_in_transaction_session_timeout TO '10s'; SET lock_timeout TO '30s'"
)
_NOW = "SELECT extract(epoch FROM now())::double precision"
_BEGIN_WRITE = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {_NOW}"
_BEGIN_READ = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {_NOW}"
_REMEDIES = {
    "25006": "it is a standby or read-only; give the URL of the primary",
    "28": "check the user and the password in the URL",
    "3D000": "create the database first: createdb NAME",
    "42501": "let the user create the schema and use its tables: GRANT CREATE ON DATABASE ... TO ...",
    "53100": "the server's disk is full; free some space and repeat the call",
    "53300": "it has no connection to spare; raise max_connections there, or open fewer stores",
    "55P03": "somebody holds a lock on the same rows; see pg_stat_activity for a transaction that does not end",
}

_SYNCHRONOUS: Mapping[Durability, str] = {"process": "local", "power": "on"}
"""Either waits for the server's disk; "power" for its synchronous standbys too, where it has some."""


@cache
def psycopg() -> Any:
    """The module `psycopg`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("psycopg")
    except ModuleNotFoundError as error:
        raise ConfigError(f"a store on PostgreSQL needs psycopg ({error}); {install_extra('postgres')}") from error


@dataclass(frozen=True)
class Target:
    """Where a store's tables are."""

    url: str
    """For people: without a password."""
    address: str = field(repr=False)
    """For libpq."""
    schema: str
    durability: Durability

    @classmethod
    def parse(cls, url: str, durability: Durability) -> Target:
        """From `postgresql://[user[:password]@][host][:port]/database[?schema=leyden&...]`, other options being libpq's.

        Raises ConfigError for what is no such address.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigError(_ILL_FORMED) from None
        if parts.scheme not in ("postgresql", "postgres"):
            raise ConfigError(f"a PostgreSQL address begins with postgresql://, got {parts.scheme!r}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        schema = options.pop("schema", "leyden")
        if not _SCHEMA.fullmatch(schema):
            raise ConfigError(f"schema={schema!r}: a schema is named by at most 51 letters, digits and underscores")
        if durability not in _SYNCHRONOUS:
            raise ConfigError(f"durability must be one of {', '.join(_SYNCHRONOUS)}, got {durability!r}")
        login, at, hosts = parts.netloc.rpartition("@")
        if parts.fragment or "@" in login or not all(_HOST.fullmatch(host) for host in hosts.split(",")):
            raise ConfigError(_ILL_FORMED)
        place = f"{hosts}{parts.path}"
        shown = {name: value for name, value in options.items() if name not in _SECRETS}
        if schema != "leyden":
            shown["schema"] = schema
        return cls(
            url=_address(f"{login.partition(':')[0]}{at}{place}", shown),
            address=_address(f"{login}{at}{place}", options),
            schema=schema,
            durability=durability,
        )

    @property
    def channel(self) -> str:
        """Where the stores on these tables tell each other what was committed."""
        return f"leyden_{self.schema}"


def connect(target: Target) -> Any:
    """A connection in autocommit mode (transactions are said explicitly). Raises psycopg.Error, ConfigError for a bad address."""
    pg = psycopg()
    try:
        given = pg.conninfo.conninfo_to_dict(target.address)
    except pg.ProgrammingError as error:
        raise ConfigError(f"{target.url}: {_line(error)}") from None  # its cause names the password
    connection = pg.connect(**{**_DEFAULTS, **given}, client_encoding="UTF8", autocommit=True)
    try:
        numeric = importlib.import_module("psycopg.types.numeric")
        connection.adapters.register_dumper(int, numeric.Int8Dumper)  # one plan for a statement, not one for each size
        connection.adapters.register_loader("numeric", numeric.IntLoader)  # the sum of integers is one
        connection.execute(
            _SESSION.format(schema=f'"{target.schema}"', durability=_SYNCHRONOUS[target.durability]), prepare=False
        )
    except BaseException:
        connection.close()
        raise
    return connection


def answers(target: Target) -> bool:
    """Whether the server is there and takes connections, whoever asks. Takes as long as connecting to it."""
    pg = psycopg()
    given = pg.conninfo.make_conninfo(**{**_DEFAULTS, **pg.conninfo.conninfo_to_dict(target.address)})
    return pg.pq.PGconn.ping(given.encode()) == pg.pq.Ping.OK


def migrate(connection: Any, target: Target) -> None:
    """Bring the schema to this version, in one transaction; whoever else does the same waits.

    Raises StoreError for a schema that a newer Leyden wrote, or another program, and for a server that is too old.
    """
    migrations = _migrations()
    server = connection.info.server_version // 10_000
    if server < _OLDEST:
        raise StoreError(f"{target.url} is PostgreSQL {server}; Leyden needs {_OLDEST} or newer")
    with connection.transaction():
        lock = "SELECT pg_advisory_xact_lock(hashtextextended('leyden migrate ' || %s, 0))"
        connection.execute(lock, [target.schema])
        encoding = connection.execute("SHOW server_encoding").fetchone()[0]
        if encoding != "UTF8":
            raise StoreError(f"{target.url} holds text as {encoding}; create the database with ENCODING 'UTF8'")
        version = _version(connection, target)
        if version > len(migrations):
            raise StoreError(
                f"{target.url} was written by a newer Leyden (schema {version}, this one knows {len(migrations)}); upgrade it"
            )
        if (
            version == 0
            and connection.execute("SELECT to_regnamespace(%s)", [f'"{target.schema}"']).fetchone()[0] is None
        ):
            connection.execute(f'CREATE SCHEMA "{target.schema}"')
        for script in migrations[version:]:
            connection.execute(script, prepare=False)
        if version < len(migrations):
            connection.execute("CREATE TABLE IF NOT EXISTS leyden_schema (version INTEGER NOT NULL)")
            connection.execute("DELETE FROM leyden_schema")
            connection.execute("INSERT INTO leyden_schema VALUES (%s)", [len(migrations)])
        connection.execute(_statements()["forget_connections"])
        connection.execute(_statements()["forget_transactions"])


def store_error(target: Target, error: Exception) -> LeydenError:
    """What a caller is told of an error of the database: what, where, and what to do about it."""
    state: str = getattr(error, "sqlstate", None) or ""
    if isinstance(error, psycopg().DataError | UnicodeEncodeError) or state == "54000":
        return ConfigError(f"{target.url} cannot hold this value: {_line(error)}")
    remedy = next((remedy for kind, remedy in _REMEDIES.items() if state.startswith(kind)), None)
    return StoreError(f"{target.url}: {_line(error)}" + (f"; {remedy}" if remedy else ""))


class PostgresTransaction:
    """`transaction.Transaction` over one connection; used again for each operation, after `begin`."""

    def __init__(self, connection: Any, target: Target, *, writes: bool) -> None:
        self.store_url = target.url
        self.hiding = False
        """Whether the operation found nothing where something will be shown soon."""
        self._channel = target.channel
        self._connection = connection
        self._cursor = connection.cursor()
        self._queries = _statements()
        self._locks = _LOCKS if writes else {}
        self._writes = writes
        self._locked: set[str] = set()
        self._say_nothing()

    def begin(self) -> None:
        """Another operation begins, and has said nothing yet. It begins now by the server's clock, which all stores share."""
        self._say_nothing()
        self._cursor.execute(_BEGIN_WRITE if self._writes else _BEGIN_READ, prepare=False)
        self._cursor.nextset()
        self.now = self._cursor.fetchone()[0]

    def commit(self, connection: int | None, number: int, news: Sequence[str]) -> None:
        """Count the `number`th commit of a connection, write the totals, notify the other stores
        (ASCII), and commit.

        All of this is one message to the server.
        """
        statements = [] if connection is None else [f"SELECT count_commit({connection}, {number})"]
        if self._tallied:  # the last row that is locked, so that those who wait for it hold nothing that is waited for
            changes = ", ".join(f"{total} = {total} + ({by})" for total, by in self._tallied.items())
            statements.append(f"UPDATE totals SET {changes} WHERE shard = pg_backend_pid() % {_SHARDS}")
        for text in news:
            quoted = text.replace("'", "''")
            statements.append(f"SELECT pg_notify('{self._channel}', '{quoted}')")
        self._cursor.execute(";".join([*statements, "COMMIT"]), prepare=False)

    def rollback(self) -> None:
        """Undo everything."""
        self._cursor.execute("ROLLBACK", prepare=False)

    def expect(self, rows: int | None, /) -> None:
        """Every operation may take its time: it runs in a thread of its own."""

    def keep_targets(self) -> None:
        """Others write too: nothing is known of an attempt that was not just read."""

    def tally(self, changes: Mapping[Total, int], /) -> None:
        for total, by in changes.items():
            self._tallied[total] = self._tallied.get(total, 0) + by

    def lock(self, rollout_ids: Iterable[str], /) -> None:
        missing = sorted({*rollout_ids} - self._locked)
        if missing:
            found = self._send(self._queries["lock_rollouts"], {"rollout_ids": missing}).rowcount
            self._locked.update(missing)
            if 1 < len(missing) != found:  # the operation makes them
                self._send(self._queries["lock_new_rollouts"], {})

    def run(self, query: str, /, **parameters: Any) -> int:
        return self._execute(query, parameters).rowcount

    def insert(self, query: str, /, **parameters: Any) -> int:
        return self._execute(query, parameters).fetchone()[0]

    def put(self, query: str, values: Sequence[Any], /) -> int:
        return self._cursor.execute(self._queries[query], values).rowcount

    def put_many(self, query: str, rows: Sequence[Sequence[Any]], /) -> int:
        if len(rows) == 1:
            return self.put(query, rows[0])
        execute = self._cursor.execute
        return sum(execute(*statement).rowcount for statement in statements_for(rows, self._queries[query]))

    def one(self, query: str, /, **parameters: Any) -> Row | None:
        return self._execute(query, parameters).fetchone()

    def all(self, query: str, /, **parameters: Any) -> list[Row]:
        return self._execute(query, parameters).fetchall()

    def page(self, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        rows = self._send(self._queries[query] + _placeholders(suffix), parameters).fetchall()
        if not rows and query in _HIDING:
            self.hiding = self.one(_HIDING[query]) is not None
        return rows

    def count(self, query: str, where: str, parameters: dict[str, Any], /, *, most: int) -> int:
        statement = counting(self._queries[query], _placeholders(where), most)
        return self._send(statement, parameters).fetchone()[0]

    def _execute(self, query: str, parameters: dict[str, Any]) -> Any:
        lock = self._locks.get(query)
        if lock == "lock_rollouts":
            self.lock([parameters["rollout_id"]])
        elif lock is not None:
            self._send(self._queries[lock], parameters)
        return self._send(self._queries[query], parameters)

    def _send(self, statement: str, parameters: dict[str, Any]) -> Any:
        try:
            return self._cursor.execute(statement, parameters)
        except psycopg().DataError:
            askable = {name: _askable(value) for name, value in parameters.items()}
            if askable == parameters:
                raise
            return self._cursor.execute(statement, askable)

    def _say_nothing(self) -> None:
        self.now = 0.0
        self.claimable = 0
        self.finished: list[str] = []
        self.spans = False
        self.targets: dict[tuple[str, str], SpanTarget] = {}
        self.hiding = False
        self._tallied: dict[Total, int] = {}
        self._locked.clear()


def _askable(value: Any) -> Any:
    """What is asked in the place of a text with U+0000, which cannot be sent: nothing has either in its name (`checks.py`)."""
    if isinstance(value, list):
        return [_askable(entry) for entry in cast(list[Any], value)]
    return value.replace("\0", "\1") if isinstance(value, str) else value


def _address(place: str, options: Mapping[str, str]) -> str:
    return f"postgresql://{place}" + (f"?{urlencode(options, safe='/', quote_via=quote)}" if options else "")


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())


def _version(connection: Any, target: Target) -> int:
    """The version of the schema, 0 where there is none yet."""
    found = connection.execute(
        "SELECT count(*), count(*) FILTER (WHERE tablename = 'leyden_schema') FROM pg_tables WHERE schemaname = %s",
        [target.schema],
    ).fetchone()
    if found[1]:
        return connection.execute("SELECT version FROM leyden_schema").fetchone()[0]
    if found[0]:
        raise StoreError(
            f"{target.url}: schema {target.schema!r} holds tables of another program; give the store one of its own (?schema=NAME)"
        )
    return 0


@cache
def _migrations() -> Sequence[str]:
    """The scripts, in order."""
    entries = files("leyden.store.sql").joinpath("migrations", "postgres").iterdir()
    scripts = sorted((entry for entry in entries if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return [entry.read_text(encoding="utf-8") for entry in scripts]


@cache
def _statements() -> Mapping[str, str]:
    return {name: _placeholders(text) for name, text in load_queries("postgres").items()}


@lru_cache(maxsize=512)
def _placeholders(text: str) -> str:
    """A statement with its parameters as psycopg writes them."""
    return _PARAMETER.sub(_placeholder, text)


def _placeholder(found: re.Match[str]) -> str:
    if found[1]:
        return f"%({found[1]})s"
    return "%s" if found[0] == "?" else "%%"
