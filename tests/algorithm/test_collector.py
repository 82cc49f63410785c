"""`RolloutCollector`: results in the order of their end, nothing run twice, exact budgets and pins, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import leyden as ly
from leyden._lib.aio import Latch
from leyden.algorithm import Budget, CollectedRollout, RolloutCollector, rollout_id_at, rollout_id_of
from leyden.errors import BudgetExceeded, ConfigError, UnknownResources
from leyden.store import InMemoryLightningStore, SqliteLightningStore, Sweeper
from leyden.types import EnqueueRolloutRequest, Retention, RunRecord

PROGRAM = Path(__file__).with_name("collecting.py")
ROOT = Path(__file__).parents[2]
FORGET_ALL = Retention(max_rollouts=0)


@ly.rollout
async def sleeper(task: dict[str, Any]) -> float:
    """Sleep for the task's seconds, and fail if it says so."""
    await asyncio.sleep(task.get("seconds", 0.0))
    if task.get("fail"):
        raise ValueError("as it was told")
    return float(task.get("reward", 1.0))


@pytest.fixture
async def store() -> AsyncGenerator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


@contextlib.asynccontextmanager
async def running(store: ly.LightningStore, agent: Any = sleeper, concurrency: int = 32) -> AsyncIterator[None]:
    """Run an agent on the store's queue during the block."""
    runner, stop = ly.LitAgentRunner[Any](concurrency=concurrency), Latch()
    with runner.run_context(agent=agent, store=store):
        work = asyncio.create_task(runner.iter(stop))
        try:
            yield
        finally:
            stop.set()
            await work


def request(rollout_id: str | None = None, **task: Any) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(rollout_id=rollout_id, input=task)


async def gathered(results: AsyncIterator[CollectedRollout]) -> list[CollectedRollout]:
    return [result async for result in results]


async def prune_all(store: ly.LightningStore) -> set[str]:
    """Forget all that retention may; return the ids of what is left.

    An unfinished rollout is the newest one and has the newest span, which always stay.
    """
    newest = await store.start_rollout("newest", mode="test")
    ids = {"rollout_id": newest.rollout_id, "attempt_id": newest.attempt.attempt_id}
    await store.add_span(
        ly.Span.model_validate({**ids, "sequence_id": 1, "span_id": "1" * 16, "trace_id": "1" * 32, "name": "x"})
    )
    while await store.prune(FORGET_ALL):
        pass
    return {rollout.rollout_id for rollout in await store.query_rollouts() if rollout.mode != "test"}


# ---- results ----------------------------------------------------------------------------------------------------------------


async def test_results_come_in_the_order_in_which_the_rollouts_finish(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)
    seconds = [0.6, 0.0, 0.4, 0.2]
    async with running(store):
        results = await gathered(collector.collect([request(seconds=s, reward=s) for s in seconds]))
    assert [result.place for result in results] == [1, 3, 2, 0]
    assert [result.reward for result in results] == sorted(seconds)
    assert all(result.rollout.finished and result.spans and not result.cached for result in results)


async def test_a_result_is_there_while_others_run(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)
    async with running(store):
        results = collector.collect([request(seconds=3600), request()])
        first = await asyncio.wait_for(anext(results), 5)
        assert (first.place, first.status, first.reason) == (1, "succeeded", None)
        await results.aclose()
        assert await collector.cancel() == 1


async def test_failures_and_cancellations_are_results(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)

    results: dict[str, CollectedRollout] = {}
    async with running(store):
        async for result in collector.collect(
            [request("bad", fail=True), request("slow", seconds=60), request("good")]
        ):
            results[result.rollout_id] = result
            if len(results) == 2:
                await store.update_rollout("slow", status="cancelled")
    assert {rollout_id: result.status for rollout_id, result in results.items()} == {
        "bad": "failed",
        "slow": "cancelled",
        "good": "succeeded",
    }
    assert results["bad"].reason == "ValueError: as it was told"
    assert [results[each].reward for each in ("bad", "slow", "good")] == [None, None, 1.0]


async def test_requests_with_one_id_have_one_rollout_and_a_result_each(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)
    async with running(store):
        one, two = await asyncio.gather(
            gathered(collector.collect([request("same"), request("same"), request("other")])),
            gathered(collector.collect([request("same")])),
        )
    assert Counter(result.rollout_id for result in one + two) == {"same": 3, "other": 1}
    assert (await store.statistics())["total_attempts"] == 2
    assert await prune_all(store) == set()


