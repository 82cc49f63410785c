"""The statements and the table of methods: nothing unused, nothing misspelt, nothing that scans where it must not."""

from __future__ import annotations

import inspect
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import leyden.store.sql.body as body
from leyden.errors import StoreError
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.store.sql import session
from leyden.store.sql.body import attempts, listing, outcomes, retention, rollouts, runs, samples, search, spans
from leyden.store.sql.body import resource_versions as resources
from leyden.store.sql.body import span_stream as stream
from leyden.store.sql.body import worker_rows as workers
from leyden.store.sql.body.rollout_filter import RolloutFilter
from leyden.store.sql.queries import counting, load_queries, parse_queries
from leyden.store.sql.sqlite import SqliteTransaction, _positional_queries, connect, migrate, statements
from leyden.store.sql.transaction import Row
from leyden.types import MetricPoint, RunRecord, Sample, Span

SOURCES = "".join(path.read_text() for path in Path(body.__file__).parent.glob("*.py"))


def test_every_query_is_used() -> None:
    used = set(re.findall(r'"(\w+)"', SOURCES)) | {"worker_claimed", "worker_busy"}
    named = set(load_queries())
    text = (Path(body.__file__).parent.parent / "queries.sql").read_text()
    used |= set(re.findall(r"\{(\w+)\}", text))
    assert named - used == set()


def test_every_query_that_is_named_is_there() -> None:
    called = set(re.findall(r'tx\.(?:run|insert|put|one|all|page)\(\s*"(\w+)"', SOURCES))
    assert called
    assert called - set(load_queries()) == set()


def test_values_by_place_go_where_their_names_are() -> None:
    connection = connect(":memory:", {})
    migrate(connection, "memory://")
    named = {
        name: text
        for name, text in load_queries().items()
        if "?" not in text and not name.endswith("_columns") and name != "finished_rollouts"
    }
    assert len(named) > 70
    for name, text in named.items():
        statement, values = _positional_queries()[name]
        asked: dict[str, int] = {}
        while True:  # SQLite itself says which names there are
            try:
                connection.execute(f"EXPLAIN {text}", asked)
                break
            except sqlite3.ProgrammingError as error:
                (missing,) = re.findall(r":(\w+)", str(error))
                asked[missing] = len(asked)
        assert list(values(asked)) == [asked[found] for found in re.findall(r":(\w+)", text)]
        connection.execute(f"EXPLAIN {statement}", values(asked))
    connection.close()


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
    "count_under_way": ({}, "attempts_unfinished"),
    "select_prunable": ({"status": "failed", "limit": 1}, "rollouts_finished_ended (status=? AND end_time>?)"),
    "prune_spans": ({"seq": 1}, "spans_of_attempt (rollout=?)"),
    "unpin": ({"name": "x"}, "pins_name"),
    "get_run": ({"run_id": "x"}, "sqlite_autoindex_runs_1"),
    "cut_metrics": ({"run": 1, "after_iteration": 1}, "PRIMARY KEY (run=? AND iteration>?)"),
    "get_resources": ({"resources_id": "x"}, "sqlite_autoindex_resources_1"),
    "prune_samples": ({"limit": 1, "oldest": 0, "most": 1}, "samples USING INTEGER PRIMARY KEY (rowid=?)"),
    "select_spans_at": ({"keys": "[1]"}, "s USING INTEGER PRIMARY KEY (rowid=?)"),
    "get_token_record": (
        {"rollout": 1, "attempt": 1, "span_id": "x"},
        "spans_of_attempt (rollout=? AND attempt=? AND span_id=?)",
    ),
    "select_token_chain": ({"key": 1}, "s USING INTEGER PRIMARY KEY (rowid=?)"),
    "insert_attribute_value_of": (
        {"attribute": 1, "value": b"", "rollout": 1, "attempt": 1, "span_id": "x"},
        "spans_of_attempt (rollout=? AND attempt=? AND span_id=?)",
    ),
}


@pytest.mark.parametrize("query", PLANS)
def test_a_query_uses_its_index(query: str) -> None:
    parameters, index = PLANS[query]
    assert index in plan(load_queries()[query], parameters)


