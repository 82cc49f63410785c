"""The counts that a store keeps: of a file that an older Leyden wrote, and of a page that is not counted to its end."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.resources import files
from pathlib import Path

import pytest

from leyden.store import InMemoryLightningStore, SqliteLightningStore
from leyden.store.sql import pages
from leyden.store.sql.sqlite import statements
from leyden.testing import audit_store
from leyden.types import EnqueueRolloutRequest, Retention, Sample, Span

SCRIPTS = files("leyden.store.sql").joinpath("migrations", "sqlite")
FINAL = ("succeeded", "failed", "cancelled")


def write_schema_2(path: Path, rollouts: int) -> None:
    """A file as it was before `totals`: rollouts of each status in turn, of which the second was forgotten."""
    with closing(sqlite3.connect(path)) as database:
        for name in ("0001_initial.sql", "0002_samples.sql"):
            for statement in statements(SCRIPTS.joinpath(name).read_text(encoding="utf-8")):
                database.execute(statement)
        for seq in range(1, rollouts + 1):
            status = (*FINAL, "queuing", "requeuing", "running")[seq % 6]
            ended = 200.0 + seq if status in FINAL else None
            attempts = 0 if status == "queuing" else 1 + seq % 2
            rollout = (seq, f"r{seq}", status, 100.0 - seq, ended, 700 if ended else 0, attempts)
            database.execute(
                "INSERT INTO rollouts (seq, rollout_id, status, input, config, metadata, start_time, end_time, bytes, attempts)"
                " VALUES (?, ?, ?, '1', '', '', ?, ?, ?, ?)",
                rollout,
            )
            for number in range(1, attempts + 1):
                over = number < attempts or status not in ("running", "succeeded")
                told = ("failed", 201.0 + seq) if over else ("running", None)
                if status == "succeeded" and number == attempts:
                    told = ("succeeded", 201.0 + seq)
                database.execute(
                    "INSERT INTO attempts (rollout, sequence_id, attempt_id, status, start_time, end_time, last_span)"
                    " VALUES (?, ?, ?, ?, 50.0, ?, 2)",
                    (seq, number, f"a{number}", *told),
                )
                for span in range(1, 3):
                    database.execute(
                        "INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, kind, status_code, attributes,"
                        " events, resource) VALUES (?, ?, ?, ?, 't', 'n', 'INTERNAL', 'UNSET', '', '', '')",
                        (seq, number, span, f"s{span}"),
                    )
        database.execute("INSERT INTO resources VALUES (1, 'x', 1, 1.0, 1.0, '{}'), (2, 'x', 2, 1.0, 1.0, '{}')")
        for table, column in (("rollouts", "seq"), ("attempts", "rollout"), ("spans", "rollout")):
            database.execute(f"DELETE FROM {table} WHERE {column} = 2")
        database.execute("PRAGMA user_version = 2")
        database.execute(f"PRAGMA application_id = {0x4C595244}")
        database.commit()


@pytest.mark.parametrize("rollouts", [0, 14])
async def test_an_older_file_is_counted_once_when_it_is_opened(tmp_path: Path, rollouts: int) -> None:
    write_schema_2(tmp_path / "x.db", rollouts)
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        assert await audit_store(store) == []
        statistics = await store.statistics()
        assert statistics["total_rollouts"] == max(0, rollouts - 1)
        assert statistics["total_resources"] == 1
        newest = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=3)
        assert [rollout.rollout_id for rollout in newest] == (["r1", "r3", "r4"] if rollouts else [])
        while await store.prune(Retention(max_rollouts=1)):
            assert await audit_store(store) == []
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        assert await audit_store(store) == []


async def test_a_page_counts_what_is_close_behind_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "COUNTED", 10)
    async with InMemoryLightningStore() as store:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i, mode="train") for i in range(20)])
        page = await store.query_rollouts(mode_in=["train"], limit=5)
        assert (page.total, page.exact) == (15, False)
        page = await store.query_rollouts(mode_in=["train"], limit=5, offset=10)
        assert (page.total, page.exact) == (20, True)
        page = await store.query_rollouts(mode_in=["train"], limit=15, offset=10)
        assert (page.total, page.exact) == (20, True)
        page = await store.query_rollouts(mode_in=["train"], limit=5, offset=30)
        assert (page.total, page.exact) == (20, True)
        assert ((await store.query_rollouts(mode_in=["train"])).total) == 20
        for asked in ({}, {"status_in": ["queuing"]}):
            page = await store.query_rollouts(**asked, limit=5)
            assert (page.total, page.exact) == (20, True)

        rollout = await store.start_rollout(1)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id, "trace_id": "t"}
        await store.add_many_spans([Span(**ids, sequence_id=0, span_id=f"s{i}", name="x") for i in range(20)])
        assert ((await store.query_spans(limit=5)).total) == 20
        page = await store.query_spans(name="x", limit=5)
        assert (page.total, page.exact) == (15, False)
        assert ((await store.query_spans(rollout.rollout_id, limit=5)).total) == 20

        await store.add_many_samples([Sample(name="x", time=rollout.start_time + i, value=1.0) for i in range(20)])
        page = await store.query_samples(limit=5)
        assert (page.total, page.exact) == (15, False)