async def test_no_more_are_unfinished_than_asked_for_and_requests_are_read_as_they_are_needed(
    store: ly.LightningStore,
) -> None:
    collector, read = RolloutCollector(store), 0

    def requests() -> Iterator[EnqueueRolloutRequest]:
        nonlocal read
        for place in range(12):
            read += 1
            yield request(reward=place)

    finished = 0
    async with running(store):
        async for _ in collector.collect(requests(), max_unfinished=3):
            finished += 1
            assert read <= finished + 3
    assert (finished, read) == (12, 12)
    with pytest.raises(ConfigError, match="max_unfinished is 0"):
        await anext(collector.collect([], max_unfinished=0))


async def test_what_a_check_raises_ends_the_collection(store: ly.LightningStore) -> None:
    def check() -> None:
        raise EOFError("the policy has died")

    with pytest.raises(EOFError):
        await anext(RolloutCollector(store).collect([request()], check=check, check_seconds=0.01))


# ---- ids: nothing runs twice ------------------------------------------------------------------------------------------------


async def test_a_wait_says_for_which_rollouts_and_what_they_do(
    store: ly.LightningStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.algorithm.collector._SILENCE_SECONDS", 0.05)
    requests = [request("claimed"), *(request(f"queued-{n}") for n in range(6))]
    requests[0].config = ly.RolloutConfig(timeout_seconds=600.0)
    with caplog.at_level("INFO", logger="leyden.algorithm.collector"):
        async with RolloutCollector(store) as collector:
            await collector.enqueue(requests)
            await store.dequeue_many_rollouts(limit=1, worker_id="runner-7")
            work = asyncio.create_task(gathered(collector.collect(requests)))
            for _ in range(3000):  # 30 seconds
                if "waiting for 7" in caplog.text:
                    break
                await asyncio.sleep(0.01)
            await collector.cancel()
            assert len(await work) == 7
    told = next(message for message in caplog.messages if "waiting for 7" in message)
    assert told.startswith("no rollout has finished for")
    assert "claimed preparing for 0 s on runner-7, timeout_seconds=600 ends it" in told
    assert "queued-0 queuing, and no runner has claimed it" in told
    assert told.endswith("; and 2 more")


async def test_what_the_store_has_is_not_run_again(store: ly.LightningStore) -> None:
    requests = [request(rollout_id_of("agent 1", "prompt", task), reward=task) for task in range(5)]
    async with running(store):
        first = await gathered(RolloutCollector(store, pin="search").collect(requests))
    again = await gathered(RolloutCollector(store, pin="search").collect(requests))  # nobody runs anything
    assert [result.cached for result in first] + [result.cached for result in again] == [False] * 5 + [True] * 5
    assert [(r.place, r.reward) for r in sorted(again, key=lambda r: r.place)] == [(place, place) for place in range(5)]
    assert (await store.statistics())["total_attempts"] == 5


@pytest.mark.parametrize("moment", [3, pytest.param(17, marks=pytest.mark.slow)])
def test_a_killed_program_that_is_started_again_runs_nothing_twice(tmp_path: Path, moment: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    for _ in range(moment):
        assert killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(map(int, done.stdout.split())) == list(range(30))

    async def attempts() -> list[int]:
        async with SqliteLightningStore(tmp_path / "store.sqlite") as store:
            finished = [
                [attempt for attempt in await store.query_attempts(rollout.rollout_id) if not attempt.interrupted]
                for rollout in await store.query_rollouts()
            ]
            return list(map(len, finished))

    assert asyncio.run(attempts()) == [1] * 30
    runs = Counter((tmp_path / "ran").read_text().split())
    twice = {task for task, times in runs.items() if times > 1}
    assert set(runs) == set(map(str, range(30)))
    assert len(twice) <= 4, "only what was under way when it was killed"


def test_ids_of_places_are_those_of_every_run_before() -> None:
    digest = hashlib.sha256(b"run\x1ftrain\x1f3\x1f7").hexdigest()
    assert rollout_id_at("run", "train", 3, 7) == f"ro-{digest[:16]}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
)


@settings(max_examples=50)
@given(JSON, JSON)
def test_contents_that_differ_have_different_ids(one: Any, other: Any) -> None:
    assert (rollout_id_of(one) == rollout_id_of(other)) == (repr(one) == repr(other) or _sorted(one) == _sorted(other))


def _sorted(value: Any) -> Any:
    """A form that is equal for equal JSON: 1 is not True, and the order of keys does not count."""
    if isinstance(value, dict):
        return sorted((key, _sorted(item)) for key, item in value.items()), "dict"
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return type(value).__name__, repr(value)


def test_content_may_be_resources_and_nothing_whose_text_differs_between_processes() -> None:
    prompt, other = ly.PromptTemplate(template="{x}"), ly.PromptTemplate(template="{y}")
    assert rollout_id_of({"a": 1, "b": 2}, prompt) == rollout_id_of({"b": 2, "a": 1}, prompt.model_copy())
    assert rollout_id_of(prompt) != rollout_id_of(other)
    for bad in (object(), {1, 2}, float("nan"), {"x": sleeper}):
        with pytest.raises(ConfigError, match="rollout_id_of takes JSON values"):
            rollout_id_of("task", bad)


# ---- the budget -------------------------------------------------------------------------------------------------------------


async def test_a_budget_is_exact_under_concurrency(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store, budget=Budget(rollouts=55))

    async def ask(number: int) -> int:
        try:
            return len(await gathered(collector.collect([request(f"{number} {place}") for place in range(10)])))
        except BudgetExceeded:
            return 0

    async with running(store):
        counts = await asyncio.gather(*(ask(number) for number in range(12)))
        assert (sorted(counts), collector.budget.left) == ([0] * 7 + [10] * 5, 5)
        with pytest.raises(
            BudgetExceeded, match=r"6 more rollouts were requested, and 5 are left of Budget\(rollouts=55\)"
        ):
            await collector.enqueue([request() for _ in range(6)])
        assert len(await gathered(collector.collect([request() for _ in range(5)]))) == 5
    assert (collector.budget.used, collector.budget.left) == (55, 0)
    assert (await store.statistics())["total_rollouts"] == 55


async def test_a_rollout_is_paid_once_by_its_own_run_and_free_for_another(store: ly.LightningStore) -> None:
    for run_id in ("one", "two"):
        await store.start_run(RunRecord(run_id=run_id, name=run_id, kind="fit", start_time=0.0))

    def of(run_id: str) -> list[EnqueueRolloutRequest]:
        return [EnqueueRolloutRequest(rollout_id=f"ro-{task}", input={}, run_id=run_id) for task in range(4)]

    async with running(store):
        first = RolloutCollector(store, budget=Budget(rollouts=4))
        await gathered(first.collect(of("one")[:3]))
        await gathered(first.collect(of("one")))
        assert first.budget.left == 0
        resumed = RolloutCollector(store, budget=Budget(rollouts=4))
        await gathered(resumed.collect(of("one")))
        assert resumed.budget.left == 0, "as if it had never been stopped"
        other = RolloutCollector(store, budget=Budget(rollouts=0))
        assert all(result.cached for result in await gathered(other.collect(of("two"))))


async def test_a_repeat_of_what_could_not_be_enqueued_is_paid_once(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store, budget=Budget(rollouts=2))
    lost = EnqueueRolloutRequest(rollout_id="lost", input={}, resources_id="rs-nowhere")
    for _ in range(3):
        with pytest.raises(UnknownResources):
            await collector.enqueue([lost])
    assert collector.budget.left == 1


# ---- pins -------------------------------------------------------------------------------------------------------------------


async def test_exactly_what_is_needed_is_pinned(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)
    async with running(store):
        await gathered(collector.collect([request(f"step 1 {task}") for task in range(3)], keep_until=1))
        await gathered(collector.collect([request(f"step 2 {task}") for task in range(3)], keep_until=2))
        await gathered(collector.collect([request("read once")]))
        ahead = await collector.enqueue([request(f"step 3 {task}") for task in range(3)])
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in ahead])
    steps = [{f"step {step} {task}" for task in range(3)} for step in (1, 2, 3)]
    assert await prune_all(store) == set().union(*steps)
    await collector.release(1)
    assert await prune_all(store) == steps[1] | steps[2], "a later step's rollouts stay, though nobody has read them"
    results = await gathered(collector.collect([request(each) for each in sorted(steps[2])], keep_until=3))
    assert all(result.cached and result.spans for result in results)
    await collector.release(3)
    assert await prune_all(store) == set()