def test_spans_of_an_attempt_are_found_by_index() -> None:
    where = " WHERE s.rollout = :seq AND s.attempt = :attempt ORDER BY s.sequence_id"
    found = plan(load_queries()["select_spans"] + where, {"seq": 1, "attempt": 1})
    assert "spans_of_attempt (rollout=? AND attempt=?)" in found


SEARCHES: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "tool"}, "spans_name (name=?)"),
    "time": ({"started_from": 1.0, "started_before": 2.0}, "spans_name (name=? AND start_time>? AND start_time<?)"),
    "name and time": ({"name": "tool", "started_from": 1.0}, "spans_name (name=? AND start_time>?)"),
    "name or kind, and time": (
        {"name": "tool", "kind": "CLIENT", "filter_logic": "or", "started_before": 2.0},
        "spans_name (name=? AND start_time<?)",
    ),
    "attribute": ({"attributes": {"a": 1}}, "attribute_values USING PRIMARY KEY (attribute=? AND value=?)"),
    "attributes, name and time": (
        {"attributes": {"a": 1, "b": 2}, "name": "tool", "started_from": 1.0},
        "s USING INTEGER PRIMARY KEY (rowid=?)\nLIST SUBQUERY 1\nSEARCH attribute_values USING PRIMARY KEY (attribute=? AND value=?)",
    ),
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("page", [{}, {"limit": 5}, {"limit": 5, "offset": 5, "sort_by": "end_time"}])
async def test_a_search_of_all_rollouts_reads_no_table_from_end_to_end(
    search: str, page: dict[str, Any], explained: list[str]
) -> None:
    asked, index = SEARCHES[search]
    async with InMemoryLightningStore() as store:
        await store.index_span_attribute("a")
        await store.index_span_attribute("b")
        rollout = await store.start_rollout(1)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id, "trace_id": "f" * 32}
        what: dict[str, Any] = {"name": "tool", "start_time": 1.5, "attributes": {"a": 1, "b": 2}}
        await store.add_many_spans([Span(**ids, sequence_id=0, span_id=f"{i:016x}", **what) for i in range(10)])
        explained.clear()
        await store.query_spans(**asked, **page)
    assert len(explained) == (2 if page else 1)  # a full page is followed by a count
    for told in explained:
        assert index in told
        assert re.findall(r"SCAN (?!names|matching)\w+", told) == []


@pytest.mark.parametrize(
    "asked", [{"name": "x"}, {"name": "x", "started_from": 1.0}, {"attributes": {"a": 1}, "name": "x"}]
)
@pytest.mark.parametrize(("attempt_id", "index"), [(None, "(rollout=?)"), ("latest", "(rollout=? AND attempt=?)")])
async def test_a_search_of_one_rollout_reads_its_spans_alone(
    asked: dict[str, Any], attempt_id: str | None, index: str, explained: list[str]
) -> None:
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout(1)
        await store.query_spans(rollout.rollout_id, attempt_id, **asked)
    assert [told.removesuffix("\nUSE TEMP B-TREE FOR ORDER BY") for told in explained] == [
        f"SEARCH s USING INDEX spans_of_attempt {index}"
    ]


