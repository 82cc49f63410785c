"""The audit finds nothing in a sound store, and each fault in one that was damaged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from leyden.store import SqliteLightningStore
from leyden.testing import audit_store
from leyden.types import RolloutConfig, RunRecord, Span

DAMAGE = {
    "UPDATE rollouts SET end_time = NULL WHERE status = 'succeeded'": "it is 'succeeded' and its end_time is None",
    "UPDATE rollouts SET end_time = 1 WHERE status = 'succeeded'": "before its start",
    "UPDATE rollouts SET status = 'queuing' WHERE rollout_id = 'busy'": "it is 'queuing' and has an attempt",
    "UPDATE rollouts SET status = 'requeuing' WHERE rollout_id = 'waiting'": "was never tried",
    "UPDATE rollouts SET status = 'running' WHERE rollout_id = 'waiting'": "no attempt is open",
    "UPDATE rollouts SET status = 'running', end_time = NULL WHERE rollout_id = 'done'": "its latest attempt succeeded",
    "UPDATE rollouts SET attempts = 1 WHERE rollout_id = 'busy'": "but its latest attempt is",
    "UPDATE attempts SET end_time = NULL WHERE status = 'succeeded'": "it is 'succeeded' and its end_time is None",
    "UPDATE attempts SET end_time = 1 WHERE status = 'succeeded'": "before its start",
    "UPDATE attempts SET attempt_id = 'a' WHERE rollout = 2": "the same id",
    "UPDATE attempts SET status = 'preparing' WHERE status = 'running'": "it has spans and is 'preparing'",
    "UPDATE spans SET sequence_id = 0": "without a number",
    "UPDATE workers SET status = 'idle'": "it is 'idle' with",
    "UPDATE workers SET current_attempt_id = 'gone'": "not its own, or has ended",
    "DELETE FROM attempts WHERE status = 'failed'": "its sequence_id is 2",
    "UPDATE runs SET status = 'failed'": "it is 'failed' and its end_time is None",
    "UPDATE runs SET end_time = 2, status = 'stopped'": "before its start",
    "UPDATE totals SET succeeded = succeeded + 1": "the statistics count rollouts as",
    "UPDATE totals SET forgotten = 1": "the statistics count 2 rollouts, but there are 3",
    "UPDATE totals SET spans = 7": "the statistics count 8 spans, but there are 1",
    "UPDATE attempts SET spans = spans + 1 WHERE status = 'running'": "the statistics count 2 spans, but there are 1",
}


async def sound(path: Path) -> None:
    """A store with a run, a rollout that is done, one that is tried a second time, and one that waits."""
    async with SqliteLightningStore(path) as store:
        await store.start_run(RunRecord(run_id="run", name="run", kind="fit", start_time=3.0))
        done = await store.start_rollout(1, rollout_id="done")
        await store.update_attempt("done", done.attempt.attempt_id, status="succeeded")
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        first = await store.start_rollout(2, rollout_id="busy", config=config)
        await store.update_attempt("busy", first.attempt.attempt_id, status="failed")
        second = await store.dequeue_rollout("w")
        assert second is not None
        ids = {"rollout_id": "busy", "attempt_id": second.attempt.attempt_id}
        await store.add_span(Span(**ids, sequence_id=0, trace_id="t", span_id="s", name="n"))
        await store.enqueue_rollout(3, rollout_id="waiting")
        assert await audit_store(store) == []


@pytest.mark.parametrize("damage", DAMAGE)
async def test_an_audit_sees_what_is_wrong(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.db"
    await sound(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(damage).rowcount > 0
    async with SqliteLightningStore(path) as store:
        faults = await audit_store(store)
    assert any(DAMAGE[damage] in fault for fault in faults), faults
