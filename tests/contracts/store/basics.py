"""The part of the store's contract that every run needs: the queue, waiting, spans, rollouts and attempts, time, resources, workers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from leyden.errors import (
    ConfigError,
    IllegalTransition,
    StoreClosed,
    UnknownAttempt,
    UnknownResources,
    UnknownRollout,
    UnknownWorker,
)
from leyden.store import LightningStore
from leyden.types import (
    LLM,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PromptTemplate,
    ProxyLLM,
    Retention,
    RolloutConfig,
    Span,
    SpanEvent,
    SpanStatus,
    TokenRecord,
    UpdateAttemptRequest,
)
from tests.contracts.store.support import SOON, claimed, ids, span_of

# ---- the queue -------------------------------------------------------------------------------------------------------


async def test_an_enqueued_rollout_waits_without_an_attempt(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout({"q": [1, None, "é"]}, mode="train", metadata={"a": 1})
    assert (rollout.status, rollout.input, rollout.mode, rollout.metadata) == (
        "queuing",
        {"q": [1, None, "é"]},
        "train",
        {"a": 1},
    )
    assert not isinstance(rollout, AttemptedRollout)
    assert rollout.end_time is None
    assert rollout == await store.get_rollout_by_id(rollout.rollout_id)
    assert await store.get_latest_attempt(rollout.rollout_id) is None


async def test_rollouts_are_claimed_in_the_order_in_which_they_came(store: LightningStore) -> None:
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(7)])
    first = await store.dequeue_many_rollouts(limit=3)
    rest = await store.dequeue_many_rollouts(limit=100)
    assert [r.input for r in rollouts] == list(range(7))
    assert [r.input for r in [*first, *rest]] == list(range(7))
    assert await store.dequeue_rollout() is None


async def test_a_claim_makes_attempt_one_and_prepares_the_rollout(store: LightningStore) -> None:
    config = RolloutConfig(timeout_seconds=5, max_attempts=3, retry_condition=["failed"])
    rollout = await claimed(store, {"x": 1}, worker_id="w1", config=config, mode="val", metadata={"k": [1]})
    assert (rollout.status, rollout.config, rollout.input, rollout.mode) == ("preparing", config, {"x": 1}, "val")
    assert rollout.metadata == {"k": [1]}
    attempt = rollout.attempt
    assert (attempt.status, attempt.sequence_id, attempt.worker_id) == ("preparing", 1, "w1")
    assert attempt.start_time >= rollout.start_time
    assert await store.get_attempt_by_id(**ids(rollout)) == attempt
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_claim_of_nothing_takes_nothing(store: LightningStore, limit: int) -> None:
    await store.enqueue_rollout(1)
    assert list(await store.dequeue_many_rollouts(limit=limit)) == []
    assert await store.dequeue_rollout() is not None


async def test_a_repeated_enqueue_with_the_callers_id_is_one_rollout(store: LightningStore) -> None:
    first = await store.enqueue_rollout("a", rollout_id="mine")
    again = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input="b", rollout_id="mine"), EnqueueRolloutRequest(input="c", rollout_id="other")] * 2
    )
    assert [r.rollout_id for r in again] == ["mine", "other", "mine", "other"]
    assert again[0] == first
    assert [r.rollout_id for r in await store.dequeue_many_rollouts(limit=9)] == ["mine", "other"]
    assert (await store.enqueue_rollout("z", rollout_id="mine")).status == "preparing"


async def test_unknown_resources_enqueue_nothing_at_all(store: LightningStore) -> None:
    with pytest.raises(UnknownResources, match="rs-no"):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=2, resources_id="rs-no")]
        )
    with pytest.raises(UnknownResources, match="rs-no"):
        await store.start_rollout(1, resources_id="rs-no")
    assert len(await store.query_rollouts()) == 0


async def test_no_resources_id_means_the_latest_at_that_moment(store: LightningStore) -> None:
    assert (await store.enqueue_rollout(0)).resources_id is None
    first = await store.add_resources({"p": PromptTemplate(template="1")})
    assert (await store.enqueue_rollout(1)).resources_id == first.resources_id
    second = await store.add_resources({"p": PromptTemplate(template="2")})
    assert (await store.start_rollout(2)).resources_id == second.resources_id
    assert (await store.enqueue_rollout(3, resources_id=first.resources_id)).resources_id == first.resources_id


async def test_a_task_that_is_no_json_is_refused(store: LightningStore) -> None:
    with pytest.raises(ConfigError, match="input"):
        await store.enqueue_rollout({"f": object()})
    assert len(await store.query_rollouts()) == 0


async def test_a_task_keeps_what_json_can_say(store: LightningStore) -> None:
    task = {"n": None, "b": True, "big": 2**60, "f": 0.1, "s": "\x00\u2028 \U0001f600", "l": [[]], "lone": "\ud800"}
    rollout = await claimed(store, task)
    assert rollout.input == task


async def test_a_started_rollout_is_claimed_from_the_beginning(store: LightningStore) -> None:
    rollout = await store.start_rollout("task", worker_id="w", rollout_id="mine")
    assert (rollout.rollout_id, rollout.status, rollout.attempt.sequence_id) == ("mine", "preparing", 1)
    assert await store.dequeue_rollout() is None
    assert (await store.get_worker_by_id("w")).current_attempt_id == rollout.attempt.attempt_id
    with pytest.raises(ConfigError, match="mine"):
        await store.start_rollout("task", rollout_id="mine")


async def test_another_attempt_by_hand_ignores_the_maximum(store: LightningStore) -> None:
    first = await claimed(store)
    second = await store.start_attempt(first.rollout_id)
    assert (second.status, second.attempt.sequence_id) == ("preparing", 2)
    await store.update_attempt(**ids(second), status="succeeded")
    with pytest.raises(IllegalTransition, match="succeeded"):
        await store.start_attempt(first.rollout_id)
    with pytest.raises(UnknownRollout, match="nowhere"):
        await store.start_attempt("nowhere")


async def test_what_is_returned_is_the_callers_own_copy(store: LightningStore) -> None:
    task = {"list": [1]}
    rollout = await store.enqueue_rollout(task, metadata={"m": {}})
    task["list"].append(2)
    rollout.input["list"].append(3)
    rollout.metadata["m"]["x"] = 1
    rollout.status = "failed"
    again = await store.get_rollout_by_id(rollout.rollout_id)
    assert (again.input, again.metadata, again.status) == ({"list": [1]}, {"m": {}}, "queuing")


# ---- waiting ---------------------------------------------------------------------------------------------------------


async def test_a_waiting_claim_gets_what_is_enqueued_later(store: LightningStore) -> None:
    claim = asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    enqueued = await store.enqueue_rollout("late")
    found = await claim
    assert found is not None
    assert found.rollout_id == enqueued.rollout_id


async def test_a_waiting_claim_gets_what_is_requeued(store: LightningStore) -> None:
    rollout = await claimed(store, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    claim = asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    await store.update_attempt(**ids(rollout), status="failed")
    found = await claim
    assert found is not None
    assert (found.rollout_id, found.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_a_claim_that_waited_in_vain_answers_none(store: LightningStore) -> None:
    assert await store.dequeue_rollout("w", timeout_seconds=0.01) is None
    assert list(await store.dequeue_many_rollouts(limit=3, timeout_seconds=0.01)) == []


async def test_each_rollout_is_claimed_once_by_many_waiters(store: LightningStore) -> None:
    claims = [asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON)) for _ in range(20)]
    await asyncio.sleep(0.02)
    for i in range(10):
        await store.enqueue_rollout(i)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(10, 20)])
    found = await asyncio.gather(*claims)
    assert sorted(r.input for r in found if r is not None) == list(range(20))


async def test_a_cancelled_claim_has_claimed_nothing(store: LightningStore) -> None:
    claim = asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    rollout = await store.enqueue_rollout("kept")
    found = await store.dequeue_rollout()
    assert found is not None
    assert (found.rollout_id, found.attempt.sequence_id) == (rollout.rollout_id, 1)


async def test_a_woken_claim_that_is_cancelled_leaves_the_rollout_to_the_next(store: LightningStore) -> None:
    first = asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    second = asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON))
    await asyncio.sleep(0.02)
    await store.enqueue_rollout("one")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    found = await second
    assert found is not None
    assert found.attempt.sequence_id == 1


async def test_waiting_for_rollouts_answers_them_in_the_order_asked(store: LightningStore) -> None:
    a, b, c = [await claimed(store, name) for name in "abc"]
    waiting = asyncio.create_task(
        store.wait_for_rollouts(rollout_ids=[c.rollout_id, a.rollout_id, b.rollout_id], timeout=SOON)
    )
    await asyncio.sleep(0.01)
    for rollout, status in ((a, "succeeded"), (b, "failed")):
        await store.update_attempt(**ids(rollout), status=status)  # pyright: ignore[reportArgumentType]
    assert not waiting.done()
    await store.update_rollout(c.rollout_id, status="cancelled")
    finished = await waiting
    assert [(r.input, r.status) for r in finished] == [("c", "cancelled"), ("a", "succeeded"), ("b", "failed")]


async def test_waiting_that_times_out_answers_those_that_are_finished(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    wanted = [a.rollout_id, b.rollout_id]
    assert list(await store.wait_for_rollouts(rollout_ids=wanted, timeout=0)) == []
    await store.update_attempt(**ids(b), status="succeeded")
    assert [r.input for r in await store.wait_for_rollouts(rollout_ids=wanted, timeout=0)] == ["b"]
    assert [r.input for r in await store.wait_for_rollouts(rollout_ids=wanted, timeout=0.02)] == ["b"]
    assert [r.input for r in await store.wait_for_any_rollout(rollout_ids=wanted, timeout=None)] == ["b"]
    assert list(await store.wait_for_rollouts(rollout_ids=[])) == []
    assert list(await store.wait_for_any_rollout(rollout_ids=[])) == []


async def test_waiting_for_any_answers_at_the_first(store: LightningStore) -> None:
    rollouts = [await claimed(store, i) for i in range(3)]
    waiting = asyncio.create_task(
        store.wait_for_any_rollout(rollout_ids=[r.rollout_id for r in rollouts], timeout=SOON)
    )
    await asyncio.sleep(0.01)
    await store.update_attempt(**ids(rollouts[1]), status="succeeded")
    assert [r.input for r in await waiting] == [1]


async def test_waiting_for_an_unknown_rollout_raises_at_once(store: LightningStore) -> None:
    known = await store.enqueue_rollout(1)
    for wait in (store.wait_for_rollouts, store.wait_for_any_rollout):
        with pytest.raises(UnknownRollout, match="nowhere"):
            await wait(rollout_ids=[known.rollout_id, "nowhere"], timeout=SOON)


async def test_ten_thousand_rollouts_can_be_waited_for(store: LightningStore) -> None:
    n, finished = 10_000, 1_000
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(n)])
    ids = [rollout.rollout_id for rollout in rollouts]
    some = asyncio.create_task(store.wait_for_rollouts(rollout_ids=ids[:finished], timeout=60.0))
    last = asyncio.create_task(store.wait_for_any_rollout(rollout_ids=ids[finished:], timeout=60.0))
    await asyncio.sleep(0)
    await asyncio.gather(*(store.update_rollout(rollout_id, status="cancelled") for rollout_id in ids[:finished]))
    assert [rollout.rollout_id for rollout in await some] == ids[:finished]
    assert not last.done()
    await store.update_rollout(ids[-1], status="cancelled")
    assert [rollout.rollout_id for rollout in await last] == ids[-1:]


async def test_a_task_that_calls_without_end_lets_others_go_on(store: LightningStore) -> None:
    rollout = await store.start_rollout(1)
    others = 0

    async def tick() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    ticking = asyncio.create_task(tick())
    for _ in range(200):
        await store.get_next_span_sequence_id(rollout.rollout_id, rollout.attempt.attempt_id)
    ticking.cancel()
    assert others > 2


async def test_threads_with_loops_of_their_own_share_the_work(store: LightningStore) -> None:
    n = 60
    taken: list[Any] = []

    async def work() -> None:
        while (
            rollout := await store.dequeue_rollout(threading.current_thread().name, timeout_seconds=0.3)
        ) is not None:
            await store.add_span(span_of(rollout))
            await store.update_attempt(**ids(rollout), status="succeeded")
            taken.append(rollout.input)

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(4)]
    for thread in threads:
        thread.start()
    enqueued = [await store.enqueue_rollout(i) for i in range(n)]
    finished = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in enqueued], timeout=30)
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert sorted(taken) == list(range(n))
    assert len(finished) == n
    assert (await store.statistics())["total_spans"] == n


# ---- spans -----------------------------------------------------------------------------------------------------------


async def test_a_span_comes_back_as_it_was(store: LightningStore) -> None:
    rollout = await claimed(store)
    span = span_of(
        rollout,
        sequence_id=3,
        parent_id="b" * 16,
        name="chat",
        status=SpanStatus(status_code="ERROR", description="no"),
        attributes={"s": "é", "i": 2**53, "f": 0.1, "b": True, "l": ["a"], "n": [1, 2]},
        events=[SpanEvent(name="e", timestamp=1.5, attributes={"k": 1}), SpanEvent(name="bare")],
        start_time=1.25,
        end_time=2.5,
        resource={"service.name": "x"},
        tokens=TokenRecord(prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.5], policy_versions=[7]),
    )
    bare = span_of(rollout, "b" * 16, sequence_id=4)
    assert list(await store.add_many_spans([span, bare])) == [span, bare]
    assert list(await store.query_spans(rollout.rollout_id)) == [span, bare]
    assert await store.query_spans_of([rollout.rollout_id]) == {rollout.rollout_id: [span, bare]}


async def test_a_span_that_is_there_already_is_left_out(store: LightningStore) -> None:
    rollout = await claimed(store)
    assert await store.add_span(span_of(rollout)) is not None
    assert await store.add_span(span_of(rollout)) is None
    added = await store.add_many_spans([span_of(rollout), span_of(rollout, "b" * 16), span_of(rollout, "b" * 16)])
    assert [span.span_id for span in added] == ["b" * 16]
    assert len(await store.query_spans(rollout.rollout_id)) == 2


async def test_span_numbers_increase_within_an_attempt(store: LightningStore) -> None:
    first = await claimed(store)
    key = (first.rollout_id, first.attempt.attempt_id)
    assert await store.get_next_span_sequence_id(*key) == 1
    drawn = await store.add_span(span_of(first))
    assert drawn is not None
    assert drawn.sequence_id == 2
    await store.add_span(span_of(first, "b" * 16, sequence_id=10))
    await store.add_span(span_of(first, "c" * 16, sequence_id=5))
    second = await store.start_attempt(first.rollout_id)
    other = (second.rollout_id, second.attempt.attempt_id)
    assert list(await store.get_many_span_sequence_ids([key, other, key, other])) == [11, 1, 12, 2]
    spans = await store.query_spans(first.rollout_id, first.attempt.attempt_id)
    assert [span.sequence_id for span in spans] == [2, 5, 10]


async def test_spans_in_a_row_see_what_happened_between_them(store: LightningStore) -> None:
    """Whatever a store remembers of an attempt from one of its spans to the next."""
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    first = await claimed(store, "first", worker_id="w", config=config)
    numbers = [(await added(store, span_of(first, f"{i:016x}"))).sequence_id for i in range(1, 4)]
    assert numbers == [1, 2, 3]
    with pytest.raises(ConfigError):
        await store.add_span(span_of(first, "b" * 16, attributes={"no number": float("nan")}))
    good, bad = span_of(first, "c" * 16), span_of(first, "d" * 16, attributes={"no number": float("nan")})
    with pytest.raises(ConfigError):
        await store.add_many_spans([good, bad])
    assert (await added(store, span_of(first, "e" * 16))).sequence_id == 4
    assert await store.get_next_span_sequence_id(first.rollout_id, first.attempt.attempt_id) == 5
    assert (await added(store, span_of(first, "f" * 16))).sequence_id == 6
    await store.update_attempt(**ids(first), status="failed")
    second = await store.dequeue_rollout()
    assert second is not None
    assert second.rollout_id == first.rollout_id
    assert (await added(store, span_of(second, "a" * 16))).sequence_id == 1  # the rollout runs
    assert (await added(store, span_of(second, "b" * 16))).sequence_id == 2
    assert (await added(store, span_of(first, "aa" * 8))).sequence_id == 7  # late
    assert (await added(store, span_of(second, "c" * 16))).sequence_id == 3
    await store.update_rollout(first.rollout_id, status="cancelled")
    await store.add_span(span_of(second, "d" * 16))
    found = await store.get_rollout_by_id(first.rollout_id)
    assert found is not None
    assert found.status == "cancelled"
    many = [span_of(second, f"{i:016x}") for i in range(1, 5)] + [span_of(first, f"{i:016x}") for i in range(11, 13)]
    assert [span.sequence_id for span in await store.add_many_spans(many)] == [5, 6, 7, 8, 8, 9]


async def added(store: LightningStore, span: Span) -> Span:
    found = await store.add_span(span)
    assert found is not None
    return found


async def test_a_span_of_nobody_is_refused_and_nothing_is_added(store: LightningStore) -> None:
    rollout = await claimed(store)
    good = span_of(rollout)
    with pytest.raises(UnknownRollout, match="nowhere"):
        await store.add_many_spans([good, good.model_copy(update={"rollout_id": "nowhere"})])
    with pytest.raises(UnknownAttempt, match="at-no"):
        await store.add_many_spans([good, good.model_copy(update={"attempt_id": "at-no"})])
    with pytest.raises(UnknownRollout, match="nowhere"):
        await store.get_many_span_sequence_ids([("nowhere", "at")])
    with pytest.raises(UnknownAttempt, match="at-no"):
        await store.get_next_span_sequence_id(rollout.rollout_id, "at-no")
    assert len(await store.query_spans(rollout.rollout_id)) == 0
    assert (await store.get_latest_attempt(rollout.rollout_id)) == rollout.attempt


async def test_a_span_is_a_heartbeat_and_starts_the_attempt(store: LightningStore) -> None:
    rollout = await claimed(store)
    await store.add_span(span_of(rollout))
    now = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(now, AttemptedRollout)
    assert (now.status, now.attempt.status) == ("running", "running")
    assert now.attempt.last_heartbeat_time is not None
    assert now.attempt.last_heartbeat_time >= rollout.attempt.start_time


async def test_a_late_span_is_kept_and_changes_nothing_else(store: LightningStore) -> None:
    rollout = await claimed(store)
    await store.update_attempt(**ids(rollout), status="failed")
    before = await store.get_rollout_by_id(rollout.rollout_id)
    assert await store.add_span(span_of(rollout)) is not None
    assert await store.get_rollout_by_id(rollout.rollout_id) == before
    assert len(await store.query_spans(rollout.rollout_id)) == 1


async def test_a_span_of_a_superseded_attempt_does_not_move_the_rollout(store: LightningStore) -> None:
    old = await claimed(store)
    new = await store.start_attempt(old.rollout_id)
    await store.add_span(span_of(old))
    assert (await store.get_rollout_by_id(old.rollout_id)).status == "preparing"
    assert (await store.get_attempt_by_id(**ids(old))).status == "running"
    await store.update_attempt(**ids(old), status="succeeded")
    assert (await store.get_rollout_by_id(old.rollout_id)).status == "preparing"
    await store.update_attempt(**ids(new), status="failed")
    assert (await store.get_rollout_by_id(old.rollout_id)).status == "failed"


async def test_spans_are_found_by_attempt_filter_and_page(store: LightningStore) -> None:
    first = await claimed(store)
    parent = "9" * 16
    for i, name in enumerate(["chat", "Chat", "tool_100%", "tool"]):
        await store.add_span(
            span_of(first, f"{i:016x}", name=name, trace_id=f"{i % 2:032x}", parent_id=parent if i else None)
        )
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(span_of(second, "f" * 16, name="again"))
    query = store.query_spans
    key = first.rollout_id

    async def names(*args: Any, **kwargs: Any) -> list[str]:
        return [span.name for span in await query(key, *args, **kwargs)]

    assert await names("latest") == ["again"]
    assert await names(first.attempt.attempt_id) == ["chat", "Chat", "tool_100%", "tool"]
    assert sorted(await names()) == sorted(["again", "chat", "Chat", "tool_100%", "tool"])
    assert await names(name="chat") == ["chat"]
    assert await names(name_contains="hat") == ["chat", "Chat"]
    assert await names(name_contains="0%") == ["tool_100%"]
    assert await names(name_contains="tool", trace_id=f"{1:032x}") == ["tool"]
    assert await names(name="chat", span_id="f" * 16, filter_logic="or", sort_by="name") == ["again", "chat"]
    assert await names(parent_id=parent, sort_by="name", sort_order="desc") == ["tool_100%", "tool", "Chat"]
    assert await names(parent_id_contains="99", trace_id_contains="1", span_id_contains="3") == ["tool"]
    page = await query(key, first.attempt.attempt_id, limit=2, offset=1)
    assert ([span.name for span in page], page.total, page.limit, page.offset) == (["Chat", "tool_100%"], 4, 2, 1)
    assert [span.name for span in await query(key, first.attempt.attempt_id, offset=3)] == ["tool"]


@pytest.mark.parametrize(
    "bad", [{"limit": 0}, {"limit": -2}, {"offset": -1}, {"sort_by": "nonsense"}, {"sort_order": "up"}]
)
async def test_a_page_that_cannot_be_is_refused(store: LightningStore, bad: dict[str, Any]) -> None:
    rollout = await claimed(store)
    key = rollout.rollout_id
    queries = (store.query_rollouts, store.query_resources, store.query_workers)
    for query in (*queries, lambda **kw: store.query_spans(key, **kw), lambda **kw: store.query_attempts(key, **kw)):
        with pytest.raises(ConfigError, match=next(iter(bad)).replace("sort_by", "sort by")):
            await query(**bad)


async def test_a_filter_logic_that_is_unknown_is_refused(store: LightningStore) -> None:
    with pytest.raises(ConfigError, match="xor"):
        await store.query_rollouts(filter_logic="xor")  # pyright: ignore[reportArgumentType]


async def test_spans_of_the_latest_attempts_come_in_one_call(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    c = await store.enqueue_rollout("c")
    await store.add_many_spans([span_of(a, "1" * 16), span_of(b, "2" * 16), span_of(a, "3" * 16)])
    again = await store.start_attempt(b.rollout_id)
    await store.add_span(span_of(again, "4" * 16))
    found = await store.query_spans_of([a.rollout_id, b.rollout_id, c.rollout_id])
    assert {key: [span.span_id[0] for span in spans] for key, spans in found.items()} == {
        a.rollout_id: ["1", "3"],
        b.rollout_id: ["4"],
        c.rollout_id: [],
    }
    with pytest.raises(UnknownRollout, match="nowhere"):
        await store.query_spans_of([a.rollout_id, "nowhere"])


# ---- rollouts and attempts -------------------------------------------------------------------------------------------


async def test_unknown_ids_raise_everywhere(store: LightningStore) -> None:
    known = (await store.enqueue_rollout(1)).rollout_id
    for call in (
        store.get_rollout_by_id,
        store.query_attempts,
        store.get_latest_attempt,
        store.query_spans,
        store.update_rollout,
    ):
        with pytest.raises(UnknownRollout, match="nowhere"):
            await call("nowhere")
    for call in (store.get_attempt_by_id, store.update_attempt, store.query_spans):
        with pytest.raises(UnknownRollout, match="nowhere"):
            await call("nowhere", "at-no")
        with pytest.raises(UnknownAttempt, match="at-no"):
            await call(known, "at-no")
    with pytest.raises(UnknownAttempt, match="no attempt yet"):
        await store.update_attempt(known, "latest", status="running")
    with pytest.raises(UnknownResources, match="rs-no"):
        await store.get_resources_by_id("rs-no")
    with pytest.raises(UnknownResources, match="rs-no"):
        await store.update_rollout(known, resources_id="rs-no")
    with pytest.raises(UnknownWorker, match="w-no"):
        await store.get_worker_by_id("w-no")


async def test_a_rollout_that_was_not_claimed_has_no_latest_spans(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout(1)
    page = await store.query_spans(rollout.rollout_id, "latest", limit=5)
    assert (list(page), page.total, page.limit) == ([], 0, 5)
    with pytest.raises(UnknownRollout):
        await store.query_spans("nowhere", "latest")
    with pytest.raises(UnknownAttempt):
        await store.query_spans(rollout.rollout_id, "at-other")


async def test_what_a_request_says_can_be_said_as_keywords(store: LightningStore) -> None:
    request = EnqueueRolloutRequest(input=1, priority=2, rollout_id="r", pin="mine", metadata={"a": 1})
    fields = {name: getattr(request, name) for name in EnqueueRolloutRequest.model_fields}
    rollout = await store.enqueue_rollout(**fields)
    assert (rollout.rollout_id, rollout.priority, rollout.metadata) == ("r", 2, {"a": 1})
    assert await store.enqueue_rollout(**request.model_dump()) == rollout
    await store.update_rollout("r", status="cancelled")
    await store.enqueue_rollout("newer, so that the newest is not kept for its own sake")
    assert await store.prune(Retention(max_rollouts=0)) == 0
    await store.pin("mine", [])
    assert await store.prune(Retention(max_rollouts=0)) == 1


async def test_an_attempt_of_another_rollout_is_unknown(store: LightningStore) -> None:
    a, b = await claimed(store, "a"), await claimed(store, "b")
    with pytest.raises(UnknownAttempt):
        await store.get_attempt_by_id(a.rollout_id, b.attempt.attempt_id)


@pytest.mark.parametrize(("status", "rollout_status"), [("succeeded", "succeeded"), ("failed", "failed")])
async def test_the_rollout_follows_its_attempt(store: LightningStore, status: Any, rollout_status: str) -> None:
    rollout = await claimed(store)
    attempt = await store.update_attempt(rollout.rollout_id, "latest", status=status, metadata={"why": 1})
    now = await store.get_rollout_by_id(rollout.rollout_id)
    assert (attempt.status, attempt.metadata, now.status) == (status, {"why": 1}, rollout_status)
    assert attempt.end_time is not None
    assert now.end_time is not None
    assert now.finished


async def test_a_failed_attempt_is_tried_again_as_often_as_the_config_says(store: LightningStore) -> None:
    await store.enqueue_rollout("again", config=RolloutConfig(max_attempts=3, retry_condition=["failed"]))
    await store.enqueue_rollout("behind")
    for number in (1, 2, 3):
        rollout = await store.dequeue_rollout()
        assert rollout is not None
        assert (rollout.input, rollout.attempt.sequence_id) == ("again", number)  # at its old place
        await store.update_attempt(**ids(rollout), status="failed")
        now = await store.get_rollout_by_id(rollout.rollout_id)
        assert now.status == ("requeuing" if number < 3 else "failed")
    attempts = await store.query_attempts(now.rollout_id, sort_order="desc", limit=2)
    assert ([a.sequence_id for a in attempts], attempts.total) == ([3, 2], 3)


async def test_a_finished_attempt_stays_as_it_ended(store: LightningStore) -> None:
    rollout = await claimed(store)
    ended = await store.update_attempt(**ids(rollout), status="failed", metadata={"reason": "x"})
    assert await store.update_attempt(**ids(rollout), status="failed", metadata={"reason": "x"}) == ended
    for change in ({"status": "succeeded"}, {"status": "running"}, {"metadata": {"reason": "y"}}, {"worker_id": "w"}):
        with pytest.raises(IllegalTransition, match="failed"):
            await store.update_attempt(**ids(rollout), **change)  # pyright: ignore[reportArgumentType]
    assert await store.get_attempt_by_id(**ids(rollout)) == ended


async def test_metadata_of_an_attempt_is_merged(store: LightningStore) -> None:
    rollout = await claimed(store)
    await store.update_attempt(**ids(rollout), metadata={"a": 1, "b": 1})
    attempt = await store.update_attempt(**ids(rollout), metadata={"b": 2}, last_heartbeat_time=5.0, worker_id="w")
    assert (attempt.metadata, attempt.last_heartbeat_time, attempt.worker_id) == ({"a": 1, "b": 2}, 5.0, "w")
    assert attempt.status == "preparing"


async def test_a_query_for_more_ids_than_a_statement_takes_says_how_many_it_takes(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout("task")
    ids = [rollout.rollout_id, *(f"ro-{number}" for number in range(9_999))]
    assert len(await store.query_rollouts(rollout_id_in=ids)) == 1
    with pytest.raises(ConfigError, match="10,000 at a time"):
        await store.query_rollouts(rollout_id_in=[*ids, "one more"])


async def test_many_attempts_are_updated_at_once(store: LightningStore) -> None:
    a, b, c = [await claimed(store, n, config=RolloutConfig(max_attempts=2, retry_condition=["failed"])) for n in "abc"]
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[a.rollout_id], timeout=30))
    lines = [
        UpdateAttemptRequest(**ids(b), status="failed", metadata={"why": 1}),
        UpdateAttemptRequest(**ids(a), status="succeeded"),
        UpdateAttemptRequest(rollout_id=c.rollout_id, attempt_id="latest", worker_id="w", last_heartbeat_time=5.0),
    ]
    updated = await store.update_many_attempts(lines)
    assert [(attempt.rollout_id, attempt.status) for attempt in updated] == [
        (b.rollout_id, "failed"),
        (a.rollout_id, "succeeded"),
        (c.rollout_id, "preparing"),
    ]
    assert (updated[0].metadata, updated[2].worker_id, updated[2].last_heartbeat_time) == ({"why": 1}, "w", 5.0)
    for rollout, status in ((a, "succeeded"), (b, "requeuing"), (c, "preparing")):
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == status
    assert [rollout.rollout_id for rollout in await waiting] == [a.rollout_id]
    assert await store.update_many_attempts(lines) == updated
    assert await store.update_many_attempts([]) == []


async def test_of_many_updates_one_that_cannot_be_changes_nothing(store: LightningStore) -> None:
    ended, running = await claimed(store, "ended"), await claimed(store, "running")
    await store.update_attempt(**ids(ended), status="failed")
    good = UpdateAttemptRequest(**ids(running), status="succeeded")
    for bad, error in (
        (UpdateAttemptRequest(**ids(ended), status="succeeded"), IllegalTransition),
        (UpdateAttemptRequest(rollout_id=running.rollout_id, attempt_id="nobody"), UnknownAttempt),
        (UpdateAttemptRequest(rollout_id="nobody", attempt_id="latest"), UnknownRollout),
        (UpdateAttemptRequest(rollout_id=running.rollout_id, attempt_id="latest", status="succeeded"), ConfigError),
    ):
        with pytest.raises(error):
            await store.update_many_attempts([good, bad])
        assert (await store.get_attempt_by_id(**ids(running))).status == "preparing"


async def test_a_cancelled_rollout_stays_cancelled(store: LightningStore) -> None:
    rollout = await claimed(store, config=RolloutConfig(max_attempts=5, retry_condition=["failed"]))
    cancelled = await store.update_rollout(rollout.rollout_id, status="cancelled")
    assert cancelled.end_time is not None
    await store.add_span(span_of(rollout))
    await store.update_attempt(**ids(rollout), status="failed")
    now = await store.get_rollout_by_id(rollout.rollout_id)
    assert (now.status, now.end_time) == ("cancelled", cancelled.end_time)
    for status in ("queuing", "running", "succeeded", "failed", "requeuing"):
        with pytest.raises(IllegalTransition, match="cancelled"):
            await store.update_rollout(rollout.rollout_id, status=status)
    assert (await store.update_rollout(rollout.rollout_id, status="cancelled")).end_time == cancelled.end_time


async def test_a_cancelled_rollout_leaves_the_queue(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout(1)
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    assert await store.dequeue_rollout() is None


async def test_a_rollout_changes_only_where_something_is_given(store: LightningStore) -> None:
    resources = await store.add_resources({"p": PromptTemplate(template="x")})
    rollout = await store.enqueue_rollout("a", mode="train", metadata={"m": 1})
    assert await store.update_rollout(rollout.rollout_id) == rollout
    config = RolloutConfig(max_attempts=4, unresponsive_seconds=3)
    now = await store.update_rollout(rollout.rollout_id, input=None, mode=None, config=config, metadata={"n": 2})
    assert (now.input, now.mode, now.config, now.metadata) == (None, None, config, {"n": 2})
    assert (now.resources_id, now.status) == (resources.resources_id, "queuing")
    assert (await store.update_rollout(rollout.rollout_id, resources_id=None)).resources_id is None


async def test_a_refused_change_changes_nothing(store: LightningStore) -> None:
    rollout = await claimed(store)
    with pytest.raises(UnknownResources):
        await store.update_rollout(rollout.rollout_id, status="cancelled", resources_id="rs-no")
    with pytest.raises(IllegalTransition):
        await store.update_rollout(rollout.rollout_id, input="new", status="queuing")
    assert await store.get_rollout_by_id(rollout.rollout_id) == rollout


async def test_a_rollout_requeued_by_hand_is_claimed_again(store: LightningStore) -> None:
    rollout = await claimed(store)
    assert (await store.update_rollout(rollout.rollout_id, status="requeuing")).status == "requeuing"
    again = await store.dequeue_rollout()
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_rollouts_are_found_by_filter_order_and_page(store: LightningStore) -> None:
    for name, mode in (("ro-a1", "train"), ("ro-a2", "val"), ("ro-b1", "train"), ("ro-b2", None)):
        await store.enqueue_rollout(name, mode=mode, rollout_id=name)  # pyright: ignore[reportArgumentType]
    await store.dequeue_many_rollouts(limit=2)
    await store.update_rollout("ro-a1", status="cancelled")

    async def found(**kwargs: Any) -> list[str]:
        return [rollout.rollout_id for rollout in await store.query_rollouts(**kwargs)]

    assert await found() == ["ro-a1", "ro-a2", "ro-b1", "ro-b2"]
    assert await found(status_in=["queuing"]) == ["ro-b1", "ro-b2"]
    assert await found(status_in=[]) == []
    assert await found(rollout_id_in=["ro-b1", "ro-a1", "no"]) == ["ro-a1", "ro-b1"]
    assert await found(rollout_id_contains="a", mode_in=["val"]) == ["ro-a2"]
    assert await found(rollout_id_in=["ro-b2"], mode_in=["val"], filter_logic="or") == ["ro-a2", "ro-b2"]
    assert await found(sort_by="rollout_id", sort_order="desc") == ["ro-b2", "ro-b1", "ro-a2", "ro-a1"]
    assert (await found(sort_by="end_time"))[0] == "ro-a1"
    assert await found(sort_by="mode", limit=1, offset=2) == ["ro-a2"]
    page = await store.query_rollouts(status_in=["queuing"], limit=1)
    assert (len(page), page.total) == (1, 2)
    with_attempt = await store.query_rollouts(rollout_id_in=["ro-a2", "ro-b1"])
    assert [isinstance(rollout, AttemptedRollout) for rollout in with_attempt] == [True, False]


# ---- time ------------------------------------------------------------------------------------------------------------


async def test_an_attempt_whose_time_is_over_ends_as_timeout(store: LightningStore) -> None:
    rollout = await claimed(store, worker_id="w", config=RolloutConfig(timeout_seconds=10))
    start = rollout.attempt.start_time
    assert list(await store.sweep(start + 9)) == []
    (ended,) = await store.sweep(start + 11)
    assert (ended.attempt_id, ended.status, ended.end_time) == (rollout.attempt.attempt_id, "timeout", start + 11)
    now = await store.get_rollout_by_id(rollout.rollout_id)
    assert (now.status, now.end_time) == ("failed", start + 11)
    assert (await store.get_worker_by_id("w")).status == "unknown"
    assert list(await store.sweep(start + 99)) == []


async def test_a_silent_attempt_is_unresponsive_until_its_next_span(store: LightningStore) -> None:
    config = RolloutConfig(unresponsive_seconds=10, max_attempts=2, retry_condition=["unresponsive"])
    rollout = await claimed(store, worker_id="w", config=config)
    start = rollout.attempt.start_time
    (silent,) = await store.sweep(start + 11)
    assert (silent.status, silent.end_time) == ("unresponsive", None)
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"
    assert list(await store.sweep(start + 22)) == []
    await store.add_span(span_of(rollout))
    now = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(now, AttemptedRollout)
    assert (now.status, now.attempt.status) == ("running", "running")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_attempt_id) == ("busy", rollout.attempt.attempt_id)
    assert await store.dequeue_rollout() is None


async def test_a_heartbeat_keeps_an_attempt_alive(store: LightningStore) -> None:
    rollout = await claimed(store, config=RolloutConfig(unresponsive_seconds=10))
    start = rollout.attempt.start_time
    await store.update_attempt(**ids(rollout), last_heartbeat_time=start + 8)
    assert list(await store.sweep(start + 17)) == []
    assert [attempt.status for attempt in await store.sweep(start + 19)] == ["unresponsive"]


async def test_a_timeout_is_retried_where_the_config_says_so(store: LightningStore) -> None:
    rollout = await claimed(store, config=RolloutConfig(timeout_seconds=1, max_attempts=2, retry_condition=["timeout"]))
    await store.sweep(rollout.attempt.start_time + 2)
    again = await store.dequeue_rollout()
    assert again is not None
    await store.sweep(again.attempt.start_time + 2)
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "failed"


async def test_the_zombie_of_a_superseded_attempt_cannot_decide(store: LightningStore) -> None:
    config = RolloutConfig(unresponsive_seconds=1, max_attempts=2, retry_condition=["unresponsive"])
    zombie = await claimed(store, config=config)
    await store.sweep(zombie.attempt.start_time + 2)
    fresh = await store.dequeue_rollout()
    assert fresh is not None
    await store.update_attempt(**ids(zombie), status="succeeded")
    assert (await store.get_rollout_by_id(zombie.rollout_id)).status == "preparing"
    await store.update_attempt(**ids(fresh), status="failed")
    assert (await store.get_rollout_by_id(zombie.rollout_id)).status == "failed"


async def test_released_claims_are_queued_again_and_do_not_count(store: LightningStore) -> None:
    rollout = await claimed(store, "mine", worker_id="w")
    done = await claimed(store, "done")
    await store.update_attempt(**ids(done), status="succeeded")
    cancelled = await claimed(store, "cancelled")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.enqueue_rollout("behind")
    assert list(await store.release_claims()) == [rollout.rollout_id]
    assert list(await store.release_claims()) == []
    attempt = await store.get_attempt_by_id(**ids(rollout))
    assert (attempt.status, attempt.metadata["reason_kind"]) == ("failed", "interrupted")
    assert attempt.end_time is not None
    assert (await store.get_attempt_by_id(**ids(cancelled))).status == "failed"
    assert (await store.get_rollout_by_id(cancelled.rollout_id)).status == "cancelled"
    assert (await store.get_worker_by_id("w")).status == "idle"
    again = await store.dequeue_rollout()
    assert again is not None
    assert (again.input, again.attempt.sequence_id) == ("mine", 2)


async def test_a_claim_that_was_asked_for_again_is_undone_only_by_who_is_certain(store: LightningStore) -> None:
    await store.enqueue_rollout("work")
    for repeated in (False, True):
        claim_id = f"claim-{repeated}"
        (rollout,) = await store.dequeue_many_rollouts(claim_id=claim_id)
        if repeated:
            await store.dequeue_many_rollouts(claim_id=claim_id)
        await store.undo_claim(claim_id, unless_repeated=True)
        status = (await store.get_rollout_by_id(rollout.rollout_id)).status
        assert status == ("preparing" if repeated else "queuing")
    await store.undo_claim("claim-True")
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "queuing"


async def test_claims_are_released_worker_by_worker(store: LightningStore) -> None:
    mine, other, nobodys = [await claimed(store, worker_id=worker) for worker in ("mine", "other", None)]
    assert list(await store.release_claims(worker_ids=["mine", "unknown"])) == [mine.rollout_id]
    assert [(await store.get_rollout_by_id(r.rollout_id)).status for r in (mine, other, nobodys)] == [
        "requeuing",
        "preparing",
        "preparing",
    ]
    assert list(await store.release_claims(worker_ids=[])) == []


async def test_an_interrupted_attempt_leaves_all_the_tries_there_were(store: LightningStore) -> None:
    await store.enqueue_rollout(1, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    await store.dequeue_rollout()
    await store.release_claims()
    statuses: list[str] = []
    while (rollout := await store.dequeue_rollout()) is not None:
        await store.update_attempt(**ids(rollout), status="failed")
        statuses.append((await store.get_rollout_by_id(rollout.rollout_id)).status)
    assert statuses == ["requeuing", "failed"]


async def test_an_attempt_that_is_reported_as_interrupted_is_queued_again_and_does_not_count(
    store: LightningStore,
) -> None:
    await store.enqueue_rollout(1, config=RolloutConfig(max_attempts=1))
    interruption = {"reason_kind": "interrupted", "reason": "somebody else's fault"}
    for sequence_id in (1, 2, 3):
        rollout = await store.dequeue_rollout(worker_id="w")
        assert rollout is not None
        assert rollout.attempt.sequence_id == sequence_id
        reported = await store.update_attempt(**ids(rollout), status="failed", metadata=interruption)
        assert reported.interrupted
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"
        assert (await store.get_worker_by_id("w")).status == "idle"
        assert await store.update_attempt(**ids(rollout), status="failed", metadata=interruption) == reported
    last = await store.dequeue_rollout()
    assert last is not None
    await store.update_attempt(**ids(last), status="failed", metadata={"reason_kind": "exception"})
    assert (await store.get_rollout_by_id(last.rollout_id)).status == "failed"
    statuses = [attempt.interrupted for attempt in await store.query_attempts(last.rollout_id)]
    assert statuses == [True, True, True, False]


async def test_an_interruption_wakes_who_waits_for_work_and_leaves_what_is_over_or_superseded(
    store: LightningStore,
) -> None:
    interruption: dict[str, Any] = {"status": "failed", "metadata": {"reason_kind": "interrupted"}}
    rollout = await claimed(store)
    waiting = asyncio.create_task(store.dequeue_rollout(timeout_seconds=20))
    await asyncio.sleep(0)
    await store.update_attempt(**ids(rollout), **interruption)
    again = await waiting
    assert again is not None
    newest = await store.start_attempt(rollout.rollout_id)
    await store.update_attempt(**ids(again), **interruption)  # superseded
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "preparing"
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    await store.update_attempt(**ids(newest), **interruption)
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "cancelled"


# ---- resources -------------------------------------------------------------------------------------------------------


async def test_resources_come_back_as_their_own_kind(store: LightningStore) -> None:
    assert await store.get_latest_resources() is None
    resources = {
        "llm": LLM(endpoint="http://x/v1", model="m", sampling_parameters={"temperature": 0.5}),
        "proxy": ProxyLLM(endpoint="http://y/v1", model="n"),
        "prompt": PromptTemplate(template="{q}"),
    }
    written = await store.add_resources(resources)  # pyright: ignore[reportArgumentType]
    assert (written.version, written.resources) == (1, resources)
    found = await store.get_resources_by_id(written.resources_id)
    assert found == written
    assert [type(value) for value in found.resources.values()] == [LLM, ProxyLLM, PromptTemplate]


async def test_the_resources_written_last_are_the_latest(store: LightningStore) -> None:
    first = await store.add_resources({"p": PromptTemplate(template="1")})
    second = await store.add_resources({"p": PromptTemplate(template="2")}, resources_id="named")
    assert await store.get_latest_resources() == second
    again = await store.update_resources(first.resources_id, {"p": PromptTemplate(template="3")})
    assert (again.version, again.create_time) == (2, first.create_time)
    assert await store.get_latest_resources() == again
    assert await store.get_resources_by_id(first.resources_id) == again
    assert (await store.update_resources("new", {})).version == 1
    everything = await store.query_resources()
    assert [(r.resources_id, r.version) for r in everything] == [("named", 1), (first.resources_id, 2), ("new", 1)]
    assert everything.total == 3
    assert [r.resources_id for r in await store.query_resources(resources_id_contains="n", limit=1)] == ["named"]
    assert [r.version for r in await store.query_resources(resources_id=first.resources_id)] == [2]


async def test_resources_written_twice_are_written_once(store: LightningStore) -> None:
    first = await store.add_resources({"p": PromptTemplate(template="1")}, resources_id="mine")
    await store.add_resources({"p": PromptTemplate(template="2")})
    assert await store.add_resources({"p": PromptTemplate(template="1")}, resources_id="mine") == first
    with pytest.raises(ConfigError, match="update_resources"):
        await store.add_resources({"p": PromptTemplate(template="other")}, resources_id="mine")


# ---- workers ---------------------------------------------------------------------------------------------------------


async def test_a_worker_is_busy_from_claim_to_end_and_idle_otherwise(store: LightningStore) -> None:
    assert await store.dequeue_rollout("w") is None
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id) == ("idle", None)
    assert worker.last_idle_time == worker.last_dequeue_time is not None
    rollout = await claimed(store, worker_id="w")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id) == ("busy", rollout.rollout_id)
    assert worker.current_attempt_id == rollout.attempt.attempt_id
    assert worker.last_busy_time is not None
    await store.update_attempt(**ids(rollout), status="succeeded")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id, worker.current_attempt_id) == ("idle", None, None)


async def test_the_end_of_an_old_attempt_does_not_free_a_worker_that_has_a_new_one(store: LightningStore) -> None:
    old = await claimed(store, "old", worker_id="w")
    new = await claimed(store, "new", worker_id="w")
    await store.update_attempt(**ids(old), status="succeeded")
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_attempt_id) == ("busy", new.attempt.attempt_id)


async def test_an_attempt_that_changes_hands_changes_its_workers(store: LightningStore) -> None:
    rollout = await claimed(store, worker_id="a")
    await store.update_attempt(**ids(rollout), worker_id="b")
    assert (await store.get_worker_by_id("a")).status == "idle"
    assert (await store.get_worker_by_id("b")).current_rollout_id == rollout.rollout_id


async def test_a_heartbeat_makes_a_worker_known_and_keeps_its_figures(store: LightningStore) -> None:
    worker = await store.update_worker("w", heartbeat_stats={"cpu": 0.5})
    assert (worker.status, worker.heartbeat_stats) == ("unknown", {"cpu": 0.5})
    assert worker.last_heartbeat_time is not None
    assert (await store.update_worker("w")).heartbeat_stats == {"cpu": 0.5}
    assert await store.get_worker_by_id("w") == (await store.query_workers())[0]


async def test_a_worker_that_is_paused_hears_of_it_with_its_heartbeat_and_nothing_else_changes(
    store: LightningStore,
) -> None:
    before = await store.update_worker("w", {"pid": 1})
    assert not before.paused
    assert await store.pause_worker("w") == before.model_copy(update={"paused": True})
    assert (await store.pause_worker("w", True)).paused
    assert (await store.update_worker("w")).paused
    assert [worker.paused for worker in await store.query_workers()] == [True]
    rollout = await claimed(store, worker_id="w")  # it is asked, not forced
    assert rollout.attempt.worker_id == "w"
    assert not (await store.pause_worker("w", paused=False)).paused
    assert not (await store.get_worker_by_id("w")).paused
    with pytest.raises(UnknownWorker, match="w-no"):
        await store.pause_worker("w-no")


async def test_workers_are_found_by_filter_and_page(store: LightningStore) -> None:
    for name in ("a1", "a2", "b1"):
        await store.update_worker(name)
    await store.dequeue_rollout("b1")

    async def found(**kwargs: Any) -> list[str]:
        return [worker.worker_id for worker in await store.query_workers(**kwargs)]

    assert await found() == ["a1", "a2", "b1"]
    assert await found(status_in=["idle"]) == ["b1"]
    assert await found(worker_id_contains="a", sort_by="worker_id", sort_order="desc") == ["a2", "a1"]
    assert await found(status_in=["idle"], worker_id_contains="a1", filter_logic="or") == ["a1", "b1"]
    assert (await store.query_workers(limit=1, offset=1)).total == 3


# ---- the store itself ------------------------------------------------------------------------------------------------


async def test_statistics_count_everything(store: LightningStore) -> None:
    rollout = await claimed(store, worker_id="w")
    await store.enqueue_rollout(2)
    await store.add_many_spans([span_of(rollout, "1" * 16), span_of(rollout, "2" * 16)])
    resources = await store.add_resources({})
    await store.update_resources(resources.resources_id, {})
    found = await store.statistics()
    assert found["rollouts_by_status"] == {"running": 1, "queuing": 1}
    totals = [found[f"total_{noun}"] for noun in ("rollouts", "attempts", "spans", "resources", "workers")]
    assert totals == [2, 1, 2, 1, 1]
    assert found["uptime_seconds"] >= 0


async def test_a_closed_store_says_so(store: LightningStore) -> None:
    waiting = [
        asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON)),
        asyncio.create_task(
            store.wait_for_rollouts(rollout_ids=[(await store.start_rollout(1)).rollout_id], timeout=SOON)
        ),
    ]
    await asyncio.sleep(0.02)
    await store.close()
    await store.close()
    for call in (store.dequeue_rollout, store.statistics, store.query_rollouts, *waiting):
        with pytest.raises(StoreClosed, match=store.url.partition(":")[0]):
            await (call() if callable(call) else call)