STARTED, ENDED = "rollouts_finished_started (status=?)", "rollouts_finished_ended (status=? AND end_time>?)"
WORKED_ON = "LIST SUBQUERY 1\nSCAN attempts USING INDEX attempts_unfinished"
PAGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "as they arrived": ({}, ["SCAN r"]),
    "by start": ({"sort_by": "start_time"}, ["SCAN r USING COVERING INDEX rollouts_started"]),
    "by end": ({"sort_by": "end_time"}, [ENDED] * 3 + ["SCAN r"]),
    "by id": ({"sort_by": "rollout_id"}, ["SCAN r USING COVERING INDEX sqlite_autoindex_rollouts_1"]),
    "one final status": ({"status_in": ["failed"]}, ["r USING INDEX rollouts_finished (status=?)"]),
    "two final statuses": (
        {"status_in": ["failed", "succeeded"]},
        ["r USING INDEX rollouts_finished (status=?)"] * 2,
    ),
    "a final status by start": ({"status_in": ["failed"], "sort_by": "start_time"}, [STARTED]),
    "a final status by end": ({"status_in": ["failed"], "sort_by": "end_time"}, [ENDED]),
    "what waits": ({"status_in": ["queuing"]}, ["SCAN r USING INDEX rollouts_waiting"]),
    "what waits again": ({"status_in": ["requeuing"]}, ["SCAN r USING INDEX rollouts_requeued"]),
    "what is worked on": ({"status_in": ["running"]}, [f"r USING INTEGER PRIMARY KEY (rowid=?)\n{WORKED_ON}"]),
    "what is worked on by end": (
        {"status_in": ["running"], "sort_by": "end_time"},
        [f"r USING INTEGER PRIMARY KEY (rowid=?)\n{WORKED_ON}"],
    ),
    "of one run": ({"run_id": "a"}, ["SEARCH r USING COVERING INDEX rollouts_of_run (run=?)"]),
    "of one run and one status": (
        {"run_id": "a", "status_in": ["failed"]},
        ["SEARCH r USING INDEX rollouts_of_run (run=?)"],
    ),
    "of one group": ({"group_id": "g"}, ["SEARCH r USING COVERING INDEX rollouts_of_group (group_id=?)"]),
    "of one group of a run": (
        {"run_id": "a", "group_id": "g"},
        ["SEARCH r USING INDEX rollouts_of_group (group_id=?)"],
    ),
    "forks of one rollout": (
        {"replay_from": "r"},
        ["SEARCH r USING COVERING INDEX rollouts_of_replay (replay_from=?)"],
    ),
    "forks of one rollout in a run": (
        {"replay_from": "r", "run_id": "a", "group_id": "g"},
        ["SEARCH r USING INDEX rollouts_of_replay (replay_from=?)"],
    ),
    "some ids": (
        {"rollout_id_in": ["a", "b"], "sort_by": "start_time"},
        ["rollouts_1 (rollout_id=?)\nUSE TEMP B-TREE FOR ORDER BY"],
    ),
}


@pytest.mark.parametrize("sort_order", ["asc", "desc"])
@pytest.mark.parametrize("page", PAGES)
async def test_a_page_of_rollouts_is_read_in_its_order_by_an_index(
    page: str, sort_order: Any, explained: list[str]
) -> None:
    asked, indexes = PAGES[page]
    async with InMemoryLightningStore() as store:
        await store.start_run(RunRecord(run_id="a", name="a", kind="fit", start_time=1.0))
        await store.enqueue_rollout(1, run_id="a", group_id="g")
        explained.clear()
        await store.query_rollouts(**asked, sort_order=sort_order, limit=100)
    assert len(explained) == len(indexes)  # and nothing is counted
    for told, index in zip(explained, indexes, strict=True):
        assert index in told
        if WORKED_ON not in index and page != "some ids":
            assert "TEMP B-TREE" not in told


async def test_statistics_look_at_nothing_that_is_finished_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Listening(SqliteTransaction):
        def all(self, query: str, /, **parameters: Any) -> list[Row]:
            asked.append(query)
            return super().all(query, **parameters)

    monkeypatch.setattr(session, "SqliteTransaction", Listening)
    async with InMemoryLightningStore() as store:
        await store.statistics()
    assert asked == ["get_totals", "count_under_way", "count_workers"]
    assert plan(load_queries()["get_totals"], {}) == "SCAN totals\nSCALAR SUBQUERY 1\nSEARCH rollouts"
    assert re.findall(r"SCAN .*", plan(load_queries()["count_under_way"], {})) == [
        "SCAN attempts USING INDEX attempts_unfinished",
        "SCAN rollouts USING INDEX rollouts_requeued",
    ]


