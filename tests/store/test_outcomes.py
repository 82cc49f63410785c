"""What rollouts came to, in SQL: which index a summary reads, what an older file becomes, rewards in any order."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.store import InMemoryLightningStore, SqliteLightningStore
from leyden.store.sql.queries import migrations
from leyden.store.sql.sqlite import connect, statements
from leyden.types import PromptTemplate, RunRecord, find_final_reward, semconv
from tests.contracts.store.outcomes import call_span, finished, reward_span
from tests.contracts.store.support import claimed, ids, span_of
from tests.store.test_sql import explained as explained


@pytest.mark.parametrize(
    ("asked", "index"),
    [
        ({}, "SCAN r USING COVERING INDEX rollouts_outcomes"),
        ({"run_id": "a"}, "SEARCH r USING COVERING INDEX rollouts_outcomes (run=?)"),
        ({"arm_in": ["canary"], "mode_in": ["val"]}, "SCAN r USING COVERING INDEX rollouts_outcomes"),
        ({"between": {"reward": (0, 1)}, "resources_id": "x"}, "SCAN r USING COVERING INDEX rollouts_outcomes"),
    ],
)
async def test_a_summary_reads_one_index_and_sorts_nothing(
    asked: dict[str, Any], index: str, explained: list[str]
) -> None:
    async with InMemoryLightningStore() as store:
        await store.start_run(RunRecord(run_id="a", name="a", kind="fit", start_time=1.0))
        for reward in (0.0, 1.0):
            await finished(store, reward=reward, run_id="a", arm="canary", mode="val")
        explained.clear()
        await store.summarise_rollouts(**asked)
    assert set(explained) == {index}  # the counts and, where values match, the histogram


@pytest.mark.parametrize(
    ("asked", "index"),
    [
        ({"sort_by": "reward"}, "SCAN r USING COVERING INDEX rollouts_outcomes"),
        ({"failure_in": ["agent"]}, "SCAN r USING COVERING INDEX rollouts_outcomes"),
        ({"run_id": "a", "sort_by": "cost"}, "SEARCH r USING COVERING INDEX rollouts_outcomes (run=?)"),
        ({"arm_in": ["canary"]}, "rollouts_of_arm (arm=?)"),
    ],
)
async def test_a_page_by_outcome_reads_its_index(asked: dict[str, Any], index: str, explained: list[str]) -> None:
    async with InMemoryLightningStore() as store:
        await store.start_run(RunRecord(run_id="a", name="a", kind="fit", start_time=1.0))
        await finished(store, reward=1.0, run_id="a", arm="canary")
        explained.clear()
        await store.query_rollouts(**asked, limit=1)
    assert index in explained[0]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([None, 0.0, 0.5, -1.0, float("nan")]), st.booleans()), max_size=8
    )
)
async def test_the_kept_reward_is_what_find_final_reward_finds(said: list[tuple[int, float | None, bool]]) -> None:
    """Spans arrive with any numbers, alone or together, with rewards that are numbers or not."""
    async with InMemoryLightningStore() as store:
        rollout = await claimed(store)
        together = []
        for number, (sequence_id, reward, alone) in enumerate(said, start=1):
            span = span_of(rollout, f"{number:016x}", sequence_id=sequence_id)
            if reward is not None:
                value = "no number" if reward != reward else reward
                span.attributes = {f"{semconv.REWARD_PREFIX}.0.value": value, f"{semconv.REWARD_PREFIX}.0.name": "a"}
            together.append(span)
            if alone:
                await store.add_many_spans(together)
                together = []
        await store.add_many_spans(together)
        spans = await store.query_spans(rollout.rollout_id, "latest")
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        assert attempt.reward == find_final_reward(spans.items)
        assert list(attempt.rewards.values()) == ([] if attempt.reward is None else [attempt.reward])


def downgraded(path: Path, schema: int) -> None:
    """Make the file one of an older schema: only what the tests here write is kept."""
    with closing(connect(str(path), {})) as new, closing(sqlite3.connect(":memory:", isolation_level=None)) as old:
        for script in migrations("sqlite")[:schema]:
            for statement in statements(script):
                old.execute(statement)
        for table in ("rollouts", "attempts", "spans", "resources", "runs", "totals"):
            columns = ", ".join(row[1] for row in old.execute(f"PRAGMA table_info({table})"))
            old.execute(f"DELETE FROM {table}")
            rows = new.execute(f"SELECT {columns} FROM {table}").fetchall()
            old.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * (columns.count(',') + 1))})", rows)
        old.execute(f"PRAGMA user_version = {schema}")
        old.execute(f"PRAGMA application_id = {new.execute('PRAGMA application_id').fetchone()[0]}")
        path.unlink()
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        old.execute(f"VACUUM INTO '{path}'")


async def test_a_file_of_the_schema_before_gets_its_outcomes_from_its_spans(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with SqliteLightningStore(path) as store:
        await store.add_resources({}, resources_id="rs")
        rollout = await claimed(store)
        await store.update_resources("rs", {"prompt": PromptTemplate(template="2")})
        await store.add_many_spans([call_span(rollout, 1, 10, 2), call_span(rollout, 2, 5, 1)])
        await store.add_span(reward_span(rollout, 4, sequence_id=20, score=0.75))
        await store.add_span(reward_span(rollout, 3, sequence_id=10, score=0.25))
        misleading = {"text": json.dumps({"leyden.reward.0.value": 9.0})}
        await store.add_span(span_of(rollout, "00000000000000fe", attributes=misleading))
        await store.update_attempt(**ids(rollout), status="succeeded")
        await finished(store, status="failed", metadata={"reason_kind": "agent"})
        await claimed(store)
        before = [rollout.model_dump() for rollout in await store.query_rollouts()]
        summary = await store.summarise_rollouts(measures=["reward", "tokens"])
    downgraded(path, 4)
    async with SqliteLightningStore(path) as store:
        assert [rollout.model_dump() for rollout in await store.query_rollouts()] == before
        assert await store.summarise_rollouts(measures=["reward", "tokens"]) == summary
    assert [rollout["attempt"]["reward"] for rollout in before] == [0.75, None, None]
    assert [rollout["resources_version"] for rollout in before] == [1, 2, 2]