async def test_a_rollout_stays_until_the_caller_asks_for_the_next_result(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)
    async with running(store):
        results = collector.collect([request(f"{task}") for task in range(250)], max_unfinished=250)
        read: list[str] = []
        async for result in results:
            left = await prune_all(store) if len(read) % 50 == 0 else None
            assert left is None or left >= {f"{task}" for task in range(250)} - set(read)
            read.append(result.rollout_id)
            if len(read) == 249:
                break
        await results.aclose()
    left = await prune_all(store)
    assert left >= {f"{task}" for task in range(250)} - set(read[:-1]), (
        "the last one that was yielded may be read again"
    )
    assert len(left) < 150, "and what was consumed is let go by the hundred"
    await collector.close()
    assert await prune_all(store) == set()


# ---- cancelling -------------------------------------------------------------------------------------------------------------


async def test_cancel_leaves_nothing_queued_or_running(store: ly.LightningStore) -> None:
    collector = RolloutCollector(store)
    begun = asyncio.Semaphore(0)

    @ly.rollout
    async def slow(task: Any) -> float:
        begun.release()
        await asyncio.sleep(60)
        return 1.0

    async def cancel_when_four_have_begun() -> int:
        for _ in range(4):
            await begun.acquire()
        return await collector.cancel()

    async with running(store, slow, concurrency=4), asyncio.timeout(10):
        results, n_cancelled = await asyncio.gather(
            gathered(collector.collect([request() for _ in range(40)])), cancel_when_four_have_begun()
        )
        assert n_cancelled == 40
        assert [result.status for result in results] == ["cancelled"] * 40
        assert (await store.statistics())["rollouts_by_status"] == {"cancelled": 40}
    assert await prune_all(store) == set()


