"""Pages and totals on PostgreSQL: a schema of before is counted once, and no page reads a long history."""

from __future__ import annotations

import asyncio
import json
from importlib.resources import files
from typing import Any

import psycopg
import pytest

from leyden.store import PostgresLightningStore
from leyden.store.sql.postgres import placeholders
from leyden.store.sql.postgres_transaction import PostgresTransaction
from leyden.store.sql.transaction import Row
from leyden.testing import audit_store
from leyden.types import EnqueueRolloutRequest, MetricPoint, ReplayFrom, Retention, RunRecord
from tests.backends.test_postgres import raw

pytestmark = [pytest.mark.backends, pytest.mark.merge]

SCRIPTS = files("leyden.store.sql").joinpath("migrations", "postgres")
N_ROLLOUTS = 60_000
FILL = f"""
    INSERT INTO rollouts (rollout_id, status, input, config, metadata, start_time, end_time, bytes, attempts)
    SELECT 'old-' || i, CASE WHEN i % 50 = 0 THEN 'failed' ELSE 'succeeded' END, '1', '', '', i, i + 1, 700, 1
    FROM generate_series(1, {N_ROLLOUTS}) i;
    INSERT INTO rollouts (rollout_id, status, input, config, metadata, start_time)
    SELECT 'new-' || i, 'queuing', '1', '', '', {N_ROLLOUTS} + i FROM generate_series(1, {N_ROLLOUTS // 10}) i;
    INSERT INTO attempts (rollout, sequence_id, attempt_id, status, start_time, end_time)
    SELECT seq, 1, 'at', CASE WHEN status = 'failed' THEN 'failed' ELSE 'succeeded' END, start_time, end_time
    FROM rollouts WHERE attempts = 1
"""
SMALL = """
    INSERT INTO rollouts (rollout_id, status, input, config, metadata, start_time, end_time, bytes, attempts)
    SELECT 'r' || i, (ARRAY['succeeded', 'failed', 'cancelled', 'queuing'])[1 + i % 4], '1', '', '', i,
           CASE WHEN i % 4 < 3 THEN i + 1 END, CASE WHEN i % 4 < 3 THEN 700 ELSE 0 END, CASE WHEN i % 4 < 2 THEN 1 ELSE 0 END
    FROM generate_series(1, 18) i;
    DELETE FROM rollouts WHERE rollout_id = 'r2';
    INSERT INTO attempts (rollout, sequence_id, attempt_id, status, start_time, end_time, last_span)
    SELECT seq, 1, 'at', status, start_time, end_time, 2 FROM rollouts WHERE attempts = 1;
    INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, kind, status_code, attributes, events, resource)
    SELECT rollout, 1, n, 's' || n, 't', 'n', 'INTERNAL', 'UNSET', '', '', '' FROM attempts, generate_series(1, 2) n;
    INSERT INTO resources (resources_id, version, create_time, update_time, resources)
    VALUES ('x', 1, 1, 1, '{}'), ('x', 2, 1, 1, '{}')
"""
AT_SCHEMA_3 = "UPDATE leyden_schema SET version = 3"
IN_RUNS = """
    INSERT INTO runs (run_id, name, kind, status, start_time, last_heartbeat_time, config)
    VALUES ('long', 'long', 'fit', 'running', 1, 1, ''), ('short', 'short', 'fit', 'running', 1, 1, '');
    UPDATE rollouts SET run = (SELECT key FROM runs WHERE run_id = CASE WHEN seq % 500 = 0 THEN 'short' ELSE 'long' END),
           group_id = CASE WHEN seq % 5000 = 1 THEN 'g' ELSE 'g' || seq / 8 END,
           replay_from = CASE WHEN seq % 5000 = 2 THEN 'r' ELSE 'r' || seq / 8 END
"""
MOST_PAGES = 1_500
"""A hundred rollouts with their attempts are 700; the table of rollouts alone has more with its index, and all of them 60,000 looks."""
PAGES: dict[str, dict[str, Any]] = {
    "the newest": {"sort_by": "start_time"},
    "the last to end": {"sort_by": "end_time"},
    "as they arrived": {},
    "of one status": {"status_in": ["failed"]},
    "of one status by start": {"status_in": ["failed"], "sort_by": "start_time"},
    "of two statuses by end": {"status_in": ["failed", "succeeded"], "sort_by": "end_time"},
    "what waits": {"status_in": ["queuing", "requeuing"]},
    "what runs": {"status_in": ["preparing", "running"]},
    "of one run": {"run_id": "long"},
    "of one short run and one status": {"run_id": "short", "status_in": ["queuing"]},
    "of one group": {"group_id": "g"},
    "of one group of a run": {"run_id": "long", "group_id": "g"},
    "forks of one rollout": {"replay_from": "r"},
    "forks of one rollout in a run": {"run_id": "long", "replay_from": "r"},
}


def write_schema_2(url: str, rows: str) -> None:
    """The tables as they were before `totals`."""
    schema = url.partition("&schema=")[2]
    with psycopg.connect(url.partition("&schema=")[0], autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}; SET search_path TO {schema}")
        for name in ("0001_initial.sql", "0002_samples.sql"):
            connection.execute(SCRIPTS.joinpath(name).read_text(encoding="utf-8"))
        connection.execute(
            "CREATE TABLE leyden_schema (version INTEGER NOT NULL); INSERT INTO leyden_schema VALUES (2)"
        )
        connection.execute(rows)


