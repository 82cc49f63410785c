"""The store's contract for spans found by time, name and attribute, in one rollout or in all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leyden.errors import ConfigError, UnknownRollout
from leyden.store import LightningStore
from tests.contracts.store.support import claimed, span_of

__all__ = [
    "test_an_attribute_becomes_searchable_while_spans_arrive",
    "test_an_attribute_that_no_store_can_index_is_refused",
    "test_attributes_of_one_rollout_need_no_index",
    "test_spans_of_all_rollouts_are_found_by_attributes_that_were_named",
    "test_spans_of_all_rollouts_are_found_by_time_and_name",
    "test_values_are_equal_within_their_kind",
    "test_what_cannot_be_searched_is_refused",
]


async def found(store: LightningStore, *args: Any, **kwargs: Any) -> list[str]:
    return [span.name for span in await store.query_spans(*args, **kwargs)]


async def test_spans_of_all_rollouts_are_found_by_time_and_name(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    retried = await store.start_attempt(a.rollout_id)
    places = [a, b, retried, b, a]
    for number, rollout in enumerate(places):
        name, kind = ("tool" if number % 2 else f"chat {number}"), ("CLIENT" if number < 2 else "INTERNAL")
        await store.add_span(span_of(rollout, f"{number:016x}", name=name, kind=kind, start_time=10.0 - number))
    await store.add_span(span_of(b, "f" * 16, name="whenever"))

    everything = await store.query_spans()
    assert [span.name for span in everything] == ["chat 0", "tool", "chat 2", "tool", "chat 4", "whenever"]
    owners = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in [*places, b]]
    assert [(span.rollout_id, span.attempt_id) for span in everything] == owners
    assert await found(store, sort_order="desc", limit=2) == ["whenever", "chat 4"]
    assert await found(store, started_from=8.0) == ["chat 0", "tool", "chat 2"]
    assert await found(store, started_from=8.0, started_before=10.0) == ["tool", "chat 2"]
    assert await found(store, started_before=7.5, sort_by="start_time") == ["chat 4", "tool"]
    assert await found(store, name="tool") == ["tool", "tool"]
    assert await found(store, name="tool", started_before=8.0) == ["tool"]
    assert await found(store, name_contains="chat", kind="CLIENT") == ["chat 0"]
    assert await found(store, name="tool", kind="CLIENT", filter_logic="or") == ["chat 0", "tool", "tool"]
    assert await found(store, name="tool", kind="CLIENT", filter_logic="or", started_from=9.5) == ["chat 0"]
    assert await found(store, name="none") == []
    page = await store.query_spans(name="tool", limit=1, offset=1)
    assert ([span.span_id for span in page], page.total) == ([f"{3:016x}"], 2)
    assert await found(store, sort_by="start_time", sort_order="desc", limit=2, offset=1) == ["tool", "chat 2"]
    assert await found(store, b.rollout_id, started_before=8.0) == ["tool"]
    assert await found(store, a.rollout_id, kind="CLIENT") == ["chat 0"]


async def test_attributes_of_one_rollout_need_no_index(store: LightningStore) -> None:
    rollout, other = await claimed(store, 1), await claimed(store, 2)
    for number in range(6):
        attributes = {"step": number // 2, "tool": "grep"} if number % 2 else {"step": number // 2}
        await store.add_span(span_of(rollout, f"{number:016x}", name=f"s{number}", attributes=attributes))
    await store.add_span(span_of(other, attributes={"step": 1}))
    key = rollout.rollout_id
    assert await found(store, key, attributes={"step": 1}) == ["s2", "s3"]
    assert await found(store, key, attributes={"step": 1, "tool": "grep"}) == ["s3"]
    assert await found(store, key, "latest", attributes={"tool": "grep"}, name="s5") == ["s5"]
    assert await found(store, key, attributes={"nothing": "x"}) == []
    page = await store.query_spans(key, attributes={"tool": "grep"}, limit=1, offset=1, sort_order="desc")
    assert ([span.name for span in page], page.total, page.limit, page.offset) == (["s3"], 3, 1, 1)
    assert await found(store, key, attributes={"tool": "grep"}, offset=1) == ["s3", "s5"]


async def test_spans_of_all_rollouts_are_found_by_attributes_that_were_named(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    long = "\x00é" * 5000 + "\ud800"

    async def add(rollout: Any, number: int, **attributes: Any) -> None:
        await store.add_span(
            span_of(rollout, f"{number:016x}", name=f"s{number}", attributes=attributes, start_time=float(number))
        )

    await add(a, 1, model="m1", tokens=10)
    await add(b, 2, model="m2", tokens=10)
    await store.index_span_attribute("model")
    with pytest.raises(ConfigError, match="'tokens'"):
        await store.query_spans(attributes={"model": "m1", "tokens": 10})
    await store.index_span_attribute("tokens")
    await store.index_span_attribute("model")
    await add(a, 3, model="m1", tokens=11)
    await add(b, 4, model=long, tokens=10, other=1)
    await add(b, 4, model="m1", tokens=10)  # there already, so it is not what is found
    await add(b, 5, model=["m1"], other=True)
    assert await found(store, attributes={"model": "m1"}) == ["s1", "s3"]
    assert await found(store, attributes={"model": "m1", "tokens": 10}) == ["s1"]
    assert await found(store, attributes={"tokens": 10}, started_from=2.0, sort_order="desc") == ["s4", "s2"]
    assert await found(store, attributes={"tokens": 10}, name="s1") == ["s1"]
    assert await found(store, attributes={"model": long}) == ["s4"]
    page = await store.query_spans(attributes={"tokens": 10}, limit=1, offset=1)
    assert ([span.name for span in page], page.total) == (["s2"], 3)
    assert await found(store, b.rollout_id, attributes={"tokens": 10}) == ["s2", "s4"]


VALUES: list[Any] = [1, True, "1", 0, False, "", "True", 1.5, 2**60, -1, "é"]


@pytest.mark.parametrize("indexed", [False, True])
async def test_values_are_equal_within_their_kind(store: LightningStore, indexed: bool) -> None:
    rollout = await claimed(store)
    if indexed:
        await store.index_span_attribute("a b")
    for number, value in enumerate(VALUES):
        await store.add_span(span_of(rollout, f"{number:016x}", name=repr(value), attributes={"a b": value}))
    where = () if indexed else (rollout.rollout_id,)
    for value in VALUES:
        assert await found(store, *where, attributes={"a b": value}) == [repr(value)]
    assert await found(store, *where, attributes={"a b": 1.0}) == ["1"]
    assert await found(store, *where, attributes={"a b": float(2**60)}) == [repr(2**60)]
    assert await found(store, *where, attributes={"a b": 2}) == []


async def test_an_attribute_becomes_searchable_while_spans_arrive(store: LightningStore) -> None:
    n_spans, n_later = 5000, 40
    rollout = await claimed(store)
    await store.add_many_spans(
        [span_of(rollout, f"{i:016x}", attributes={"i": i, "same": "x"}) for i in range(n_spans)]
    )

    async def add_more() -> None:
        for i in range(n_spans, n_spans + n_later):
            await store.add_span(span_of(rollout, f"{i:016x}", attributes={"i": i, "same": "x"}))

    await asyncio.gather(store.index_span_attribute("same"), store.index_span_attribute("same"), add_more())
    assert (await store.query_spans(attributes={"same": "x"}, limit=1)).total == n_spans + n_later


@pytest.mark.parametrize("key", ["", "a\0", "x" * 201])
async def test_an_attribute_that_no_store_can_index_is_refused(store: LightningStore, key: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        await store.index_span_attribute(key)
    with pytest.raises(ConfigError):
        await store.query_spans(attributes={key: 1})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"attributes": {"a": ["list"]}}, "attributes"),
        ({"attributes": {"a": "x"}}, "index_span_attribute"),
        ({"attempt_id": "latest"}, "rollout_id"),
        ({"limit": 0}, "limit"),
        ({"offset": -1}, "offset"),
        ({"sort_by": "attributes"}, "sort by"),
        ({"sort_order": "up"}, "sort_order"),
        ({"filter_logic": "xor"}, "xor"),
    ],
)
async def test_what_cannot_be_searched_is_refused(store: LightningStore, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await store.query_spans(**kwargs)
    with pytest.raises(UnknownRollout):
        await store.query_spans("nowhere", attributes={"a": "x"})
