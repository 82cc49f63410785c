"""PostgreSQL behind the store: addresses, connecting and migrating, its form of the queries, and the meaning of its
errors.

The module knows no operation (`postgres_transaction.py`), no thread and no retry (`postgres_session.py`). To change the
schema, add the next `migrations/postgres/NNNN_*.sql`; a released migration never changes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from leyden._lib.extras import import_optional
from leyden.errors import ConfigError, LeydenError, StoreError, StoreFull
from leyden.store.sql.driver import Durability
from leyden.store.sql.queries import load_queries, migrations

_OLDEST = 14
"""The oldest version of PostgreSQL that works."""
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,50}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]*\]|[^:\[\]]*)(:\d*)?")
_ILL_FORMED = (
    "the PostgreSQL address cannot be read (it is not shown: it may hold a password); "
    "in a user name and a password write % @ : / ? # [ ] as %25 %40 %3A %2F %3F %23 %5B %5D"
)
_SECRETS = {"password", "sslpassword"}
_PARAMETER = re.compile(r"(?<!:):([a-z_]\w*)|\?|%")

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
    # For single statements, which are their own transactions.
    " SET default_transaction_isolation TO 'read committed'; SET default_transaction_read_only TO off;"
    # Every query has its index. With the statistics of a table that was just filled, PostgreSQL
    # would scan it instead.
    " SET enable_seqscan TO off;"
    # A store whose machine is gone must not keep its locks. Waiting for a lock takes longer.
    " SET idle_in_transaction_session_timeout TO '10s'; SET lock_timeout TO '30s'"
)
_FULL = "53100"
_REMEDIES = {
    "25006": "it is a standby or read-only; give the URL of the primary",
    "28": "check the user and the password in the URL",
    "3D000": "create the database first: createdb NAME",
    "42501": "let the user create the schema and use its tables: GRANT CREATE ON DATABASE ... TO ...",
    _FULL: "the server's disk is full; free some space and repeat the call",
    "53300": "it has no connection to spare; raise max_connections there, or open fewer stores",
    "55P03": "somebody holds a lock on the same rows; see pg_stat_activity for a transaction that does not end",
}

_SYNCHRONOUS: Mapping[Durability, str] = {"process": "local", "power": "on"}
"""PostgreSQL's `synchronous_commit` for each level of durability. Each waits for the server's disk; "power" also waits
for the server's synchronous standbys, if it has some."""


@cache
def psycopg() -> Any:
    """Import and return the module `psycopg`. Raise MissingExtra if it is not installed."""
    return import_optional("psycopg", extra="postgres", needed_by="a store on PostgreSQL")


@dataclass(frozen=True)
class Target:
    """A database, and the schema in it that holds the store's tables."""

    url: str
    """The URL for messages, without a password."""
    address: str = field(repr=False)
    """The connection string for libpq."""
    schema: str
    durability: Durability

    @classmethod
    def parse(cls, url: str, durability: Durability) -> Target:
        """Parse `postgresql://[user[:password]@][host][:port]/database[?schema=leyden&...]`; other options are libpq's.

        Raise ConfigError for any other address.
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
        location = f"{hosts}{parts.path}"
        shown = {name: value for name, value in options.items() if name not in _SECRETS}
        if schema != "leyden":
            shown["schema"] = schema
        return cls(
            url=_address(f"{login.partition(':')[0]}{at}{location}", shown),
            address=_address(f"{login}{at}{location}", options),
            schema=schema,
            durability=durability,
        )

    @property
    def channel(self) -> str:
        """The channel on which the stores on these tables notify each other of commits."""
        return f"leyden_{self.schema}"


def connect(target: Target) -> Any:
    """Return a connection in autocommit mode, in which transactions are begun explicitly. Raise psycopg.Error if that
    fails, and ConfigError for a bad address.
    """
    pg = psycopg()
    try:
        given = pg.conninfo.conninfo_to_dict(target.address)
    except pg.ProgrammingError as error:
        raise ConfigError(f"{target.url}: {_line(error)}") from None  # its cause names the password
    connection = pg.connect(**{**_DEFAULTS, **given}, client_encoding="UTF8", autocommit=True)
    try:
        numeric = importlib.import_module("psycopg.types.numeric")
        connection.adapters.register_dumper(int, numeric.Int8Dumper)  # one plan for a statement, not one for each size
        connection.adapters.register_loader("numeric", numeric.IntLoader)  # PostgreSQL sums integers as numeric
        connection.execute(
            _SESSION.format(schema=f'"{target.schema}"', durability=_SYNCHRONOUS[target.durability]), prepare=False
        )
    except BaseException:
        connection.close()
        raise
    return connection


def answers(target: Target) -> bool:
    """Return whether the server accepts connections at all. It takes as long as connecting."""
    pg = psycopg()
    given = pg.conninfo.make_conninfo(**{**_DEFAULTS, **pg.conninfo.conninfo_to_dict(target.address)})
    return pg.pq.PGconn.ping(given.encode()) == pg.pq.Ping.OK


def migrate(connection: Any, target: Target) -> None:
    """Bring the schema to this version, in one transaction. Migrations of several processes wait for each other.

    Raise StoreError for a schema that a newer Leyden or another program wrote, for a server that is too old, and for a
    database whose encoding is not UTF-8.
    """
    scripts = migrations("postgres")
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
        if version > len(scripts):
            raise StoreError(
                f"{target.url} was written by a newer Leyden (schema {version}, this one knows {len(scripts)}); upgrade it"
            )
        if (
            version == 0
            and connection.execute("SELECT to_regnamespace(%s)", [f'"{target.schema}"']).fetchone()[0] is None
        ):
            connection.execute(f'CREATE SCHEMA "{target.schema}"')
        for script in scripts[version:]:
            connection.execute(script, prepare=False)
        if version < len(scripts):
            connection.execute("CREATE TABLE IF NOT EXISTS leyden_schema (version INTEGER NOT NULL)")
            connection.execute("DELETE FROM leyden_schema")
            connection.execute("INSERT INTO leyden_schema VALUES (%s)", [len(scripts)])
        connection.execute(statements()["prune_connections"])
        connection.execute(statements()["prune_transactions"])


def store_error(target: Target, error: Exception) -> LeydenError:
    """Return the caller's error for a database error: what happened, where, and the remedy."""
    state: str = getattr(error, "sqlstate", None) or ""
    if isinstance(error, psycopg().DataError | UnicodeEncodeError) or state == "54000":
        return ConfigError(f"{target.url} cannot hold this value: {_line(error)}")
    remedy = next((remedy for kind, remedy in _REMEDIES.items() if state.startswith(kind)), None)
    kind = StoreFull if state == _FULL else StoreError
    return kind(f"{target.url}: {_line(error)}" + (f"; {remedy}" if remedy else ""))


def _address(location: str, options: Mapping[str, str]) -> str:
    return f"postgresql://{location}" + (f"?{urlencode(options, safe='/', quote_via=quote)}" if options else "")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _version(connection: Any, target: Target) -> int:
    """Return the version of the schema; 0 if it is empty. Raise StoreError if it holds another program's tables."""
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
def statements() -> Mapping[str, str]:
    """Return every query by name, with its parameters as psycopg writes them."""
    return {name: placeholders(text) for name, text in load_queries("postgres").items()}


@lru_cache(maxsize=512)
def placeholders(text: str) -> str:
    """Return a statement with `%(name)s` for `:name`, `%s` for `?` and `%%` for `%`."""
    return _PARAMETER.sub(
        lambda found: f"%({found[1]})s" if found[1] else "%s" if found[0] == "?" else "%%",
        text,
    )