async def test_an_older_schema_is_counted_once_when_it_is_opened(postgres_url: str) -> None:
    write_schema_2(postgres_url, SMALL)
    async with PostgresLightningStore(postgres_url) as store:
        assert await audit_store(store) == []
        assert (await store.statistics())["total_resources"] == 1
        while await store.prune(Retention(max_rollouts=3)):
            assert await audit_store(store) == []


async def test_a_schema_of_before_gets_runs_and_goes_on_with_its_rollouts(postgres_url: str) -> None:
    source = ReplayFrom(rollout_id="original", attempt_id="at", n_calls=2).as_metadata()
    a_fork = f"; UPDATE rollouts SET metadata = '{json.dumps({'a': 1} | source)}' WHERE rollout_id = 'r3';"
    write_schema_2(
        postgres_url,
        SMALL + a_fork + SCRIPTS.joinpath("0003_totals.sql").read_text(encoding="utf-8") + AT_SCHEMA_3,
    )
    async with PostgresLightningStore(postgres_url) as store:
        before = await store.query_rollouts()
        assert len(before) == 17
        assert [each.rollout_id for each in await store.query_rollouts(replay_from="original")] == ["r3"]
        assert {(rollout.run_id, rollout.group_id) for rollout in before} == {(None, None)}
        await store.start_run(RunRecord(run_id="run", name="run", kind="fit", start_time=1.0))
        await store.enqueue_rollout("task", rollout_id="new", run_id="run", group_id="g")
        claimed = await store.dequeue_many_rollouts(limit=100)
        assert [rollout.run_id for rollout in claimed] == [None] * (len(claimed) - 1) + ["run"]
        assert [rollout.rollout_id for rollout in await store.query_rollouts(run_id="run", group_id="g")] == ["new"]
        assert await audit_store(store) == []


async def test_two_stores_write_one_run_at_once(postgres_url: str) -> None:
    run = RunRecord(run_id="run", name="run", kind="fit", start_time=1.0)
    points = [MetricPoint(stage="train", iteration=i, name=f"m{i % 3}", value=1.0, time=1.0) for i in range(100)]
    async with PostgresLightningStore(postgres_url) as a, PostgresLightningStore(postgres_url) as b:

        async def write(store: PostgresLightningStore, turn: int) -> None:
            await store.start_run(run)
            await store.add_metrics("run", points[::-1] if turn % 2 else points)
            await store.update_run("run", config={"turn": turn})
            await store.enqueue_rollout(turn, run_id="run", group_id="g")

        await asyncio.gather(*(write(store, turn) for turn, store in enumerate((a, b) * 4)))
        assert len(await a.query_metrics("run")) == 100
        assert len(await b.query_rollouts(run_id="run")) == 8
        assert len(await b.query_runs()) == 1
        assert await audit_store(a) == []


async def test_stores_that_finish_rollouts_at_once_keep_the_counts_true(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as a, PostgresLightningStore(postgres_url) as b:

        async def work(store: PostgresLightningStore) -> None:
            for rollout in await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(20)]):
                await store.update_rollout(rollout.rollout_id, status="cancelled")

        async def forget() -> None:
            for _ in range(10):
                await a.prune(Retention(max_rollouts=10), limit=5)

        await asyncio.gather(*(work(store) for store in (a, b, a, b, a, b)), forget())
        assert await audit_store(a) == []


async def test_no_page_of_rollouts_and_no_count_reads_a_long_history(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_schema_2(postgres_url, FILL)
    pages: list[int] = []

    def execute(self: PostgresTransaction, statement: str, parameters: dict[str, Any]) -> Any:
        told = self._cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters).fetchone()
        plan = told[0][0]["Plan"]
        pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return self._cursor.execute(statement, parameters)

    def page(self: PostgresTransaction, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        return execute(self, self._queries[query] + placeholders(suffix), parameters).fetchall()

    def every(self: PostgresTransaction, query: str, /, **parameters: Any) -> list[Row]:
        return execute(self, self._queries[query], parameters).fetchall()

    async with PostgresLightningStore(postgres_url) as store:
        with raw(postgres_url) as connection:
            connection.execute(IN_RUNS)
        for analyzed in (False, True):
            if analyzed:
                with raw(postgres_url) as connection:
                    connection.execute("ANALYZE")
            with monkeypatch.context() as patched:
                patched.setattr(PostgresTransaction, "page", page)
                patched.setattr(PostgresTransaction, "all", every)
                for what, asked in PAGES.items():
                    for sort_order in ("asc", "desc"):
                        pages.clear()
                        found = await store.query_rollouts(**asked, sort_order=sort_order, limit=100)  # type: ignore[arg-type]
                        assert found.exact == (asked != {"run_id": "long"})  # of which 10,000 are counted
                        assert sum(pages) < MOST_PAGES, f"{what} {sort_order}, analyzed {analyzed}: {pages}"
                pages.clear()
                counted = await store.statistics()
                assert sum(pages) < 100, pages
                assert counted["total_rollouts"] == N_ROLLOUTS * 11 // 10
