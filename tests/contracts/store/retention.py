"""What `pin` and `prune` must do in every store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from leyden.errors import ConfigError, UnknownRollout
from leyden.store import LightningStore
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, PromptTemplate, Retention, RolloutConfig
from tests.contracts.store.support import claimed, ids, span_of

NOTHING = Retention(max_rollouts=0)


async def finished(store: LightningStore, count: int, *, spans: int = 1, size: int = 10) -> list[str]:
    """The ids of new rollouts that have succeeded, with `spans` spans each of at least `size` bytes."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=index) for index in range(count)])
    rollouts = await store.dequeue_many_rollouts(limit=count)
    for rollout in rollouts:
        await store.add_many_spans(
            [span_of(rollout, f"{index:016x}", attributes={"text": "x" * size}) for index in range(spans)]
        )
        await store.update_attempt(**ids(rollout), status="succeeded")
    return [rollout.rollout_id for rollout in rollouts]


async def kept(store: LightningStore) -> list[str]:
    return [rollout.rollout_id for rollout in await store.query_rollouts()]


async def prune_all(store: LightningStore, retention: Retention) -> int:
    gone = 0
    while step := await store.prune(retention):
        gone += step
    return gone


async def test_the_oldest_finished_rollouts_go_first(store: LightningStore) -> None:
    rollouts = await finished(store, 10)
    assert await store.prune(Retention(max_rollouts=4)) == 6
    assert await kept(store) == rollouts[6:]
    assert await store.prune(Retention(max_rollouts=4)) == 0


async def test_the_oldest_are_those_that_finished_first(store: LightningStore) -> None:
    slow = await claimed(store)
    quick = await claimed(store)
    await claimed(store)
    for rollout in (quick, slow):
        await store.add_span(span_of(rollout))
        await store.update_attempt(**ids(rollout), status="succeeded")
        await asyncio.sleep(0.002)
    assert await store.prune(Retention(max_rollouts=1)) == 1
    assert quick.rollout_id not in await kept(store)


async def test_a_forgotten_rollout_goes_with_everything_that_it_had(store: LightningStore) -> None:
    gone, stays = await finished(store, 2, spans=3)
    attempt = await store.get_latest_attempt(gone)
    assert attempt is not None
    assert await store.prune(NOTHING) == 1
    for call in (
        store.get_rollout_by_id(gone),
        store.query_attempts(gone),
        store.query_spans(gone),
        store.query_spans_of([stays, gone]),
        store.get_attempt_by_id(gone, attempt.attempt_id),
        store.update_rollout(gone, metadata={"a": 1}),
        store.wait_for_rollouts(rollout_ids=[stays, gone]),
        store.pin("mine", [gone]),
    ):
        with pytest.raises(UnknownRollout, match=gone):
            await call
    statistics = await store.statistics()
    assert (statistics["total_rollouts"], statistics["total_attempts"], statistics["total_spans"]) == (1, 1, 3)
    assert len(await store.query_spans(stays)) == 3


