"""How many messages an operation is on PostgreSQL, and that what is guessed to save one is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from leyden.store import PostgresLightningStore
from leyden.store.sql.postgres_pipeline import Pipeline
from leyden.types import EnqueueRolloutRequest, Span, UpdateAttemptRequest
from tests.backends.test_postgres import raw, span_of

pytestmark = [pytest.mark.backends, pytest.mark.merge, pytest.mark.timeout(120)]

T = TypeVar("T")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each batch of statements that was sent since it was cleared."""
    sent: list[None] = []
    end = Pipeline._end_batch

    def count(self: Pipeline) -> None:
        sent.append(None)
        end(self)

    monkeypatch.setattr(Pipeline, "_end_batch", count)
    return sent


async def test_an_operation_is_as_few_messages_as_what_it_reads_allows(postgres_url: str, batches: list[None]) -> None:
    async def messages(call: Awaitable[T]) -> tuple[T, int]:
        batches.clear()
        return await call, len(batches)

    async with PostgresLightningStore(postgres_url) as store:
        await store.enqueue_rollout(0)  # and everything is connected
        await store.statistics()
        _, enqueue = await messages(store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(20)]))
        claimed, claim = await messages(store.dequeue_many_rollouts(limit=21, worker_id="w"))
        rollout = claimed[0]
        _, first = await messages(store.add_span(span_of(rollout, "1")))
        _, second = await messages(store.add_span(span_of(rollout, "2", attributes={"a": 1})))
        spans = [span_of(rollout, f"{k}") for rollout in claimed[1:] for k in range(3)]
        added, add_many = await messages(store.add_many_spans(spans))
        assert len(added) == 60
        updates = [
            UpdateAttemptRequest(rollout_id=one.rollout_id, attempt_id=one.attempt.attempt_id, status="succeeded")
            for one in claimed
        ]
        _, finish = await messages(store.update_many_attempts(updates))
        found, query = await messages(store.query_spans(rollout.rollout_id))
        assert [span.sequence_id for span in found] == [1, 2]
    assert (enqueue, claim, first, second, add_many, finish, query) == (1, 2, 1, 1, 3, 3, 2)


async def test_spans_that_two_stores_add_in_turns_are_numbered_as_they_arrive(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as one, PostgresLightningStore(postgres_url) as two:
        rollout = await one.start_rollout(1)
        for i in range(12):  # each store guesses, and is wrong as soon as the other one was there
            added = await (one if i % 3 else two).add_span(span_of(rollout, f"{i}"))
            assert added is not None
            assert added.sequence_id == i + 1
        await asyncio.gather(*(one.add_span(span_of(rollout, f"at once {k}")) for k in range(9)))
        spans = await two.query_spans(rollout.rollout_id)
        assert [span.sequence_id for span in spans] == list(range(1, 22))


async def test_what_others_change_between_two_spans_is_seen(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as one, PostgresLightningStore(postgres_url) as two:
        rollout = await one.start_rollout(1)
        await one.add_span(span_of(rollout, "1"))
        await two.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        added = await one.add_span(span_of(rollout, "late"))
        assert added is not None
        attempt = await one.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        assert attempt.status == "failed", "a late span brings no attempt back to life"
        assert (await one.get_rollout_by_id(rollout.rollout_id)).status == "failed"
        with raw(postgres_url) as connection:
            counted = connection.execute("SELECT sum(spans) FROM totals").fetchone()
        assert counted == (2,)


async def test_a_rollout_gets_the_latest_resources_that_another_store_wrote(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as one, PostgresLightningStore(postgres_url) as two:
        assert (await one.enqueue_rollout(0)).resources_id is None
        for i in range(3):  # each time the store guesses, and is wrong
            written = await two.add_resources({})
            rollout = await one.enqueue_rollout(i)
            assert rollout.resources_id == written.resources_id
            assert rollout == await two.get_rollout_by_id(rollout.rollout_id)
        changed = await two.update_resources(written.resources_id, {})
        rollouts = await one.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(3)])
        assert {rollout.resources_version for rollout in rollouts} == {changed.version}
        assert list(rollouts) == [await two.get_rollout_by_id(rollout.rollout_id) for rollout in rollouts]


async def test_a_repeated_span_is_added_once(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as store:
        rollout = await store.start_rollout(1)
        spans: list[Span] = [span_of(rollout, f"{k}") for k in range(3)]
        for span in spans:
            assert await store.add_span(span) is not None
            assert await store.add_span(span) is None
        assert await store.add_many_spans(spans) == []
        assert len(await store.query_spans(rollout.rollout_id)) == 3


async def test_an_index_that_begins_between_two_spans_finds_both(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as one, PostgresLightningStore(postgres_url) as two:
        rollout = await one.start_rollout(1)
        await one.add_span(span_of(rollout, "1", attributes={"colour": "red"}))
        await one.add_span(span_of(rollout, "2", attributes={"colour": "red"}))
        await two.index_span_attribute("colour")
        await one.add_span(span_of(rollout, "3", attributes={"colour": "red"}))
        found = await two.query_spans(attributes={"colour": "red"})
        assert [span.span_id for span in found] == ["1", "2", "3"]


async def test_an_index_that_begins_while_many_add_spans_misses_none(postgres_url: str) -> None:
    async with PostgresLightningStore(postgres_url) as one, PostgresLightningStore(postgres_url) as two:
        rollouts = [await one.start_rollout(i) for i in range(4)]

        async def add(store: PostgresLightningStore, k: int) -> None:
            for i in range(30):
                await store.add_span(span_of(rollouts[k], f"{k}-{i}", attributes={"colour": "red"}))

        async def begin() -> None:
            await asyncio.sleep(0.05)
            await two.index_span_attribute("colour")

        await asyncio.gather(begin(), *(add(store, k) for k, store in enumerate((one, two, one, two))))
        assert len(await one.query_spans(attributes={"colour": "red"})) == 120
