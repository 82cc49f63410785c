"""Spans on PostgreSQL: several stores that write to one attempt, and how much of a long history is read, with statistics and without."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leyden.store import PostgresLightningStore
from leyden.store.sql.postgres import placeholders
from leyden.store.sql.postgres_transaction import PostgresTransaction
from leyden.store.sql.transaction import Row
from leyden.types import Span, TokenRecord, semconv
from tests.backends.test_postgres import raw

pytestmark = [pytest.mark.backends, pytest.mark.merge]


async def test_stores_that_write_to_one_attempt_share_its_tokens_and_its_index(postgres_url: str) -> None:
    """Each store adds a conversation of its own and takes turns in a common one, while a third makes the spans searchable."""
    async with PostgresLightningStore(postgres_url) as a, PostgresLightningStore(postgres_url) as b:
        rollout = await a.start_rollout(1)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        added: list[Span] = []

        async def converse(store: PostgresLightningStore, first: int, n_turns: int) -> None:
            context = [first] * 20
            for number in range(n_turns):
                common = [7] * 30 + [number] * 20
                for prompt, n_known in ((context, len(context) - 20), (common, 30)):
                    name = f"{first}.{number}.{prompt is common}"
                    before = f"{first}.{number - 1}.{prompt is common}"
                    tokens = TokenRecord(prompt_ids=prompt, response_ids=[first, number])
                    attributes = {"a": 1, semconv.GOES_ON_FROM: before, semconv.KNOWN_PREFIX: n_known}
                    fields: dict[str, Any] = {"name": name, "span_id": name, "tokens": tokens, "attributes": attributes}
                    added.extend(await store.add_many_spans([Span(**ids, sequence_id=0, trace_id="t", **fields)]))
                context = [*context, first, number, *[number] * 20]

        await asyncio.gather(
            converse(a, 1, 15), converse(b, 2, 15), a.index_span_attribute("a"), b.index_span_attribute("a")
        )
        assert len(added) == 60
        expected = {span.span_id: span for span in added}
        for store in (a, b):
            assert {span.span_id: span for span in await store.query_spans(rollout.rollout_id)} == expected
            assert {span.span_id: span for span in await store.query_spans(attributes={"a": 1})} == expected
    with raw(postgres_url) as connection:
        (n_shared,) = connection.execute("SELECT count(*) FROM spans WHERE tokens_base IS NOT NULL").fetchone() or (0,)
    assert n_shared == 56  # all but the first of each conversation


N_SPANS = 100_000
FILL = f"""
    INSERT INTO rollouts (rollout_id, status, input, config, metadata, start_time, end_time, attempts)
    SELECT 'old-' || i, 'succeeded', '1', '', '', i, i + 1, 1 FROM generate_series(1, {N_SPANS // 10}) i;
    INSERT INTO attempts (rollout, sequence_id, attempt_id, status, start_time, end_time)
    SELECT seq, 1, 'at', 'succeeded', seq, seq + 1 FROM rollouts WHERE rollout_id LIKE 'old-%';
    INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, kind, status_code, start_time, attributes, events, resource)
    SELECT 1 + i / 10, 1, 1 + i % 10, i, 't', (ARRAY['chat', 'tool', 'agent'])[1 + i % 3], 'CLIENT', 'OK', i,
           '{{"x": "' || repeat('x', 300) || '"}}', '', ''
    FROM generate_series(0, {N_SPANS - 1}) i;
    INSERT INTO attribute_values (attribute, value, span) SELECT 1, decode(md5((key % 1000)::text), 'hex'), key FROM spans
"""
MOST_PAGES = 400
"""Twenty spans with their attempts and rollouts are 180; the table of spans alone has 6,000."""
SEARCHES: dict[str, dict[str, Any]] = {
    "a rare name": {"name": "rare", "limit": 3},
    "a rare name, all of it": {"name": "rare"},
    "a time": {"started_from": 500.0, "started_before": 520.0},
    "a time, the last ones": {"started_from": N_SPANS - 10.0, "limit": 5, "sort_order": "desc"},
    "a name and a time": {"name": "tool", "started_from": 500.0, "started_before": 550.0, "limit": 10},
    "an attribute": {"attributes": {"a": "x"}, "limit": 10},
    "an attribute, a name and a time": {"attributes": {"a": "x"}, "name": "tool", "started_from": 500.0},
    "the first ones": {"limit": 5, "sort_by": None},
}


@pytest.mark.parametrize("analyzed", [False, True])
async def test_no_search_and_no_stream_reads_a_long_history(
    postgres_url: str, analyzed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[tuple[str, int]] = []

    def execute(self: PostgresTransaction, statement: str, parameters: dict[str, Any]) -> Any:
        told = self._cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters).fetchone()
        plan = told[0][0]["Plan"]
        if statement != self._queries["count_spans_of"]:  # how many there are in all is a count of all
            pages.append((statement, plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]))
        return self._cursor.execute(statement, parameters)

    def page(self: PostgresTransaction, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        return execute(self, self._queries[query] + placeholders(suffix), parameters).fetchall()

    def every(self: PostgresTransaction, query: str, /, **parameters: Any) -> list[Row]:
        return execute(self, self._queries[query], parameters).fetchall()

    async with PostgresLightningStore(postgres_url) as store:
        await store.index_span_attribute("a")
        with raw(postgres_url) as connection:
            connection.execute(FILL)
            if analyzed:
                connection.execute("ANALYZE")
        rollout = await store.start_rollout(1)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        for number in range(5):
            span = Span(**ids, sequence_id=0, trace_id="t", span_id=f"{number}", name="rare", attributes={"a": "x"})
            await store.add_span(span)
        monkeypatch.setattr(PostgresTransaction, "page", page)
        monkeypatch.setattr(PostgresTransaction, "all", every)
        for what, asked in SEARCHES.items():
            pages.clear()
            await store.query_spans(**asked)
            assert pages
            assert all(n_pages < MOST_PAGES for _, n_pages in pages), f"{what}: {pages}"
        for count in (1, 10, 400):
            pages.clear()
            found = await store.query_spans_of([f"old-{20 * number + 1}" for number in range(count)])
            assert sum(map(len, found.values())) == 10 * count
            assert sum(n_pages for _, n_pages in pages) < 12 * count, pages
        for polled in ({"limit": 10}, {"rollout_ids": ["old-7"]}, {"rollout_ids": ["old-9000"], "limit": 3}):
            pages.clear()
            await store.poll_new_spans(after=None, **polled)
            assert pages
            assert all(n_pages < MOST_PAGES for _, n_pages in pages), f"{polled}: {pages}"
