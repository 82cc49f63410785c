"""Where a store on PostgreSQL is: parsed, shown without its password, and refused with the remedy."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from leyden.errors import ConfigError
from leyden.store import PostgresLightningStore, open_store
from leyden.store.sql import postgres, postgres_session, postgres_transaction
from leyden.store.sql.postgres import Target, psycopg
from leyden.store.sql.queries import load_queries


@pytest.mark.parametrize(
    ("url", "shown", "address", "schema"),
    [
        ("postgresql://h/d", "postgresql://h/d", "postgresql://h/d", "leyden"),
        ("postgres://u:p%40w@h:5/d?schema=s", "postgresql://u@h:5/d?schema=s", "postgresql://u:p%40w@h:5/d", "s"),
        (
            "postgresql://u@a:1,b:2/d?host=/tmp/x&password=secret&sslmode=require",
            "postgresql://u@a:1,b:2/d?host=/tmp/x&sslmode=require",
            "postgresql://u@a:1,b:2/d?host=/tmp/x&password=secret&sslmode=require",
            "leyden",
        ),
        ("postgresql:///d", "postgresql:///d", "postgresql:///d", "leyden"),
        ("postgresql://u:p@[::1]:5/d", "postgresql://u@[::1]:5/d", "postgresql://u:p@[::1]:5/d", "leyden"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str, address: str, schema: str) -> None:
    target = Target.parse(url, "process")
    assert (target.url, target.address, target.schema) == (shown, address, schema)
    for secret in ("p%40w", "secret"):
        assert secret not in repr(target)


@pytest.mark.parametrize("password", ["pa@ss", "pa#ss", "pa/ss", "pa?ss", "pa[ss", "pa:s/s", "#", "[]"])
def test_a_password_that_is_not_written_as_it_must_be_is_not_shown(password: str) -> None:
    with pytest.raises(ConfigError, match="write % @") as raised:
        Target.parse(f"postgresql://user:{password}@host/d", "process")
    assert raised.value.__cause__ is None
    assert "pa" not in str(raised.value).replace("password", "")


@pytest.mark.parametrize("schema", ["", "1a", 'x"y', "a" * 52, "drop table"])
def test_a_schema_that_cannot_be_named_is_refused(schema: str) -> None:
    with pytest.raises(ConfigError, match="schema="):
        Target.parse(f"postgresql://h/d?schema={schema}", "process")


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="durability"):
        PostgresLightningStore("postgresql://h/d", durability="forever")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="connections"):
        PostgresLightningStore("postgresql://h/d", connections=1)
    with pytest.raises(ConfigError, match="postgresql://"):
        PostgresLightningStore("mysql://h/d")


def test_without_psycopg_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    psycopg.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"pip install 'leyden\[postgres\]'"):
            open_store("postgresql://h/d")
    finally:
        psycopg.cache_clear()


def test_the_store_is_imported_without_psycopg() -> None:
    program = "import sys, leyden.store; sys.exit('psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_every_query_that_postgres_says_differently_is_a_shared_one_or_run_by_its_driver() -> None:
    sources = "".join(
        map(
            inspect.getsource,
            (postgres, postgres_session, postgres_transaction, sys.modules[PostgresLightningStore.__module__]),
        )
    )
    shared = load_queries()
    own = [name for name, text in load_queries("postgres").items() if shared.get(name) != text]
    assert {"next_in_queue", "lock_rollouts"} <= set(own)
    assert [name for name in own if name not in shared and f'"{name}"' not in sources] == []
