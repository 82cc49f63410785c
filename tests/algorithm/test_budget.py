"""`Budget`: tokens and cost never exceed it, nothing waits for money that is there, and a resumed run knows what was spent."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import leyden as ly
from leyden.algorithm import Budget, RolloutCollector
from leyden.algorithm.budget import busy_seconds
from leyden.errors import BudgetExceeded, ConfigError
from leyden.store import InMemoryLightningStore
from leyden.types import Attempt, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, RunRecord, semconv

LIMIT = 10
"""The most tokens of an attempt."""
PRICE = 0.001


def budget(tokens: int | None = None, thousandths: int | None = None, **options: Any) -> Budget:
    if tokens is not None:
        options |= {"tokens": tokens, "tokens_per_attempt": LIMIT}
    if thousandths is not None:
        options |= {"cost": thousandths * PRICE, "cost_per_attempt": LIMIT * PRICE}
    return Budget(**options)


def request(tokens: int, **options: Any) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(input={"tokens": tokens}, **options)


class Runner:
    """Claims rollouts, and ends them in any order with the calls that their tasks name, as a runner and a gateway do."""

    def __init__(self, store: ly.LightningStore) -> None:
        self._store = store
        self.under_way: list[AttemptedRollout] = []
        self.used = 0

    async def claim(self) -> None:
        while claimed := await self._store.dequeue_rollout(worker_id="runner"):
            self.under_way.append(claimed)

    async def end(self, place: int, *, has_price: bool = True) -> None:
        rollout = self.under_way.pop(place % len(self.under_way))
        tokens = rollout.input["tokens"]
        attributes = {semconv.GEN_AI_INPUT_TOKENS: tokens - 1, semconv.GEN_AI_OUTPUT_TOKENS: 1}
        if has_price:
            attributes[semconv.COST] = tokens * PRICE
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        span = {"sequence_id": 1, "span_id": "1" * 16, "trace_id": "1" * 32, "name": semconv.MODEL_CALL}
        await self._store.add_span(ly.Span.model_validate({**ids, **span, "attributes": attributes}))
        await self._store.update_attempt(*ids.values(), status="succeeded")
        self.used += tokens


async def collect(collector: RolloutCollector, tasks: list[int], **options: Any) -> int:
    """Return how many of the tasks have a result."""
    found = 0
    try:
        async for _ in collector.collect([request(each) for each in tasks], **options):
            found += 1
    except BudgetExceeded:
        pass
    return found


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, LIMIT), max_size=9), min_size=1, max_size=3),
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 99),
)
def test_a_budget_is_never_exceeded_and_never_stuck_with_money_for_one_more_attempt(
    collections: list[list[int]], tokens: int, thousandths: int, chance: int
) -> None:
    async def run() -> None:
        async with InMemoryLightningStore() as store:
            runner, collector = Runner(store), RolloutCollector(store, budget=budget(tokens, thousandths))
            work = asyncio.gather(*(collect(collector, tasks) for tasks in collections))
            while not work.done():
                await runner.claim()
                assert runner.used + LIMIT * len(runner.under_way) <= min(tokens, thousandths)
                if runner.under_way:
                    await runner.end(chance)
                await asyncio.sleep(0)
            done, wanted = sum(await work), sum(map(len, collections))
            assert done == wanted or runner.used + LIMIT > min(tokens, thousandths)
            found = collector.budget
            assert (found.used_tokens, found.tokens_left) == (runner.used, tokens - runner.used)
            assert found.used_cost == pytest.approx(runner.used * PRICE)
            assert not found.reserved

    asyncio.run(asyncio.wait_for(run(), 30))


async def test_rollouts_that_money_holds_back_do_not_count() -> None:
    async with InMemoryLightningStore() as store:
        collector = RolloutCollector(store, budget=budget(25, rollouts=5))
        runner, work = Runner(store), asyncio.ensure_future(collect(collector, [LIMIT] * 5))
        while not work.done():
            await runner.claim()
            if runner.under_way:
                await runner.end(0)
            await asyncio.sleep(0)
        assert (await work, collector.budget.left, collector.budget.tokens_left) == (2, 3, 5)
        with pytest.raises(
            BudgetExceeded, match=r"1 more attempts .* 5 of Budget\(tokens=25\), with 10 reserved for each attempt"
        ):
            await collector.enqueue([request(1)])
        assert collector.budget.left == 3
        assert collector.budget.metrics() == {
            "budget_left": 0.2,
            "budget_rollouts_left": 3,
            "budget_tokens_left": 5,
        }


async def test_each_attempt_that_a_rollout_may_have_is_reserved() -> None:
    async with InMemoryLightningStore() as store:
        collector = RolloutCollector(store, budget=budget(29))
        three = RolloutConfig(max_attempts=3, retry_condition=["failed"])
        with pytest.raises(BudgetExceeded):
            await collector.enqueue([request(1, config=three)])
        await collector.enqueue([request(1, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))])
        assert collector.budget.tokens_left == 9
        await collector.close()
        assert collector.budget.tokens_left == 29, "it was cancelled before it began"


async def test_an_attempt_that_is_cut_off_counts_with_its_limit() -> None:
    async with InMemoryLightningStore() as store:
        collector, runner = RolloutCollector(store, budget=budget(100)), Runner(store)
        await collector.enqueue([request(1)])
        await runner.claim()
        await collector.close()
        assert collector.budget.tokens_left == 90


async def test_a_call_waits_for_room_and_its_attempt_is_charged() -> None:
    async with InMemoryLightningStore() as store:
        collector, runner = RolloutCollector(store, budget=budget(15)), Runner(store)
        await collector.enqueue([request(4)])

        async def call() -> int:
            async with collector.reserve_attempt() as settle:
                left = collector.budget.tokens_left
                settle(collector.budget.call_of_own_client("call", 6))
            return left if left is not None else -1

        calling = asyncio.ensure_future(call())
        await runner.claim()
        await asyncio.sleep(0)
        assert not calling.done()
        await runner.end(0)
        assert await asyncio.wait_for(calling, 30) == 1
        assert collector.budget.tokens_left == 5
        with pytest.raises(BudgetExceeded):
            await call()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_resumed_run_knows_what_was_spent_and_starts_nothing_that_could_exceed_it(is_cut: bool) -> None:
    async with InMemoryLightningStore() as store:
        await store.start_run(RunRecord(run_id="run", name="run", kind="fit", start_time=0.0))
        first, runner = RolloutCollector(store, budget=budget(40)), Runner(store)
        await first.enqueue([request(2, run_id="run"), request(3, run_id="run"), request(9, run_id="run")])
        await runner.claim()
        await runner.end(0)
        if is_cut:  # the process is killed, and the next one takes over
            await store.release_claims()
        else:
            await runner.end(0)
            await runner.end(0)
        resumed = RolloutCollector(store, budget=budget(40, rollouts=9, seconds=100))
        await resumed.count_earlier("run")
        # 2 tokens, and two attempts that were interrupted; the second one's repeat could exceed what is left
        expected = 40 - 2 - 10 - 10 - 10 if is_cut else 40 - 14
        assert (resumed.budget.tokens_left, resumed.budget.left) == (expected, 6)
        assert 99 < (resumed.budget.seconds_left or 0) < 100
        counts = (await store.statistics())["rollouts_by_status"]
        assert counts.get("cancelled", 0) == is_cut


def attempt(start: float, end: float | None, **options: Any) -> Attempt:
    fixed: dict[str, Any] = {"rollout_id": "ro", "attempt_id": "at", "sequence_id": 1, "status": "succeeded"}
    return Attempt.model_validate({**fixed, "start_time": start, "end_time": end, **options})


def test_the_time_of_earlier_processes_is_that_in_which_something_ran() -> None:
    killed: dict[str, Any] = {"status": "failed", "metadata": {"reason_kind": "interrupted"}}
    ran = [attempt(0, 4), attempt(1, 3), attempt(3, 6), attempt(5, 900, last_heartbeat_time=7, **killed)]
    assert busy_seconds(ran) == 7
    assert busy_seconds([*ran, attempt(901, 903)]) == 9
    assert busy_seconds([]) == 0


async def test_an_attempt_without_a_price_or_above_its_limit_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with InMemoryLightningStore() as store:
        collector, runner = RolloutCollector(store, budget=budget(100, 100)), Runner(store)
        work = asyncio.ensure_future(collect(collector, [3, 15]))
        while len(runner.under_way) < 2:
            await runner.claim()
            await asyncio.sleep(0)
        await runner.end(0, has_price=False)
        await runner.end(0)
        assert await asyncio.wait_for(work, 30) == 2
        assert (collector.budget.tokens_left, collector.budget.cost_left) == (82, pytest.approx(0.075))
    assert "called a model without a price, and counts with cost_per_attempt; give price_per_million" in caplog.text
    assert "more than" in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_plans_go_by_what_attempts_have_used() -> None:
    plan = budget(100, rollouts=50)
    assert plan.rollouts_expected == 10
    plan.spend([attempt(0, 1, response_tokens=2)])
    assert plan.rollouts_expected == 49
    plan.restore({"rollouts": 3, "tokens": 95, "cost": 0, "seconds": 4})
    assert (plan.rollouts_expected, plan.left, plan.spent["seconds"]) == (0, 47, 4)
    assert Budget().rollouts_expected is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 5}, r"Budget\(tokens=5\) needs tokens_per_attempt="),
        ({"cost": 0.5}, r"Budget\(cost=0.5\) needs cost_per_attempt="),
        ({"cost_per_attempt": 0.5}, "cost_per_attempt=0.5 is not used without cost="),
        ({"tokens": -1, "tokens_per_attempt": 1}, "tokens is -1"),
        ({"cost": 1, "cost_per_attempt": 0}, "cost_per_attempt is 0"),
        ({"tokens": 1.5, "tokens_per_attempt": 1}, "tokens is 1.5"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Budget(**options)