async def test_an_enqueuing_that_was_interrupted_is_cancelled_too() -> None:
    class Slow(InMemoryLightningStore):
        async def enqueue_many_rollouts(self, rollouts: Any) -> Any:
            answer = await super().enqueue_many_rollouts(rollouts)
            await asyncio.sleep(60)
            return answer

    async with Slow() as store:
        collector = RolloutCollector(store)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await collector.enqueue([request() for _ in range(3)])
        assert (await store.statistics())["rollouts_by_status"] == {"queuing": 3}
        assert await collector.cancel() == 3
        assert (await store.statistics())["rollouts_by_status"] == {"cancelled": 3}


async def test_rollouts_of_another_run_are_waited_for_and_never_cancelled(store: ly.LightningStore) -> None:
    await store.start_run(RunRecord(run_id="other", name="other", kind="fit", start_time=0.0))
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(rollout_id="theirs", input={}, run_id="other")])
    async with RolloutCollector(store) as collector:
        await collector.enqueue([request("theirs"), request("mine")])
    found = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
    assert found == {"theirs": "queuing", "mine": "cancelled"}


@pytest.mark.parametrize("ending", ["raises", "is stopped", "returns early"])
async def test_an_algorithm_that_ends_leaves_nothing_behind(ending: str, store: InMemoryLightningStore) -> None:
    begun = asyncio.Event()

    @ly.algo
    async def search(*, collector: RolloutCollector) -> None:
        async for _ in collector.collect([request(), *(request(seconds=60) for _ in range(20))]):
            begun.set()
            if ending == "raises":
                raise ZeroDivisionError("in the algorithm")
            if ending == "is stopped":
                await asyncio.sleep(60)
            return

    fit = asyncio.create_task(ly.Trainer(algorithm=search, store=store, concurrency=8).afit(sleeper))
    await asyncio.wait_for(begun.wait(), 20)
    if ending == "is stopped":
        fit.cancel()
    with contextlib.suppress(ZeroDivisionError, asyncio.CancelledError, ly.LeydenError):
        await asyncio.wait_for(fit, 20)
    assert (await store.statistics())["rollouts_by_status"] == {"succeeded": 1, "cancelled": 20}


