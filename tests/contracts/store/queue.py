"""The part of the store's contract about order and repetition: priority, claims that are asked twice, news."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from leyden.errors import ConfigError, IllegalTransition
from leyden.store import LightningStore
from leyden.types import OVERTAKES, EnqueueRolloutRequest, PromptTemplate
from tests.contracts.store.support import SOON


async def claim_inputs(store: LightningStore, limit: int) -> list[object]:
    return [rollout.input for rollout in await store.dequeue_many_rollouts(limit=limit)]


# ---- priority --------------------------------------------------------------------------------------------------------


async def test_claims_go_by_priority_and_then_by_age(store: LightningStore) -> None:
    for task, priority in [("a", 0), ("b", -1), ("c", 2), ("d", 0), ("e", 2)]:
        rollout = await store.enqueue_rollout(task, priority=priority)
        assert (rollout.priority, (await store.get_rollout_by_id(rollout.rollout_id)).priority) == (priority, priority)
    assert await claim_inputs(store, 2) == ["c", "e"]
    assert await claim_inputs(store, 9) == ["a", "d", "b"]


async def test_a_low_priority_is_overtaken_a_thousand_times_and_no_more(store: LightningStore) -> None:
    await store.enqueue_rollout("low", priority=-1)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(OVERTAKES + 5)])
    first = await claim_inputs(store, OVERTAKES + 6)
    assert first.index("low") in (OVERTAKES - 1, OVERTAKES)
    assert [task for task in first if task != "low"] == list(range(OVERTAKES + 5))


async def test_a_waiting_rollout_can_be_given_another_priority(store: LightningStore) -> None:
    await store.enqueue_rollout("a")
    late = await store.enqueue_rollout("b")
    assert (await store.update_rollout(late.rollout_id, priority=1)).priority == 1
    assert await claim_inputs(store, 2) == ["b", "a"]


async def test_a_requeued_rollout_keeps_its_priority(store: LightningStore) -> None:
    await store.enqueue_rollout("urgent", priority=1)
    claimed = await store.dequeue_rollout()
    assert claimed is not None and claimed.priority == 1
    await store.enqueue_rollout("other")
    await store.update_rollout(claimed.rollout_id, status="requeuing")
    assert await claim_inputs(store, 2) == ["urgent", "other"]


@pytest.mark.parametrize("priority", [1001, -1001])
async def test_a_priority_out_of_range_is_refused(store: LightningStore, priority: int) -> None:
    with pytest.raises((ConfigError, ValidationError)):
        await store.enqueue_rollout("task", priority=priority)
    with pytest.raises((ConfigError, ValidationError)):
        await store.start_rollout("task", priority=priority)
    rollout = await store.enqueue_rollout("task")
    with pytest.raises((ConfigError, ValidationError)):
        await store.update_rollout(rollout.rollout_id, priority=priority)
    assert (await store.statistics())["total_rollouts"] == 1


# ---- asking twice ----------------------------------------------------------------------------------------------------


async def test_a_claim_that_is_asked_twice_is_one_claim(store: LightningStore) -> None:
    for task in "abc":
        await store.enqueue_rollout(task)
    first = await store.dequeue_many_rollouts(limit=2, worker_id="w", claim_id="mine")
    assert [rollout.input for rollout in first] == ["a", "b"]
    assert await store.dequeue_many_rollouts(limit=2, worker_id="w", claim_id="mine") == first
    await store.update_attempt(first[0].rollout_id, first[0].attempt.attempt_id, status="succeeded")
    again = await store.dequeue_many_rollouts(limit=2, worker_id="w", claim_id="mine")
    assert [rollout.attempt.status for rollout in again] == ["succeeded", "preparing"]
    assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=2, claim_id="other")] == ["c"]


async def test_a_claim_of_nothing_can_be_asked_again(store: LightningStore) -> None:
    assert await store.dequeue_rollout(claim_id="mine") is None
    await store.enqueue_rollout("task")
    claimed = await store.dequeue_rollout(claim_id="mine")
    assert claimed is not None and claimed.input == "task"


async def test_a_rollout_started_twice_with_both_ids_is_one(store: LightningStore) -> None:
    first = await store.start_rollout("task", rollout_id="ro-1", attempt_id="at-1", worker_id="w")
    assert (first.rollout_id, first.attempt.attempt_id) == ("ro-1", "at-1")
    assert await store.start_rollout("task", rollout_id="ro-1", attempt_id="at-1", worker_id="w") == first
    with pytest.raises(ConfigError, match="ro-1"):
        await store.start_rollout("task", rollout_id="ro-1", attempt_id="at-2")
    with pytest.raises(ConfigError, match="ro-1"):
        await store.start_rollout("task", rollout_id="ro-1")
    assert len(await store.query_attempts("ro-1")) == 1


async def test_an_attempt_started_twice_with_its_id_is_one(store: LightningStore) -> None:
    await store.enqueue_rollout("task", rollout_id="ro-1")
    first = await store.start_attempt("ro-1", attempt_id="at-1")
    assert await store.start_attempt("ro-1", attempt_id="at-1") == first
    await store.update_attempt("ro-1", "at-1", status="succeeded")
    assert (await store.start_attempt("ro-1", attempt_id="at-1")).attempt.status == "succeeded"
    with pytest.raises(IllegalTransition):
        await store.start_attempt("ro-1", attempt_id="at-2")


async def test_the_latest_resources_written_again_are_no_new_version(store: LightningStore) -> None:
    one, two = {"p": PromptTemplate(template="1")}, {"p": PromptTemplate(template="2")}
    first = await store.update_resources("mine", one)  # pyright: ignore[reportArgumentType]
    assert await store.update_resources("mine", one) == first  # pyright: ignore[reportArgumentType]
    other = await store.add_resources(two)  # pyright: ignore[reportArgumentType]
    assert await store.get_latest_resources() == other
    again = await store.update_resources("mine", one)  # pyright: ignore[reportArgumentType]
    assert (again.version, await store.get_latest_resources()) == (2, again)


# ---- news ------------------------------------------------------------------------------------------------------------


async def test_news_begin_empty_and_tell_what_came_since(store: LightningStore) -> None:
    start = await store.get_news()
    assert (start.claimable, start.finished, start.spans, start.gap) == (0, [], False, False)
    await store.enqueue_rollout("task", rollout_id="ro-1")
    await store.enqueue_rollout("task", rollout_id="ro-2")
    async with asyncio.timeout(SOON):
        queued = await store.get_news(after=start.after, timeout_seconds=SOON)
        while queued.claimable < 2:  # two commits may be heard of one after the other
            queued = await store.get_news(after=start.after)
        await store.update_rollout("ro-2", status="cancelled")
        over = await store.get_news(after=queued.after, timeout_seconds=SOON)
    assert (over.finished, over.gap) == (["ro-2"], False)
    silence = await store.get_news(after=over.after, timeout_seconds=0.02)
    assert (silence.claimable, silence.finished, silence.spans) == (0, [], False)


async def test_waiting_for_news_ends_with_them(store: LightningStore) -> None:
    start = await store.get_news()
    waiting = asyncio.create_task(store.get_news(after=start.after, timeout_seconds=SOON))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.enqueue_rollout("task")
    async with asyncio.timeout(SOON / 2):
        assert (await waiting).claimable == 1


async def test_news_after_a_moment_of_another_store_say_that_there_is_a_gap(store: LightningStore) -> None:
    assert (await store.get_news(after="elsewhere.1.2.3")).gap
    assert (await store.get_news(after="what is this")).gap
