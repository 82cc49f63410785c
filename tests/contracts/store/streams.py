"""The store's contract for spans as they arrive: each once, in order, from any cursor on."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from leyden.errors import ConfigError
from leyden.store import LightningStore
from leyden.types import AttemptedRollout, Span
from tests.contracts.store.support import SOON, claimed, span_of

__all__ = [
    "test_a_cancelled_poll_without_a_cursor_loses_nothing",
    "test_a_cursor_goes_past_the_spans_of_others",
    "test_a_cursor_of_another_store_is_refused",
    "test_a_poll_waits_for_the_first_span",
    "test_callers_who_share_a_store_object_are_given_each_span_once",
    "test_every_span_is_answered_once_while_many_are_written",
    "test_latest_is_what_comes_from_now_on",
    "test_spans_are_answered_in_the_order_of_arrival",
    "test_watching_ends_when_it_is_told_to",
    "test_without_a_cursor_a_poll_returns_what_is_new_to_this_store_object",
]


def numbered(rollout: AttemptedRollout, first: int, last: int) -> list[Span]:
    return [span_of(rollout, f"{number:016x}", name=f"s{number}") for number in range(first, last)]


def key_of(span: Span) -> tuple[str, str]:
    return span.rollout_id, span.span_id


async def test_spans_are_answered_in_the_order_of_arrival(store: LightningStore) -> None:
    empty = await store.poll_new_spans()
    assert empty.spans == []
    a, b = await claimed(store, "a"), await claimed(store, "b")
    assert (await store.poll_new_spans(after=empty.after)).spans == []
    written = [*numbered(a, 0, 4), *numbered(b, 0, 3), *numbered(a, 4, 6)]
    added = await store.add_many_spans(written)
    await store.add_many_spans(written)
    answered: list[Span] = []
    after = None
    while (page := await store.poll_new_spans(after=after, limit=4)).spans:
        assert len(page.spans) <= 4
        answered += page.spans
        after = page.after
    assert answered == list(added)
    assert page.after == after
    assert (await store.poll_new_spans(after=empty.after)).spans == list(added)
    assert (await store.poll_new_spans(after=None, rollout_ids=[b.rollout_id, "comes later"])).spans == list(added)[4:7]
    assert (await store.poll_new_spans(after=None, rollout_ids=[])).spans == []


async def test_latest_is_what_comes_from_now_on(store: LightningStore) -> None:
    rollout = await claimed(store)
    await store.add_many_spans(numbered(rollout, 0, 3))
    now = await store.poll_new_spans(after="latest")
    assert now.spans == []
    (added,) = await store.add_many_spans(numbered(rollout, 3, 4))
    assert (await store.poll_new_spans(after=now.after)).spans == [added]


async def test_without_a_cursor_a_poll_returns_what_is_new_to_this_store_object(store: LightningStore) -> None:
    rollout = await claimed(store)
    assert (await store.poll_new_spans()).spans == []
    first = await store.add_many_spans(numbered(rollout, 0, 5))
    assert (await store.poll_new_spans(limit=2)).spans == list(first)[:2]
    assert (await store.poll_new_spans(after=None)).spans == list(first)  # an explicit cursor changes nothing
    page = await store.poll_new_spans()
    assert page.spans == list(first)[2:]
    assert (await store.poll_new_spans()).spans == []
    waiting = asyncio.create_task(store.poll_new_spans(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    second = await store.add_many_spans(numbered(rollout, 5, 6))
    assert (await waiting).spans == list(second)
    assert (await store.poll_new_spans()).spans == []
    assert (await store.poll_new_spans(after=page.after)).spans == list(second)
    with pytest.raises(ConfigError, match="rollout_ids"):
        await store.poll_new_spans(rollout_ids=[rollout.rollout_id])


async def test_callers_who_share_a_store_object_are_given_each_span_once(store: LightningStore) -> None:
    rollout = await claimed(store)
    wanted = 60

    async def poll() -> list[str]:
        found: list[str] = []
        while (page := await store.poll_new_spans(limit=7, timeout_seconds=0.3)).spans:
            found += [span.name for span in page.spans]
        return found

    polling = [asyncio.create_task(poll()) for _ in range(3)]
    for number in range(0, wanted, 4):
        await store.add_many_spans(numbered(rollout, number, number + 4))
    found = [name for each in await asyncio.gather(*polling) for name in each]
    assert sorted(found) == sorted(f"s{number}" for number in range(wanted))


async def test_a_cancelled_poll_without_a_cursor_loses_nothing(store: LightningStore) -> None:
    rollout = await claimed(store)
    polling = asyncio.create_task(store.poll_new_spans(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    polling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await polling
    added = await store.add_many_spans(numbered(rollout, 0, 2))
    assert (await store.poll_new_spans()).spans == list(added)


async def test_a_cursor_goes_past_the_spans_of_others(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    await store.add_many_spans([*numbered(a, 0, 2), *numbered(b, 0, 50)])
    page = await store.poll_new_spans(after=None, rollout_ids=[a.rollout_id])
    assert len(page.spans) == 2
    assert (await store.poll_new_spans(after="latest")).after == page.after
    await store.add_many_spans(numbered(b, 50, 60))
    nothing = await store.poll_new_spans(after=page.after, rollout_ids=[a.rollout_id])
    assert nothing.spans == []
    assert nothing.after != page.after
    full = await store.poll_new_spans(after=None, rollout_ids=[a.rollout_id], limit=1)
    assert [span.name for span in full.spans] == ["s0"]
    assert [span.name for span in (await store.poll_new_spans(after=full.after, rollout_ids=[a.rollout_id])).spans] == [
        "s1"
    ]


async def test_a_poll_waits_for_the_first_span(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    start = time.monotonic()
    nothing = await store.poll_new_spans(after="latest", timeout_seconds=0.05)
    assert nothing.spans == []
    assert 0.04 < time.monotonic() - start < SOON
    waiting = asyncio.create_task(
        store.poll_new_spans(after=nothing.after, rollout_ids=[a.rollout_id], timeout_seconds=SOON)
    )
    await asyncio.sleep(0.02)
    await store.add_many_spans(numbered(b, 0, 5))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await store.add_many_spans(numbered(a, 0, 1))
    assert [span.name for span in (await waiting).spans] == ["s0"]
    assert time.monotonic() - start < SOON


async def test_every_span_is_answered_once_while_many_are_written(store: LightningStore) -> None:
    n_writers, n_spans = 4, 60
    rollouts = [await claimed(store, number) for number in range(n_writers)]
    wanted = n_writers * n_spans

    async def write(rollout: AttemptedRollout) -> None:
        for number in range(0, n_spans, 3):
            await store.add_span(*numbered(rollout, number, number + 1))
            await store.add_many_spans(numbered(rollout, number + 1, number + 3))

    async def read(limit: int, rollout_ids: list[str] | None) -> list[tuple[str, str]]:
        answered: list[tuple[str, str]] = []
        after = None
        while len(answered) < (wanted if rollout_ids is None else n_spans * len(rollout_ids)):
            page = await store.poll_new_spans(after=after, rollout_ids=rollout_ids, limit=limit, timeout_seconds=SOON)
            assert page.spans
            answered += map(key_of, page.spans)
            after = page.after
        last = await store.poll_new_spans(after=after, rollout_ids=rollout_ids)
        return [*answered, *map(key_of, last.spans)]

    some = [rollouts[1].rollout_id, rollouts[3].rollout_id]
    *everything, filtered, _ = await asyncio.gather(
        read(7, None), read(1000, None), read(5, some), asyncio.gather(*map(write, rollouts))
    )
    for answered in everything:
        assert len(answered) == len(set(answered)) == wanted
    assert everything[0] == everything[1]
    assert filtered == [key for key in everything[0] if key[0] in some]


@pytest.mark.parametrize(
    "cursor", ["", "x", "1", "1.", ".1", "-1.0", "1.2.3", "0.1e3", "²2.1", "9" * 60 + ".1", "999999.999999"]
)
async def test_a_cursor_of_another_store_is_refused(store: LightningStore, cursor: str) -> None:
    rollout = await claimed(store)
    await store.add_many_spans(numbered(rollout, 0, 2))
    with pytest.raises(ConfigError, match="cursor"):
        await store.poll_new_spans(after=cursor, timeout_seconds=SOON)
    with pytest.raises(ConfigError, match="limit"):
        await store.poll_new_spans(limit=0, timeout_seconds=SOON)


async def test_watching_ends_when_it_is_told_to(store: LightningStore) -> None:
    rollout = await claimed(store)
    await store.add_many_spans(numbered(rollout, 0, 3))
    seen: list[str] = []
    async with contextlib.aclosing(store.watch_spans(after=None)) as spans:
        async for span in spans:
            seen.append(span.name)
            if len(seen) == 3:
                await store.add_many_spans(numbered(rollout, 3, 5))
            if len(seen) == 5:
                break
    assert seen == ["s0", "s1", "s2", "s3", "s4"]

    arrived = asyncio.Event()

    async def watch() -> None:
        async with contextlib.aclosing(store.watch_spans(rollout_ids=[rollout.rollout_id])) as spans:
            async for span in spans:
                seen.append(span.name)
                arrived.set()

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.02)
    await store.add_many_spans(numbered(rollout, 5, 6))
    async with asyncio.timeout(SOON):
        await arrived.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    await store.add_many_spans(numbered(rollout, 6, 7))
    assert seen[-1] == "s5"
