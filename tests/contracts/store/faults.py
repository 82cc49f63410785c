"""What every store must do when workers race, wake up late or vanish, and when the clock is wrong."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from leyden.errors import ConfigError, IllegalTransition, StoreClosed, UnknownRollout
from leyden.store import LightningStore
from leyden.testing import audit_store
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, Retention, RolloutConfig, UpdateAttemptRequest
from tests.contracts.store.support import SOON, claimed, ids, span_of
from tests.machine_clock import MachineClock

# ---- racing ----------------------------------------------------------------------------------------------------------


async def in_threads(count: int, work: Any) -> None:
    """Run `work(number)` in `count` threads with event loops of their own, all at once."""
    start = threading.Barrier(count)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            start.wait(SOON)
            asyncio.run(work(number))
        except BaseException as error:  # noqa: BLE001 -- raised where the test can see it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    for error in failed:
        raise error


async def test_of_many_workers_that_race_for_a_rollout_one_wins(store: LightningStore) -> None:
    winners: list[tuple[int, str]] = []

    async def race(number: int) -> None:
        for _ in range(10):
            won = await store.dequeue_rollout(f"w{number}", timeout_seconds=0.05)
            if won is not None:
                winners.append((won.input, won.attempt.attempt_id))

    async def feed() -> None:
        for number in range(20):
            await store.enqueue_rollout(number)
            await asyncio.sleep(0.002)

    await asyncio.gather(in_threads(4, race), feed())
    assert sorted(task for task, _ in winners) == list(range(20))
    assert await audit_store(store) == []


async def test_any_calls_at_once_leave_a_legal_store(store: LightningStore) -> None:
    """Four threads call at random, also what the lifecycle forbids: each call does all it says or nothing."""
    names = [f"ro-{number}" for number in range(12)]
    config = RolloutConfig(max_attempts=3, retry_condition=["failed", "timeout"], timeout_seconds=50.0)

    async def any_call(chance: random.Random, worker_id: str, mine: list[AttemptedRollout]) -> None:
        attempts = chance.sample(mine, min(len(mine), 3))
        status: Any = chance.choice(["running", "succeeded", "failed", "failed"])
        match chance.randrange(9):
            case 0 | 1:
                requests = [
                    EnqueueRolloutRequest(input=1, rollout_id=n, config=config) for n in chance.sample(names, 2)
                ]
                await store.enqueue_many_rollouts(requests)
            case 2 | 3:
                mine += await store.dequeue_many_rollouts(limit=2, worker_id=worker_id)
            case 4 | 5:
                await store.add_many_spans([span_of(one, f"s{chance.randrange(9)}") for one in attempts * 2])
            case 6:
                await store.update_many_attempts([UpdateAttemptRequest(**ids(one), status=status) for one in attempts])
            case 7:
                status = chance.choice(["cancelled", "requeuing", "succeeded"])
                await store.update_rollout(chance.choice(names), status=status)
            case _:
                await store.sweep(time.time() + chance.choice([0.0, 100.0]))

    async def call(number: int) -> None:
        chance = random.Random(number)
        mine: list[AttemptedRollout] = []
        for _ in range(100):
            with suppress(IllegalTransition, UnknownRollout, ConfigError):
                await any_call(chance, f"w{number}", mine)

    await in_threads(4, call)
    assert await audit_store(store) == []
    counts = await store.statistics()
    assert counts["total_rollouts"] == len(names)
    assert counts["total_attempts"] > len(names)
    assert counts["total_spans"] > len(names)


async def test_the_same_call_made_by_many_at_once_is_one_row(store: LightningStore) -> None:
    attempted: list[str] = []

    async def make(number: int) -> None:
        await store.enqueue_rollout(0, rollout_id="shared", config=RolloutConfig(max_attempts=9))
        again = await store.start_attempt("shared", f"w{number}", attempt_id="only")
        attempted.append(again.attempt.worker_id or "")
        await store.add_span(span_of(again))
        claimed_again = await store.dequeue_many_rollouts(limit=9, claim_id="mine")
        assert [rollout.rollout_id for rollout in claimed_again] == [f"q{n}" for n in range(6)]

    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, rollout_id=f"q{n}") for n in range(6)])
    await store.start_rollout(0, rollout_id="shared", attempt_id="first")
    await in_threads(4, make)
    assert len(set(attempted)) == 1
    assert [a.attempt_id for a in await store.query_attempts("shared")] == ["first", "only"]
    assert len(await store.query_spans("shared")) == 1
    assert await audit_store(store) == []


async def test_a_claim_that_is_cancelled_twice_has_claimed_nothing(store: LightningStore) -> None:
    for number in range(30):
        claim = asyncio.create_task(store.dequeue_rollout(timeout_seconds=SOON))
        await asyncio.sleep(0.0005 * (number % 5))
        await store.enqueue_rollout(number)
        await asyncio.sleep(0.0003 * (number % 7))
        claim.cancel()
        await asyncio.sleep(0.0002 * (number % 3))
        claim.cancel()
        [given] = await asyncio.gather(claim, return_exceptions=True)
        if isinstance(given, asyncio.CancelledError):
            given = await store.dequeue_rollout(timeout_seconds=SOON)
        assert isinstance(given, AttemptedRollout)
        assert (given.input, given.attempt.sequence_id) == (number, 1)


# ---- zombies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retried", [False, True])
async def test_a_worker_that_wakes_after_its_time_adds_to_its_own_record_and_changes_nothing(
    store: LightningStore, retried: bool
) -> None:
    config = RolloutConfig(timeout_seconds=10, max_attempts=2, retry_condition=["timeout"] if retried else [])
    zombie = await claimed(store, worker_id="w", config=config)
    await store.add_span(span_of(zombie, "1" * 16))
    await store.sweep(zombie.attempt.start_time + 11)
    fresh = await store.dequeue_rollout("other")
    assert (fresh is not None) == retried
    before = await store.get_rollout_by_id(zombie.rollout_id)
    added = await store.add_span(span_of(zombie, "2" * 16))
    assert added is not None
    assert (added.attempt_id, added.sequence_id) == (zombie.attempt.attempt_id, 2)
    for status in ("running", "succeeded", "failed"):
        with pytest.raises(IllegalTransition, match="timeout"):
            await store.update_attempt(**ids(zombie), status=status)  # type: ignore[arg-type]
    assert await store.get_rollout_by_id(zombie.rollout_id) == before
    assert [s.span_id[0] for s in await store.query_spans(**ids(zombie))] == ["1", "2"]
    assert len(await store.query_spans(zombie.rollout_id, "latest")) == (0 if retried else 2)
    assert (await store.get_worker_by_id("w")).status == "unknown"
    assert await audit_store(store) == []


async def test_a_retry_that_was_granted_is_not_taken_back_when_the_silent_attempt_is_also_too_old(
    store: LightningStore,
) -> None:
    config = RolloutConfig(
        timeout_seconds=20, unresponsive_seconds=10, max_attempts=2, retry_condition=["unresponsive"]
    )
    silent = await claimed(store, config=config)
    await store.sweep(silent.attempt.start_time + 11)
    assert [attempt.status for attempt in await store.sweep(silent.attempt.start_time + 21)] == ["timeout"]
    again = await store.dequeue_rollout()
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == (silent.rollout_id, 2)


async def test_a_rollout_requeued_by_hand_waits_whatever_its_old_attempt_comes_to(store: LightningStore) -> None:
    old = await claimed(store)
    await store.update_rollout(old.rollout_id, status="requeuing")
    await store.update_attempt(**ids(old), status="failed")
    assert (await store.get_rollout_by_id(old.rollout_id)).status == "requeuing"
    assert await store.dequeue_rollout() is not None


async def test_no_rollout_is_said_to_be_worked_on_when_nobody_does(store: LightningStore) -> None:
    requeued = await claimed(store, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    await store.update_attempt(**ids(requeued), status="failed")
    untouched = await store.enqueue_rollout(2)
    for rollout in (requeued, untouched):
        for status in ("preparing", "running"):
            with pytest.raises(IllegalTransition, match=r"claim it|possible"):
                await store.update_rollout(rollout.rollout_id, status=status)  # type: ignore[arg-type]
    assert len(await store.dequeue_many_rollouts(limit=9)) == 2


async def test_a_worker_whose_cancelled_rollout_is_forgotten_is_free(store: LightningStore) -> None:
    rollout = await claimed(store, worker_id="w")
    await store.update_rollout(rollout.rollout_id, status="cancelled")
    await store.enqueue_rollout("newest")
    assert await store.prune(Retention(max_rollouts=0)) == 1
    worker = await store.get_worker_by_id("w")
    assert (worker.status, worker.current_rollout_id, worker.current_attempt_id) == ("idle", None, None)
    with pytest.raises(UnknownRollout, match="pruned"):
        await store.update_attempt(**ids(rollout), status="succeeded")
    with pytest.raises(UnknownRollout, match="pruned"):
        await store.add_span(span_of(rollout))
    assert await audit_store(store) == []


# ---- clocks ----------------------------------------------------------------------------------------------------------


async def waited(store: LightningStore, clock: MachineClock, seconds: float) -> bool:
    """Let time pass, and return whether the store's clock is this machine's and not a database server's."""
    before = (await store.add_resources({})).create_time
    clock.let_pass(seconds)
    return (await store.add_resources({})).create_time - before > seconds / 2


