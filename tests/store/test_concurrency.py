"""Many threads, loops and cancelled tasks: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError, StoreClosed
from leyden.store import LightningStore, LightningStoreClient, SqliteLightningStore, Sweeper
from leyden.store.sql.body import spans
from leyden.store.sql.sql_store import SqlLightningStore
from leyden.testing import audit_store
from leyden.types import EnqueueRolloutRequest, RolloutConfig, Span

SOON = 10.0


@pytest.fixture
async def file_store(tmp_path: Path) -> AsyncIterator[SqliteLightningStore]:
    async with SqliteLightningStore(tmp_path / "x.db", durability="power") as store:
        yield store


class Hold:
    """An operation that keeps the writer thread busy until it is released."""

    def __init__(self, store: SqliteLightningStore) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.task = asyncio.ensure_future(store._driver.write(self, (), {}))

    def __call__(self, tx: Any) -> None:
        tx.expect(None)  # in the thread
        self.entered.set()
        assert self.release.wait(30)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def test_operations_that_wait_together_are_committed_together(file_store: SqliteLightningStore) -> None:
    hold = Hold(file_store)
    await until(hold.entered)
    good = [asyncio.create_task(file_store.enqueue_rollout(i)) for i in range(20)]
    bad = asyncio.create_task(file_store.enqueue_rollout(object()))
    more = [asyncio.create_task(file_store.enqueue_rollout(i)) for i in range(20, 40)]
    await asyncio.sleep(0.01)
    hold.release.set()
    await asyncio.gather(*good, *more)
    with pytest.raises(ConfigError):
        await bad
    assert [rollout.input for rollout in await file_store.query_rollouts()] == list(range(40))


@pytest.mark.parametrize("together", [False, True])
async def test_what_a_failed_operation_counted_is_forgotten(file_store: SqliteLightningStore, together: bool) -> None:
    rollout = await file_store.start_rollout(1)

    def span(number: int) -> Span:
        return Span(
            rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, sequence_id=0, trace_id="f" * 32,
            span_id=f"{number:016x}", name="step",
        )  # fmt: skip

    def breaks(tx: Any) -> None:
        spans.add_span(tx, span(2))
        raise RuntimeError("on the way")

    def calls() -> list[Any]:
        add = file_store.add_span
        return [add(span(1)), file_store._driver.write(breaks, (), {}), add(span(2)), add(span(3))]

    if together:
        hold = Hold(file_store)
        await until(hold.entered)
        waiting = [asyncio.create_task(call) for call in calls()]
        await asyncio.sleep(0.01)
        hold.release.set()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    else:
        answers = [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls()]
    assert isinstance(answers.pop(1), RuntimeError)
    assert [added.sequence_id for added in answers] == [1, 2, 3]
    assert [found.span_id for found in await file_store.query_spans(rollout.rollout_id)] == [
        span(n).span_id for n in (1, 2, 3)
    ]


async def test_a_claim_cancelled_before_the_writer_took_it_claims_nothing(file_store: SqliteLightningStore) -> None:
    await file_store.enqueue_rollout(1)
    hold = Hold(file_store)
    await until(hold.entered)
    claim = asyncio.create_task(file_store.dequeue_rollout())
    await asyncio.sleep(0.01)
    claim.cancel()
    hold.release.set()
    await hold.task
    assert [rollout.status for rollout in await file_store.query_rollouts()] == ["queuing"]


async def test_a_claim_cancelled_while_it_was_committed_is_handed_back(file_store: SqliteLightningStore) -> None:
    await file_store.enqueue_rollout("first")
    await file_store.enqueue_rollout("second")
    before = Hold(file_store)
    await until(before.entered)
    claim = asyncio.create_task(file_store.dequeue_rollout("w"))
    await asyncio.sleep(0.01)
    behind = Hold(file_store)  # in the same batch: the claim is done and not committed while this one holds
    await asyncio.sleep(0.01)
    before.release.set()
    await until(behind.entered)
    claim.cancel()
    behind.release.set()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await behind.task
    await file_store.enqueue_rollout("third")  # a write: it comes after the hand-back
    again = await file_store.dequeue_many_rollouts(limit=3)
    assert [(r.input, r.attempt.sequence_id) for r in again] == [("first", 1), ("second", 1), ("third", 1)]
    assert (await file_store.get_worker_by_id("w")).status == "idle"
    assert (await file_store.statistics())["total_attempts"] == 3


async def test_a_claim_cancelled_after_its_answer_and_before_its_task_went_on_is_handed_back(
    file_store: SqliteLightningStore,
) -> None:
    async def enqueue_and_cancel() -> None:
        await file_store.enqueue_rollout("only")
        claim.cancel()

    hold = Hold(file_store)
    await until(hold.entered)
    first = asyncio.create_task(enqueue_and_cancel())  # both are answered by one call, this one first
    claim = asyncio.create_task(file_store.dequeue_rollout())
    await asyncio.sleep(0.01)
    hold.release.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await claim
    again = await file_store.dequeue_rollout(timeout_seconds=SOON)
    assert again is not None
    assert again.attempt.sequence_id == 1


async def test_a_claim_that_was_asked_for_again_is_not_handed_back(file_store: SqliteLightningStore) -> None:
    """The first answer reached nobody, and is taken back after the second was given."""
    await file_store.enqueue_rollout("only")
    before = Hold(file_store)
    await until(before.entered)
    claim = asyncio.create_task(file_store.dequeue_rollout("w", claim_id="mine"))
    await asyncio.sleep(0.01)
    behind = Hold(file_store)
    await asyncio.sleep(0.01)
    before.release.set()
    await until(behind.entered)
    claim.cancel()
    again = asyncio.create_task(file_store.dequeue_rollout("w", claim_id="mine"))
    await asyncio.sleep(0.01)
    behind.release.set()
    with pytest.raises(asyncio.CancelledError):
        await claim
    found = await again
    assert found is not None
    await file_store.enqueue_rollout("next")  # a write: it comes after the hand-back
    assert await file_store.get_latest_attempt(found.rollout_id) == found.attempt
    await file_store.undo_claim("mine")
    assert [r.attempt.sequence_id for r in await file_store.dequeue_many_rollouts(limit=9)] == [1, 1]
    assert await audit_store(file_store) == []


async def test_a_claim_handed_back_wakes_whoever_waits(file_store: SqliteLightningStore) -> None:
    await file_store.enqueue_rollout("only")
    before = Hold(file_store)
    await until(before.entered)
    claim = asyncio.create_task(file_store.dequeue_rollout())
    await asyncio.sleep(0.01)
    behind = Hold(file_store)
    waiting = asyncio.create_task(file_store.dequeue_rollout(timeout_seconds=SOON))
    await asyncio.sleep(0.01)
    before.release.set()
    await until(behind.entered)
    claim.cancel()
    behind.release.set()
    found = await waiting
    assert found is not None
    assert found.attempt.sequence_id == 1
    await behind.task


@pytest.mark.parametrize("seed", range(3))
async def test_no_rollout_is_lost_whenever_claims_are_cancelled(store: LightningStore, seed: int) -> None:
    n = 60
    chance = random.Random(seed)
    taken: list[Any] = []

    async def take() -> None:
        for rollout in await store.dequeue_many_rollouts(limit=chance.randint(1, 3), timeout_seconds=SOON):
            taken.append(rollout.input)

    async def produce() -> None:
        for i in range(n):
            await store.enqueue_rollout(i)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.002)

    producer = asyncio.create_task(produce())
    tasks: list[asyncio.Task[None]] = []
    for _ in range(3 * n):
        tasks.append(asyncio.create_task(take()))
        await asyncio.sleep(chance.random() * 0.0005)
        if chance.random() < 0.7:
            chance.choice(tasks).cancel()
    await producer
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while rollout := await store.dequeue_rollout(timeout_seconds=0.1):
        assert rollout.attempt.sequence_id == 1
        taken.append(rollout.input)
    assert sorted(taken) == list(range(n))


async def test_nothing_stays_behind_of_those_who_waited(store: SqlLightningStore) -> None:
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(5)])
    wanted = [rollout.rollout_id for rollout in rollouts]
    waits = [asyncio.create_task(store.wait_for_rollouts(rollout_ids=wanted, timeout=SOON)) for _ in range(3)]
    waits.append(asyncio.create_task(store.wait_for_any_rollout(rollout_ids=wanted, timeout=0.01)))
    await asyncio.sleep(0.02)
    await store.update_rollout(wanted[0], status="cancelled")
    waits[0].cancel()
    for rollout_id in wanted[1:]:
        await store.update_rollout(rollout_id, status="cancelled")
    await asyncio.gather(*waits, return_exceptions=True)
    await store.dequeue_rollout(timeout_seconds=0.01)
    signals = store._signals
    assert (signals._claims, signals._rollouts) == ({}, {})


async def test_a_waiter_on_a_closed_loop_hurts_nobody(store: LightningStore) -> None:
    if isinstance(store, LightningStoreClient):
        pytest.skip("a loop that is closed under open connections warns of them")

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(store.dequeue_rollout(timeout_seconds=SOON))
        loop.run_until_complete(asyncio.sleep(0.02))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        abandoned.append(task)
        loop.close()

    abandoned: list[Any] = []
    await asyncio.to_thread(abandon)
    await store.enqueue_rollout(1)
    assert await store.dequeue_rollout(timeout_seconds=SOON) is not None


async def test_many_loops_write_at_once(store: LightningStore) -> None:
    rollout = await store.start_rollout("shared")
    drawn: list[int] = []

    async def write(worker: int) -> None:
        async def one(i: int) -> None:
            span = Span(
                rollout_id=rollout.rollout_id,
                attempt_id=rollout.attempt.attempt_id,
                sequence_id=0,
                trace_id="t",
                span_id=f"{worker}-{i}",
                name="n",
            )
            added = await store.add_span(span)
            assert added is not None
            drawn.append(added.sequence_id)

        await asyncio.gather(*(one(i) for i in range(50)))

    threads = [threading.Thread(target=lambda k=k: asyncio.run(write(k))) for k in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert sorted(drawn) == list(range(1, 201))
    spans = await store.query_spans(rollout.rollout_id)
    assert [span.sequence_id for span in spans] == list(range(1, 201))


async def test_a_claim_cancelled_while_the_store_closes_is_handed_back(file_store: SqliteLightningStore) -> None:
    await file_store.enqueue_rollout("only")
    before = Hold(file_store)
    await until(before.entered)
    claim = asyncio.create_task(file_store.dequeue_rollout())
    await asyncio.sleep(0.01)
    behind = Hold(file_store)
    await asyncio.sleep(0.01)
    before.release.set()
    await until(behind.entered)
    claim.cancel()
    closing = asyncio.create_task(file_store.close())
    await asyncio.sleep(0.01)
    behind.release.set()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await closing
    async with SqliteLightningStore(file_store.path) as again:
        assert [rollout.status for rollout in await again.query_rollouts()] == ["queuing"]


async def test_what_was_accepted_before_closing_is_done(file_store: SqliteLightningStore) -> None:
    hold = Hold(file_store)
    await until(hold.entered)
    writes = [asyncio.create_task(file_store.enqueue_rollout(i)) for i in range(10)]
    await asyncio.sleep(0.01)
    closing = [asyncio.create_task(file_store.close()) for _ in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(StoreClosed):
        await file_store.enqueue_rollout("late")
    hold.release.set()
    await asyncio.gather(*closing, *writes)
    async with SqliteLightningStore(file_store.path) as again:
        assert len(await again.query_rollouts()) == 10


# ---- the sweeper -----------------------------------------------------------------------------------------------------


async def test_the_sweeper_ends_what_is_overdue(store: SqlLightningStore, caplog: pytest.LogCaptureFixture) -> None:
    rollout = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=0.05))
    async with Sweeper(store, interval_seconds=0.02):
        finished = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=SOON)
        for _ in range(1000):
            if rollout.attempt.attempt_id in caplog.text:
                break
            await asyncio.sleep(0.01)
    assert rollout.attempt.attempt_id in caplog.text
    assert [found.status for found in finished] == ["failed"]
    assert await store.next_deadline() is None


async def test_the_next_deadline_is_the_earliest(store: SqlLightningStore) -> None:
    assert await store.next_deadline() is None
    slow = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=100))
    assert await store.next_deadline() == slow.attempt.start_time + 100
    quiet = await store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=10))
    assert await store.next_deadline() == quiet.attempt.start_time + 10
    await store.sweep(quiet.attempt.start_time + 11)
    assert await store.next_deadline() == slow.attempt.start_time + 100


async def test_a_sweeper_ends_with_its_store(store: SqlLightningStore) -> None:
    async with Sweeper(store, interval_seconds=0.01) as sweeper:
        await store.close()
        await asyncio.wait_for(asyncio.gather(*sweeper._tasks), SOON)