@pytest.mark.parametrize(
    ("polled", "index"),
    [
        ({}, "s USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
        ({"rollout_ids": ["a", "b"]}, "s USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)"),
        ({"rollout_ids": ["a", "b"], "far": True}, "spans_of_attempt (rollout=?)"),
    ],
)
async def test_a_stream_reads_the_spans_behind_its_cursor_in_their_order(
    polled: dict[str, Any], index: str, explained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if polled.pop("far", False):
        monkeypatch.setattr(stream, "_FAR", 0)
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout(1)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        await store.add_span(Span(**ids, sequence_id=0, trace_id="f" * 32, span_id="f" * 16, name="x"))
        explained.clear()
        await store.poll_new_spans(after=None, **polled)
    assert explained
    for told in explained:
        assert index in told
        assert "SCAN" not in told
        assert "TEMP B-TREE" not in told or "spans_of_attempt" in told


@pytest.mark.parametrize(
    ("asked", "index"),
    [
        ({"name": "x", "limit": 1, "sort_order": "desc"}, "(name=?)"),
        ({"name": "x", "worker_id": "w", "measured_from": 1.0}, "(name=? AND time>?)"),
        ({"measured_from": 1.0, "measured_before": 2.0}, "samples_time (time>? AND time<?)"),
    ],
)
async def test_a_search_of_samples_reads_what_is_in_its_time_alone(
    asked: dict[str, Any], index: str, explained: list[str]
) -> None:
    async with InMemoryLightningStore() as store:
        await store.add_many_samples([Sample(name="x", worker_id="w", time=time.time(), value=1.0)])
        await store.query_samples(**asked)
    page, *count = explained
    assert len(count) == ("limit" in asked)  # a page that holds all there is needs no count
    assert index in page
    assert "SCAN" not in page
    assert all(index in told for told in count)
    assert (
        "TEMP B-TREE" not in page or "TEMP B-TREE FOR RIGHT PART" in page or "TEMP B-TREE FOR LAST" in page
    )  # at most the samples of one moment are sorted


@pytest.mark.parametrize(
    ("asked", "index"),
    [({}, "(run=?)"), ({"iteration_from": 3, "limit": 5, "names": ["x"]}, "(run=? AND iteration>?)")],
)
async def test_metrics_are_read_in_their_order_from_the_first_iteration_asked_for(
    asked: dict[str, Any], index: str, explained: list[str]
) -> None:
    async with InMemoryLightningStore() as store:
        await store.start_run(RunRecord(run_id="a", name="a", kind="fit", start_time=1.0))
        points = [MetricPoint(stage="train", iteration=i, name="x", value=1.0, time=1.0) for i in range(20)]
        await store.add_metrics("a", points)
        await store.query_metrics("a", **asked)
    page, *counts = explained
    assert page == f"SEARCH m USING PRIMARY KEY {index}"  # nothing is sorted
    assert all(page in count for count in counts)


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans of the pages that are read, and of the counts behind them."""
    plans: list[str] = []

    class Explaining(SqliteTransaction):
        def page(self, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
            plans.append(told(self._cursor, self._queries[query] + suffix, parameters))
            return super().page(query, suffix, parameters)

        def count(self, query: str, where: str, parameters: dict[str, Any], /, *, most: int) -> int:
            plans.append(told(self._cursor, counting(self._queries[query], where, most), parameters))
            return super().count(query, where, parameters, most=most)

    monkeypatch.setattr(session, "SqliteTransaction", Explaining)
    return plans


def told(cursor: sqlite3.Cursor, sql: str, parameters: dict[str, Any]) -> str:
    return "\n".join(row[3] for row in cursor.execute(f"EXPLAIN QUERY PLAN {sql}", parameters).fetchall())


def plan(sql: str, parameters: dict[str, Any]) -> str:
    with closing(connect(":memory:", {})) as connection:
        migrate(connection, "memory://")
        return told(connection.cursor(), sql, parameters)


BODY = {
    name: function
    for module in (attempts, listing, outcomes, resources, retention, rollouts, runs, samples, search, spans, workers)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and not name.startswith("_") and function.__module__ == module.__name__
}


@pytest.mark.parametrize("name", sorted(BODY.keys() & vars(LightningStore).keys()))
def test_the_body_takes_what_the_protocol_says(name: str) -> None:
    theirs = list(inspect.signature(getattr(LightningStore, name)).parameters.values())[1:]
    ours: list[inspect.Parameter] = []
    for parameter in list(inspect.signature(BODY[name]).parameters.values())[1:]:
        if parameter.annotation == RolloutFilter.__name__:
            packed = inspect.signature(RolloutFilter).parameters
            ours += [packed[each.name] for each in theirs if each.name in packed]
        else:
            ours.append(parameter)
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