@pytest.mark.parametrize("hours", [1, 24 * 365, -1, -24 * 365])
async def test_a_step_of_the_clock_ends_no_attempt_and_puts_off_no_limit(
    store: LightningStore, machine_clock: MachineClock, hours: int
) -> None:
    long = await store.start_rollout(0, config=RolloutConfig(timeout_seconds=600))
    quiet = await store.start_rollout(0, config=RolloutConfig(unresponsive_seconds=600))
    machine_clock.step(3600 * hours)
    assert list(await store.sweep()) == []
    after = await store.start_rollout(0, config=RolloutConfig(timeout_seconds=600))
    if await waited(store, machine_clock, 590):
        assert list(await store.sweep()) == []
        machine_clock.let_pass(20)
        ended = {attempt.rollout_id: attempt.status for attempt in await store.sweep()}
        assert ended == {
            long.rollout_id: "timeout",
            quiet.rollout_id: "unresponsive",
            after.rollout_id: "timeout",
        }
    assert await audit_store(store) == []


@pytest.mark.parametrize("hours", [0, 1, -1])
async def test_a_store_tells_the_time_by_which_it_dates_heartbeats(
    store: LightningStore, machine_clock: MachineClock, hours: int
) -> None:
    machine_clock.step(3600 * hours)
    worker = await store.update_worker("w", {})
    assert worker.last_heartbeat_time is not None
    assert 0 <= (await store.statistics())["time"] - worker.last_heartbeat_time < 60


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_step_of_the_clock_prunes_nothing_by_age_and_keeps_nothing_longer(
    store: LightningStore, machine_clock: MachineClock, hours: int
) -> None:
    retention = Retention(max_age_seconds=600)
    rollout = await claimed(store)
    await store.update_attempt(**ids(rollout), status="succeeded")
    await store.enqueue_rollout("newest")
    machine_clock.step(3600 * hours)
    assert await store.prune(retention) == 0
    if await waited(store, machine_clock, 590):
        assert await store.prune(retention) == 0
        machine_clock.let_pass(20)
        assert await store.prune(retention) == 1