async def test_what_a_resumable_algorithm_leaves_is_there_for_the_resumed_one(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    lives: list[Counter[bool]] = []

    @ly.algo
    async def search(*, collector: RolloutCollector, run: Any) -> None:
        cached = Counter[bool]()
        lives.append(cached)
        requests = [request(rollout_id_at(run.run_id, task), seconds=0.05 * task) for task in range(10)]
        async for result in collector.collect(requests):
            cached[result.cached] += 1
            if len(lives) == 1 and cached.total() == 4:
                raise ZeroDivisionError("in the algorithm")

    trainer = ly.Trainer(algorithm=search, store=store, run_dir=tmp_path, max_algorithm_restarts=1)
    await trainer.afit(sleeper)
    assert (await store.statistics())["rollouts_by_status"] == {"succeeded": 10}
    assert lives[0] == {False: 4}
    assert lives[1][True] >= 4
    assert lives[1].total() == 10


def test_a_sync_algorithm_collects_on_loops_of_its_own() -> None:
    rewards: list[float | None] = []

    @ly.algo
    def search(*, collector: RolloutCollector) -> None:
        async def together() -> None:
            several = [gathered(collector.collect([request(reward=reward)])) for reward in range(3)]
            rewards.extend(result.reward for results in await asyncio.gather(*several) for result in results)

        for _ in range(2):
            asyncio.run(together())

    ly.Trainer(algorithm=search, store="memory").fit(sleeper)
    assert rewards == [0.0, 1.0, 2.0] * 2


class Ahead(ly.IterativeAlgorithm):
    """Enqueues each step while it trains on the one before, and stops or goes on after the second."""

    def __init__(self, *, stops: bool, max_iters: int = 4) -> None:
        super().__init__(max_iters=max_iters)
        self.stops = stops
        self.cached: list[int] = []

    def requests(self, iteration: int) -> list[EnqueueRolloutRequest]:
        run_id = self.get_run().run_id
        return [request(rollout_id_at(run_id, iteration, place), seconds=place // 4) for place in range(5)]

    async def step(self, iteration: int) -> ly.Metrics:
        await asyncio.sleep(0.05)  # time to forget what is not pinned
        results = [r async for r in self.collector.collect(self.requests(iteration), keep_until=iteration + 1)]
        ahead = await self.collector.enqueue(self.requests(iteration + 1))
        await self.get_store().wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in ahead[:4]])
        if self.stops and iteration == 1:
            self._loop.stop()
        self.cached.append(sum(result.cached for result in results))
        return {"reward": sum(result.reward or 0.0 for result in results), "spans": sum(len(r.spans) for r in results)}


async def test_what_a_later_step_has_enqueued_survives_the_end_of_a_step_and_of_a_stopped_run(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    async def fit(algorithm: Ahead, *, resume: bool) -> None:
        trainer = ly.Trainer(algorithm=algorithm, store=store, run_dir=tmp_path)
        async with Sweeper(store, retention=FORGET_ALL, prune_interval_seconds=0.001):
            await trainer.afit(sleeper, resume=resume)

    first, second = Ahead(stops=True), Ahead(stops=False)
    await fit(first, resume=False)
    assert len(first.cached) == 2
    waiting = {rollout.status for rollout in await store.query_rollouts() if not rollout.finished}
    assert waiting <= {"queuing", "requeuing"}, "nothing is cancelled that the resumed run wants"
    await fit(second, resume=True)
    assert len(second.cached) == 2
    assert min(first.cached[1:] + second.cached) >= 4, "none was forgotten and run again"
    assert second._loop.metrics["spans"] >= 5
    left = [rollout for rollout in await store.query_rollouts() if not rollout.finished]
    assert not left, "the step after the last is cancelled"


async def test_a_resumed_run_with_no_step_left_cancels_what_an_earlier_process_has_enqueued(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    await ly.Trainer(algorithm=Ahead(stops=True), store=store, run_dir=tmp_path).afit(sleeper)
    (run,) = await store.query_runs()
    request = EnqueueRolloutRequest(rollout_id="left", input={"seconds": 3600}, run_id=run.run_id)
    await store.enqueue_many_rollouts([request])
    done = Ahead(stops=False, max_iters=2)
    async with asyncio.timeout(40):
        await ly.Trainer(algorithm=done, store=store, run_dir=tmp_path).afit(sleeper, resume=True)
    assert not done.cached
    assert (await store.get_rollout_by_id("left")).status == "cancelled"
