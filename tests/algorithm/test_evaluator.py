"""`Evaluator`: each score is paid once, whoever asks and however often; nothing unfinished is lost from a mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.algorithm import Budget, Evaluator, RolloutCollector, Scores
from leyden.algorithm.reported import AGENT_VERSION, ReportedVersion
from leyden.errors import BudgetExceeded, ConfigError
from leyden.store import InMemoryLightningStore
from leyden.types import RunRecord, current_run_id
from tests.machine_clock import MachineClock

TASKS = [{"bonus": 0.0}, {"bonus": 1.0}]


class Agent:
    """Its reward is the prompt's length and the task's bonus; it counts its rollouts and does as the task says."""

    def __init__(self) -> None:
        self.ran = 0
        self.is_broken = False

        @ly.rollout
        async def agent(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float | None:
            self.ran += 1
            if self.is_broken or task.get("fail"):
                raise ValueError("as it was told")
            await asyncio.sleep(task.get("seconds", 0.0))
            return None if task.get("silent") else len(prompt_template.template) + task["bonus"]

        self.agent = agent


@pytest.fixture
async def store() -> AsyncGenerator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        for run_id in ("run-1", "run-2"):
            await store.start_run(RunRecord(run_id=run_id, kind="fit", name=run_id, start_time=time.time()))
        yield store


@contextlib.asynccontextmanager
async def running(store: ly.LightningStore, agent: Agent) -> AsyncGenerator[None]:
    runner, stop = ly.LitAgentRunner[Any](concurrency=16), Latch()
    with runner.run_context(agent=agent.agent, store=store):
        work = asyncio.create_task(runner.iter(stop))
        try:
            yield
        finally:
            stop.set()
            await work


@contextlib.contextmanager
def in_run(run_id: str):
    token = current_run_id.set(run_id)
    try:
        yield
    finally:
        current_run_id.reset(token)


def prompt(text: str = "four") -> ly.NamedResources:
    return {"prompt": ly.PromptTemplate(template=text)}


async def evaluated(evaluator: Evaluator, tasks: list[dict[str, Any]], text: str = "four", **options: Any) -> Scores:
    return await evaluator.evaluate(await evaluator.publish(prompt(text)), tasks, **options)


async def test_a_score_is_paid_once_by_any_algorithm_and_run(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        for run_id in ("run-1", "run-2"):
            with in_run(run_id):
                scores = await evaluated(Evaluator(RolloutCollector(store), agent_version="v1"), TASKS, replicas=2)
                assert (scores.by_task, scores.mean, scores.failed) == ([4.0, 5.0], 4.5, 0)
                assert agent.ran == 4
        await evaluated(Evaluator(RolloutCollector(store), agent_version="v2"), TASKS)
        assert agent.ran == 6
        await evaluated(Evaluator(RolloutCollector(store), agent_version="v1"), TASKS, text="sixsix", mode="train")
        assert agent.ran == 8
    stored = await store.query_resources(resources_id_contains="rs-")
    assert {each.author for each in stored} == {"run-1", "run-2", None}


async def test_an_unknown_agent_has_no_scores_of_other_runs_and_the_log_says_so_once(
    store: ly.LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leyden.algorithm.evaluator")
    agent = Agent()
    async with running(store, agent):
        for run_id, ran in (("run-1", 2), ("run-2", 4), ("run-1", 4)):
            with in_run(run_id):
                evaluator = Evaluator(RolloutCollector(store))
                await evaluated(evaluator, TASKS)
                await evaluated(evaluator, TASKS)
                assert agent.ran == ran
    assert caplog.text.count("the agent's version is unknown") == 3


@ly.rollout
async def counting(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
    return len(prompt_template.template) + task["bonus"]


@ly.rollout
async def halving(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
    return len(prompt_template.template) / 2


@contextlib.asynccontextmanager
async def worker(store: ly.LightningStore, agent: ly.LitAgent[Any], name: str) -> AsyncGenerator[None]:
    runner, stop = ly.LitAgentRunner[Any](concurrency=4), Latch()
    runner.init(agent)
    runner.init_worker(0, store, worker_name=name)
    work = asyncio.create_task(runner.iter(stop))
    try:
        yield
    finally:
        stop.set()
        await work
        runner.teardown_worker(0)
        runner.teardown()


async def test_workers_report_the_agents_version_to_an_algorithm_without_an_agent(store: ly.LightningStore) -> None:
    async def n_rollouts(run_id: str) -> int:
        with in_run(run_id):
            await evaluated(Evaluator(RolloutCollector(store)), TASKS)
        return len(await store.query_rollouts())

    with in_run("run-1"):  # before the first worker: the evaluation waits for it
        waiting = asyncio.create_task(evaluated(Evaluator(RolloutCollector(store)), TASKS))
    async with worker(store, counting, "first"):
        assert (await waiting).by_task == [4.0, 5.0]
        assert await n_rollouts("run-2") == 2
    async with worker(store, halving, "second"):
        assert await n_rollouts("run-2") == 4


async def test_scores_of_workers_with_different_code_stay_in_their_run_with_a_warning(
    store: ly.LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker(store, counting, "first"), worker(store, halving, "second"):
        while len([each for each in await store.query_workers() if each.heartbeat_stats]) < 2:  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0)
        for run_id in ("run-1", "run-2"):
            with in_run(run_id):
                evaluator = Evaluator(RolloutCollector(store))
                await evaluated(evaluator, TASKS)
                await evaluated(evaluator, TASKS)
    assert len(await store.query_rollouts()) == 4
    assert caplog.text.count("different versions of the agent") == 2


async def test_a_version_that_workers_report_counts_with_the_models_behind_the_agent(store: ly.LightningStore) -> None:
    async with worker(store, counting, "first"):
        for models, n_rollouts in (("a", 2), ("a", 2), ("b", 4)):
            await evaluated(Evaluator(RolloutCollector(store), models=models), TASKS)
            assert len(await store.query_rollouts()) == n_rollouts


async def test_a_failure_counts_here_and_is_tried_again_by_another_run(store: ly.LightningStore) -> None:
    agent = Agent()
    agent.is_broken = True
    async with running(store, agent):
        for _ in range(2):
            with in_run("run-1"):
                evaluator = Evaluator(RolloutCollector(store), agent_version="v1", failed_reward=-1.0)
                scores = await evaluated(evaluator, TASKS)
                assert (scores.by_task, scores.failed, agent.ran) == ([-1.0, -1.0], 2, 2)
                assert scores.scores[0].reason == "ValueError: as it was told"
        agent.is_broken = False
        for _ in range(2):
            with in_run("run-2"):
                scores = await evaluated(Evaluator(RolloutCollector(store), agent_version="v1"), TASKS)
                assert (scores.by_task, agent.ran) == ([4.0, 5.0], 4)


async def test_no_reward_is_a_failure(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        scores = await evaluated(Evaluator(RolloutCollector(store)), [{"bonus": 0.0, "silent": True}])
    assert (scores.mean, scores.failed) == (0.0, 1)


async def test_what_is_unfinished_at_the_deadline_is_cancelled_and_counts_as_failed(store: ly.LightningStore) -> None:
    agent = Agent()
    slow = {"bonus": 0.0, "seconds": 60.0}
    async with running(store, agent):
        started = time.monotonic()
        scores = await evaluated(Evaluator(RolloutCollector(store)), [slow, TASKS[1]], deadline_seconds=0.5)
        assert time.monotonic() - started < 10
    assert (scores.by_task, scores.mean, scores.failed) == ([0.0, 5.0], 2.5, 1)
    result = scores.scores[0].result
    assert result is not None and result.status == "cancelled"


async def test_evaluations_that_end_at_one_deadline_cancel_all_of_their_rollouts(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        evaluator = Evaluator(RolloutCollector(store))
        slow = [[{"bonus": float(n), "seconds": 60.0}] for n in range(6)]
        found = await asyncio.gather(*(evaluated(evaluator, tasks, deadline_seconds=0.5) for tasks in slow))
    assert [scores.failed for scores in found] == [1] * 6
    assert {rollout.status for rollout in await store.query_rollouts()} == {"cancelled"}


async def test_an_unfinished_rollout_of_another_run_is_left_alone_at_the_deadline(store: ly.LightningStore) -> None:
    agent = Agent()
    slow = [{"bonus": 0.0, "seconds": 1.5}]
    async with running(store, agent):
        with in_run("run-1"):
            first = asyncio.create_task(evaluated(Evaluator(RolloutCollector(store), agent_version="v1"), slow))
            await asyncio.sleep(0.3)
        with in_run("run-2"):
            evaluator = Evaluator(RolloutCollector(store), agent_version="v1")
            late = await evaluated(evaluator, slow, deadline_seconds=0.4)
        assert (late.mean, late.failed, late.scores[0].result) == (0.0, 1, None)
        assert (await first).mean == 4.0


async def test_another_runs_rollout_has_no_score_when_the_time_is_over(store: ly.LightningStore) -> None:
    agent, slow = Agent(), [{"bonus": 0.0, "seconds": 1.5}]
    async with running(store, agent):
        with in_run("run-1"):
            first = asyncio.create_task(evaluated(Evaluator(RolloutCollector(store), agent_version="v1"), slow))
            await asyncio.sleep(0.3)
        with in_run("run-2"):
            evaluator = Evaluator(RolloutCollector(store, budget=Budget(seconds=0.4)), agent_version="v1")
            with pytest.raises(BudgetExceeded, match="1 rollouts have not started, or belong to another run"):
                await evaluated(evaluator, slow)
        assert (await first).mean == 4.0


async def test_concurrent_evaluations_share_rollouts_and_budget(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        evaluator = Evaluator(RolloutCollector(store, budget=Budget(rollouts=4)))
        same = await asyncio.gather(*(evaluated(evaluator, TASKS) for _ in range(5)))
        assert {scores.mean for scores in same} == {4.5}
        assert (agent.ran, evaluator.collector.budget.left) == (2, 2)
        with pytest.raises(BudgetExceeded, match=r"3 more rollouts were requested, and 2 are left"):
            await evaluated(evaluator, [{"bonus": float(n)} for n in range(2, 5)])
        assert agent.ran == 2


async def test_a_time_budget_cancels_what_runs_and_starts_nothing_more(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        evaluator = Evaluator(RolloutCollector(store, budget=Budget(seconds=0.6)))
        await evaluated(evaluator, TASKS)
        with pytest.raises(BudgetExceeded, match=r"the time of Budget\(seconds=0.6\) is over"):
            await evaluated(evaluator, [{"bonus": 0.0, "seconds": 60.0}])
        assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded", "cancelled"}
        with pytest.raises(BudgetExceeded, match=r"the time of Budget\(seconds=0.6\) is over"):
            await evaluated(evaluator, [{"bonus": 7.0}])
        assert evaluator.collector.budget.metrics() == {"budget_left": 0.0, "budget_seconds_left": 0.0}


async def test_what_a_time_budget_has_cut_off_is_requested_again_by_a_resumed_run_and_by_no_other(
    store: ly.LightningStore,
) -> None:
    agent, slow = Agent(), [{"bonus": 0.0}, {"bonus": 1.0, "seconds": 0.7}]
    async with running(store, agent):
        with in_run("run-1"):
            for _ in range(2):  # a second cut leaves it unknown, too
                cut = Evaluator(RolloutCollector(store, budget=Budget(seconds=0.3)), agent_version="v1")
                both = await asyncio.gather(*(evaluated(cut, slow) for _ in range(2)), return_exceptions=True)
                assert [type(each) for each in both] == [BudgetExceeded] * 2
            assert agent.ran == 3
            for _ in range(2):
                scores = await evaluated(Evaluator(RolloutCollector(store), agent_version="v1"), slow)
                assert (scores.by_task, scores.failed, agent.ran) == ([4.0, 5.0], 0, 4)


async def test_what_a_deadline_has_cancelled_counts_as_failed_as_long_as_the_process_lives(
    store: ly.LightningStore,
) -> None:
    agent, slow = Agent(), [{"bonus": 0.0, "seconds": 60.0}]
    async with running(store, agent):
        evaluator = Evaluator(RolloutCollector(store))
        for _ in range(2):
            scores = await evaluated(evaluator, slow, deadline_seconds=0.3)
            assert (scores.failed, agent.ran) == (1, 1)


async def test_a_resumed_budget_counts_what_was_spent_before(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        with in_run("run-1"):
            await evaluated(Evaluator(RolloutCollector(store, budget=Budget(rollouts=3)), agent_version="v1"), TASKS)
            collector = RolloutCollector(store, budget=Budget(rollouts=3))
            await collector.count_earlier("run-1")
            assert collector.budget.left == 1
            await evaluated(Evaluator(collector, agent_version="v1"), TASKS)
            assert (collector.budget.left, agent.ran) == (1, 2)


async def test_a_published_model_that_moved_has_a_new_version_and_the_same_scores(store: ly.LightningStore) -> None:
    agent = Agent()
    async with running(store, agent):
        evaluator = Evaluator(RolloutCollector(store), agent_version="v1")
        versions: list[int] = []
        for port in (1, 1, 2):
            model = ly.LLM(endpoint=f"http://127.0.0.1:{port}/v1", model="fake")
            published = await evaluator.publish({**prompt(), "llm": model})
            await evaluator.publish(prompt("another"))  # so that the first is not the latest
            versions.append(published.version)
            await evaluator.evaluate(published, TASKS)
        assert versions == [1, 1, 2]
        assert agent.ran == 2


def test_wrong_options_are_refused() -> None:
    collector = RolloutCollector(InMemoryLightningStore())
    for wrong in ("", 3):
        with pytest.raises(ConfigError, match="agent_version is"):
            Evaluator(collector, agent_version=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="failed_reward is"):
        Evaluator(collector, failed_reward=float("nan"))
    with pytest.raises(ConfigError, match="seconds is 0"):
        Budget(seconds=0)


@ly.rollout
async def measured(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
    return len(prompt_template.template) + task["bonus"]


def test_an_algo_function_is_given_an_evaluator_that_knows_its_agent() -> None:
    @ly.algo
    async def search(*, evaluator: Evaluator, train_dataset: Any) -> str | None:
        scores = await evaluated(evaluator, train_dataset)
        assert scores.mean == 4.5
        return evaluator.agent_version

    result = ly.Trainer(algorithm=search, store="memory").fit(measured, TASKS).result
    assert isinstance(result, str)
    assert result.startswith("tests.algorithm.test_evaluator.measured@")


async def test_workers_report_their_version_after_a_step_of_the_clock(machine_clock: MachineClock) -> None:
    async with InMemoryLightningStore() as store:
        await store.update_worker("w", {AGENT_VERSION: "v1"})
        machine_clock.step(3600)
        assert await ReportedVersion(store).read(seconds=0) == "v1"
        machine_clock.let_pass(60)
        assert await ReportedVersion(store).read(seconds=0) is None