async def test_a_clock_that_goes_backwards_changes_no_order_and_ends_nothing(
    store: LightningStore, machine_clock: MachineClock
) -> None:
    config = RolloutConfig(timeout_seconds=1000, unresponsive_seconds=1000)
    rollouts = [await store.enqueue_rollout(0, rollout_id="r0", config=config)]
    rollout = await store.dequeue_rollout()
    assert rollout is not None
    resources = [await store.add_resources({}, resources_id="s0")]
    for number in range(1, 6):
        machine_clock.step(-3600)
        rollouts.append(await store.enqueue_rollout(number, rollout_id=f"r{number}", config=config))
        added = await store.add_span(span_of(rollout, f"{number:016x}"))
        assert added is not None
        assert added.sequence_id == number
        resources.append(await store.add_resources({}, resources_id=f"s{number}"))
        assert await store.get_latest_resources() == resources[-1]
        assert list(await store.sweep()) == []
    times = [each.start_time for each in rollouts] + [resources[-1].create_time]
    assert times == sorted(times)
    assert [r.rollout_id for r in await store.query_rollouts()] == [r.rollout_id for r in rollouts]
    assert [r.rollout_id for r in await store.dequeue_many_rollouts(limit=9)] == [f"r{n}" for n in range(1, 6)]
    page = await store.poll_new_spans(timeout_seconds=SOON)
    assert [span.sequence_id for span in page.spans] == [1, 2, 3, 4, 5]
    ended = await store.update_attempt(**ids(rollout), status="succeeded")
    assert ended.end_time is not None
    assert 0 <= ended.end_time - ended.start_time < 60
    assert await audit_store(store) == []
    if await waited(store, machine_clock, 500):
        assert list(await store.sweep()) == []
        machine_clock.let_pass(550)
        assert {attempt.status for attempt in await store.sweep()} == {"timeout"}


# ---- the store itself ------------------------------------------------------------------------------------------------


async def test_whoever_waits_for_news_or_spans_hears_that_the_store_was_closed(store: LightningStore) -> None:
    news = await store.get_news()
    waiting = [
        asyncio.create_task(store.get_news(after=news.after, timeout_seconds=SOON)),
        asyncio.create_task(store.poll_new_spans(timeout_seconds=SOON)),
    ]
    await asyncio.sleep(0.02)
    began = time.monotonic()
    await store.close()
    for call in waiting:
        with pytest.raises(StoreClosed):
            await call
    for after in (None, news.after):
        with pytest.raises(StoreClosed):
            await store.get_news(after=after, timeout_seconds=SOON)
    assert time.monotonic() - began < SOON / 2


async def test_news_after_a_moment_that_never_was_are_a_gap(store: LightningStore) -> None:
    now = (await store.get_news()).after
    for after in ("", "nonsense", "1.2.3.4", now + "9" * 5000, now.rpartition(".")[0]):
        assert (await store.get_news(after=after)).gap
    assert not (await store.get_news(after=now)).gap
