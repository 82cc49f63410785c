"""A PostgreSQL schema of before the newest migrations: rollouts get the outcomes that their spans tell."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from leyden.store import PostgresLightningStore
from leyden.testing import audit_store
from leyden.types import PromptTemplate
from tests.backends.test_postgres import raw
from tests.contracts.store.outcomes import call_span, finished, reward_span
from tests.contracts.store.support import claimed, ids, span_of

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(120)]

TABLES = {"rollouts": "seq", "attempts": None, "spans": "key", "resources": "key", "runs": "key", "totals": None}
"""The tables that the tests here write, with the columns of which PostgreSQL draws the numbers."""
BEFORE_OUTCOMES, BEFORE_VERSIONS = 5, 6


def downgrade(url: str, version: int) -> None:
    """Make the schema one of an older version, with the rows that its tables can hold."""
    schema = url.partition("&schema=")[2]
    scripts = sorted(files("leyden.store.sql").joinpath("migrations", "postgres").iterdir(), key=lambda each: each.name)
    with raw(url) as connection:
        connection.execute(f"ALTER SCHEMA {schema} RENAME TO {schema}_new; CREATE SCHEMA {schema}")
        for script in scripts[:version]:
            connection.execute(script.read_text(encoding="utf-8"))
        connection.execute("DELETE FROM totals")
        for table, drawn in TABLES.items():
            columns = connection.execute(f"SELECT * FROM {table} LIMIT 0").description
            assert columns is not None
            names = ", ".join(column.name for column in columns)
            connection.execute(
                f"INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE SELECT {names} FROM {schema}_new.{table}"
            )
            if drawn is not None:
                last = f"SELECT coalesce(max({drawn}), 0) + 1 FROM {table}"
                connection.execute(f"SELECT setval(pg_get_serial_sequence('{table}', '{drawn}'), ({last}), false)")
        connection.execute("CREATE TABLE leyden_schema (version INTEGER NOT NULL)")
        connection.execute(f"INSERT INTO leyden_schema VALUES ({version}); DROP SCHEMA {schema}_new CASCADE")


@pytest.mark.parametrize("version", [BEFORE_OUTCOMES, BEFORE_VERSIONS])
async def test_a_schema_of_before_gets_its_outcomes_from_its_spans(postgres_url: str, version: int) -> None:
    async with PostgresLightningStore(postgres_url) as store:
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
    downgrade(postgres_url, version)
    async with PostgresLightningStore(postgres_url) as store:
        assert [rollout.model_dump() for rollout in await store.query_rollouts()] == before
        assert await store.summarise_rollouts(measures=["reward", "tokens"]) == summary
        assert [update.author for update in await store.query_resources(all_versions=True)] == [None, None]
        await store.set_label("live", "rs", 1)
        assert (await store.get_labelled_resources("live")).version == 1
        await finished(store, reward=1.0)
        assert await audit_store(store) == []
    assert [rollout["attempt"]["reward"] for rollout in before] == [0.75, None, None]
    assert [rollout["attempt"]["prompt_tokens"] for rollout in before] == [15, 0, 0]
    assert [rollout["attempt"]["failure"] for rollout in before] == [None, "agent", None]
    assert [rollout["resources_version"] for rollout in before] == [1, 2, 2]
