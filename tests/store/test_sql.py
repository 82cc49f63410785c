"""The statements and the table of methods: nothing unused, nothing misspelt, nothing that scans where it must not."""

from __future__ import annotations

import inspect
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import leyden.store.sql.body as body
from leyden.errors import StoreError
from leyden.store import LightningStore
from leyden.store.sql.body import attempts, resources, rollouts, spans, workers
from leyden.store.sql.queries import load_queries, parse_queries
from leyden.store.sql.sqlite import connect, migrate, statements

SOURCES = "".join(path.read_text() for path in Path(body.__file__).parent.glob("*.py"))


def test_every_query_is_used() -> None:
    used = set(re.findall(r'"(\w+)"', SOURCES)) | {"worker_claimed", "worker_busy"}
    used |= {f"count_{noun}" for noun in ("attempts", "spans", "resources", "workers")}
    named = set(load_queries())
    text = (Path(body.__file__).parent.parent / "queries.sql").read_text()
    used |= set(re.findall(r"\{(\w+)\}", text))
    assert named - used == set()


def test_every_query_that_is_named_is_there() -> None:
    called = set(re.findall(r'tx\.(?:run|insert|put|one|all|page)\(\s*"(\w+)"', SOURCES))
    assert called
    assert called - set(load_queries()) == set()


def test_a_query_without_a_description_or_with_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="description"):
        parse_queries("-- name: a\nSELECT 1\n")
    with pytest.raises(ValueError, match="twice"):
        parse_queries("-- name: a\n-- x\nSELECT 1\n\n-- name: a\n-- x\nSELECT 2\n")
    assert parse_queries("-- name: a\n-- x\nSELECT 1\n\n-- name: b\n-- x\n{a} WHERE 2\n")["b"] == "SELECT 1 WHERE 2"


def test_a_migration_that_ends_in_the_middle_is_refused() -> None:
    assert len(list(statements("CREATE TABLE a (x);\n-- done;\nCREATE TABLE b (\n  y);\n"))) == 2
    with pytest.raises(StoreError, match="middle"):
        list(statements("CREATE TABLE a (x)"))


PLANS = {
    "next_in_queue": ({"limit": 1}, "rollouts_queue"),
    "get_rollout": ({"rollout_id": "x"}, "sqlite_autoindex_rollouts_1"),
    "get_rollout_with_attempt": ({"rollout_id": "x", "attempt_id": "y"}, "PRIMARY KEY (rollout=?)"),
    "get_span_target": ({"rollout_id": "x", "attempt_id": "y"}, "PRIMARY KEY (rollout=?)"),
    "select_overdue": ({"now": 0}, "attempts_unfinished"),
    "next_deadlines": ({}, "attempts_unfinished"),
    "count_rollouts_by_status": ({}, "rollouts_status"),
    "count_spans": ({}, "spans_of_attempt"),
    "get_resources": ({"resources_id": "x"}, "sqlite_autoindex_resources_1"),
}


@pytest.mark.parametrize("query", PLANS)
def test_a_query_uses_its_index(query: str) -> None:
    parameters, index = PLANS[query]
    assert index in plan(load_queries()[query], parameters)


def test_spans_of_an_attempt_are_found_by_index() -> None:
    where = " WHERE s.rollout = :seq AND s.attempt = :attempt ORDER BY s.sequence_id"
    found = plan(load_queries()["select_spans"] + where, {"seq": 1, "attempt": 1})
    assert "spans_of_attempt (rollout=? AND attempt=?)" in found


def plan(sql: str, parameters: dict[str, Any]) -> str:
    with closing(connect(":memory:", {})) as connection:
        migrate(connection, "memory://")
        rows = connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall()
    return "\n".join(row[3] for row in rows)


BODY = {
    name: function
    for module in (attempts, resources, rollouts, spans, workers)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == module.__name__
}


@pytest.mark.parametrize("name", sorted(BODY.keys() & vars(LightningStore).keys()))
def test_the_body_takes_what_the_protocol_says(name: str) -> None:
    ours = list(inspect.signature(BODY[name]).parameters.values())[1:]
    theirs = list(inspect.signature(getattr(LightningStore, name)).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    assert [set(p.annotation.split(" | ")) for p in ours] == [set(p.annotation.split(" | ")) for p in theirs]


def test_a_failed_migration_leaves_the_file_as_it_was() -> None:
    with closing(connect(":memory:", {})) as connection:
        migrate(connection, "memory://")
        before = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        connection.execute("PRAGMA user_version = 0")  # the first migration runs again, and its tables are there
        with pytest.raises(sqlite3.OperationalError, match="already exists"):
            migrate(connection, "memory://")
        assert connection.execute("SELECT sql FROM sqlite_master").fetchall() == before
        assert not connection.in_transaction