async def test_unfinished_rollouts_stay(store: LightningStore) -> None:
    again = await claimed(store, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    await store.update_attempt(**ids(again), status="failed")
    running = await store.start_rollout("runs")
    await store.add_span(span_of(running))
    waiting = await store.enqueue_rollout("waits")
    assert await store.prune(NOTHING) == 0
    assert await kept(store) == [again.rollout_id, running.rollout_id, waiting.rollout_id]


async def test_the_newest_rollout_and_the_one_with_the_newest_span_stay(store: LightningStore) -> None:
    rollouts = await finished(store, 3)
    cancelled = await store.enqueue_rollout("no span")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    assert await store.prune(NOTHING) == 2
    assert await kept(store) == [rollouts[2], cancelled.rollout_id]


async def test_a_cursor_is_good_whatever_was_forgotten(store: LightningStore) -> None:
    await finished(store, 5)
    page = await store.poll_new_spans(limit=2)
    end = await store.poll_new_spans(after="latest")
    await store.prune(NOTHING)
    later = await finished(store, 2)
    await store.prune(NOTHING)
    last = later[-1:]
    assert [span.rollout_id for span in (await store.poll_new_spans(after=end.after)).spans] == last
    assert [span.rollout_id for span in (await store.poll_new_spans(after=page.after)).spans] == last


async def test_a_pinned_rollout_stays_until_no_name_pins_it(store: LightningStore) -> None:
    rollouts = await finished(store, 6)
    await store.pin("a", [rollouts[0], rollouts[2], rollouts[0]])
    await store.pin("b", [rollouts[2]])
    await store.prune(NOTHING)
    assert await kept(store) == [rollouts[0], rollouts[2], rollouts[5]]
    await store.pin("a", [])
    await store.prune(NOTHING)
    assert await kept(store) == [rollouts[2], rollouts[5]]
    await store.pin("b", [rollouts[5]])
    await finished(store, 1)
    await store.prune(NOTHING)
    assert (await kept(store))[0] == rollouts[5]
    assert len(await kept(store)) == 2


async def test_a_pin_of_an_unknown_rollout_changes_nothing(store: LightningStore) -> None:
    rollouts = await finished(store, 3)
    await store.pin("a", rollouts[:1])
    with pytest.raises(UnknownRollout, match="ro-nowhere"):
        await store.pin("a", [rollouts[1], "ro-nowhere"])
    await store.prune(NOTHING)
    assert await kept(store) == [rollouts[0], rollouts[2]]


async def test_a_rollout_may_be_pinned_from_the_first(store: LightningStore) -> None:
    requests = [EnqueueRolloutRequest(input=index, rollout_id=f"ro-{index}", pin="run") for index in range(2)]
    await store.enqueue_many_rollouts(requests)
    requests.append(EnqueueRolloutRequest(input=2, rollout_id="ro-2"))
    await store.enqueue_many_rollouts(requests)
    again = [requests[0].model_copy(update={"pin": "other"}), requests[2].model_copy(update={"pin": "run"})]
    await store.enqueue_many_rollouts(again)
    for index in range(3):
        await store.update_rollout(f"ro-{index}", status="cancelled")
    (newest,) = await finished(store, 1)
    assert await store.prune(NOTHING) == 0
    await store.pin("run", ["ro-2"])
    await store.prune(NOTHING)
    assert await kept(store) == ["ro-0", "ro-2", newest]


async def test_a_step_forgets_no_more_than_its_limit(store: LightningStore) -> None:
    rollouts = await finished(store, 9)
    assert await store.prune(NOTHING, limit=3) == 3
    assert await kept(store) == rollouts[3:]
    assert await prune_all(store, NOTHING) == 5
    for limit in (0, -1):
        with pytest.raises(ConfigError, match="limit"):
            await store.prune(NOTHING, limit=limit)


async def test_a_rollout_of_any_size_is_forgotten(store: LightningStore) -> None:
    (large,) = await finished(store, 1, spans=2000)
    (small,) = await finished(store, 1)
    assert await store.prune(NOTHING) == 1
    assert await kept(store) == [small]
    assert large != small


async def test_rollouts_go_by_age(store: LightningStore) -> None:
    rollouts = await finished(store, 3)
    moment = time.time()
    await asyncio.sleep(0.05)
    younger = await finished(store, 3)
    assert await store.prune(Retention(max_age_seconds=time.time() - moment)) == 3
    assert await kept(store) == younger
    assert await store.prune(Retention(max_age_seconds=3600)) == 0
    assert rollouts != younger


async def test_rollouts_go_by_bytes(store: LightningStore) -> None:
    rollouts = await finished(store, 10, size=100_000)
    assert await store.prune(Retention(max_bytes=2_000_000)) == 0
    assert await store.prune(Retention(max_bytes=450_000)) == 6
    assert await kept(store) == rollouts[6:]


async def test_spans_that_come_late_are_counted_too(store: LightningStore) -> None:
    rollouts: Sequence[AttemptedRollout] = [await claimed(store) for _ in range(3)]
    for rollout in rollouts:
        await store.update_attempt(**ids(rollout), status="succeeded")
    assert await store.prune(Retention(max_bytes=50_000)) == 0
    await store.add_span(span_of(rollouts[1], attributes={"text": "x" * 100_000}))
    assert await store.prune(Retention(max_bytes=50_000)) == 1
    assert await kept(store) == [rollout.rollout_id for rollout in rollouts[1:]]


async def test_a_rollout_goes_as_soon_as_one_limit_says_so(store: LightningStore) -> None:
    rollouts = await finished(store, 6, size=10_000)
    assert await store.prune(Retention(max_rollouts=5, max_bytes=10**9, max_age_seconds=3600)) == 1
    assert await store.prune(Retention(max_rollouts=100, max_bytes=35_000, max_age_seconds=3600)) == 2
    assert await kept(store) == rollouts[3:]


async def test_a_retention_without_limits_keeps_everything(store: LightningStore) -> None:
    rollouts = await finished(store, 3)
    assert await store.prune(Retention()) == 0
    assert await kept(store) == rollouts


async def test_a_repeated_enqueue_of_a_forgotten_rollout_is_a_new_one(store: LightningStore) -> None:
    await store.enqueue_rollout("first", rollout_id="ro-mine")
    await store.update_rollout("ro-mine", status="cancelled")
    await finished(store, 1)
    await store.prune(NOTHING)
    assert (await store.enqueue_rollout("second", rollout_id="ro-mine")).status == "queuing"
    rollout = await store.dequeue_rollout()
    assert rollout is not None
    assert (rollout.input, rollout.attempt.sequence_id) == ("second", 1)


async def test_old_versions_of_resources_go_with_the_rollouts_that_used_them(store: LightningStore) -> None:
    for version in range(5):
        await store.update_resources("prompt", {"prompt": PromptTemplate(template=f"v{version}", engine="f-string")})
        await finished(store, 2)
    await store.prune(NOTHING)
    latest = await store.get_resources_by_id("prompt")
    assert latest.version == 5
    assert await store.get_latest_resources() == latest
    assert (await store.statistics())["total_resources"] == 1
    assert (await store.query_resources()).total == 1
    await store.update_resources("prompt", {"prompt": PromptTemplate(template="v6", engine="f-string")})
    assert (await store.get_resources_by_id("prompt")).version == 6
