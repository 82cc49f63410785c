"""Searching and streaming spans of a store with history: what is left by a crash, by retention, by a large store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from leyden.store.sql.body import span_index
from leyden.types import AttemptedRollout, Span


def spans_of(rollout: AttemptedRollout, n_spans: int, **attributes: Any) -> list[Span]:
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return [
        Span(**ids, sequence_id=0, trace_id="f" * 32, span_id=f"{i:016x}", name=f"s{i}", attributes=attributes)
        for i in range(n_spans)
    ]


async def test_an_index_that_was_interrupted_is_not_trusted_and_goes_on_later(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        rollout = await store.start_rollout(1)
        await store.add_many_spans(spans_of(rollout, 3 * span_index._STEP, model="m"))
        await store._driver.write(span_index.begin_attribute_index, ("model",), {})
        assert not await store._driver.write(span_index.extend_attribute_index, ("model",), {})
    async with SqliteLightningStore(path) as store:
        with pytest.raises(ConfigError, match="being made"):
            await store.query_spans(attributes={"model": "m"})
        other = await store.start_rollout(2)
        await store.add_many_spans(spans_of(other, 5, model="m"))
        await store.index_span_attribute("model")
        found = await store.query_spans(attributes={"model": "m"}, limit=1)
        assert found.total == 3 * span_index._STEP + 5


async def test_what_finds_a_span_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        await store.index_span_attribute("a")
        for number in range(2):
            await store.add_many_spans(spans_of(await store.start_rollout(number), 4, a="x"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM spans WHERE rollout = 1")
        assert connection.execute("SELECT count(*), min(span) FROM attribute_values").fetchone() == (4, 5)


async def test_a_stream_of_some_rollouts_finds_them_far_behind_the_spans_of_others() -> None:
    async with InMemoryLightningStore() as store:
        watched = [await store.start_rollout(number) for number in range(3)]
        other = await store.start_rollout("other")
        expected: list[tuple[str, str]] = []
        for start in (0, 2000):
            for rollout in watched:
                new = [
                    span.model_copy(update={"span_id": f"{start:04}{span.span_id[4:]}"})
                    for span in spans_of(rollout, 7)
                ]
                await store.add_many_spans(new)
                expected += [(span.rollout_id, span.span_id) for span in new]
            many = spans_of(other, 4000)[start : start + 2000]
            await store.add_many_spans(many)
        assert await streamed(store, [rollout.rollout_id for rollout in watched], limit=5) == expected
        assert len(await streamed(store, None, limit=1000)) == len(expected) + 4000


async def streamed(store: LightningStore, rollout_ids: list[str] | None, limit: int) -> list[tuple[str, str]]:
    answered: list[tuple[str, str]] = []
    after = None
    while (page := await store.poll_new_spans(after=after, rollout_ids=rollout_ids, limit=limit)).spans:
        answered += [(span.rollout_id, span.span_id) for span in page.spans]
        after = page.after
    return answered


async def test_a_cursor_is_good_after_the_store_was_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        rollout = await store.start_rollout(1)
        await store.add_many_spans(spans_of(rollout, 10))
        page = await store.poll_new_spans(limit=4)
        latest = await store.poll_new_spans(after="latest")
    async with SqliteLightningStore(path) as store:
        rest = await store.poll_new_spans(after=page.after)
        assert [span.name for span in [*page.spans, *rest.spans]] == [f"s{i}" for i in range(10)]
        assert rest.after == latest.after
        (added,) = await store.add_many_spans([spans_of(rollout, 11)[-1]])
        assert (await store.poll_new_spans(after=latest.after)).spans == [added]
