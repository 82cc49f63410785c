"""What a run costs: the sum of all its calls, a limit that ends it, and an estimate before it begins."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.training.runs import open_run
from leyden.training.runs.run_options import column_of
from leyden.types import EnqueueRolloutRequest, RolloutConfig
from tests.gateway.caller import until

PRICES = {"currency": "USD", "models": {"fake": {"prompt": 2, "cached": 0.5, "answer": 10}}}
CHILD = Path(__file__).with_name("cost_child.py")


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


def bill(*upstreams: FakeUpstream) -> float:
    """What the provider would charge for all that it has answered."""
    calls = [call for upstream in upstreams for call in upstream.calls]
    return sum(2 * len(call.prompt_ids) + 10 * len(call.response_ids) for call in calls) / 1e6


async def ask(llm: ly.LLM, task: Any, **options: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": str(task)}]
        return await client.chat.completions.create(model="fake", messages=messages, **options)


@ly.llm_rollout
async def agent(task: Any, llm: ly.LLM) -> float:
    await ask(llm, task)
    return 1.0


def trainer(upstream: FakeUpstream, tmp_path: Path, algorithm: Any = "baseline", **options: Any) -> ly.Trainer:
    proxy = LLMProxy(model_list=[UpstreamModel("fake", upstream.endpoint)])
    given: dict[str, Any] = {"llm_proxy": proxy, "prices": PRICES, "progress": False}
    given["run_dir"] = tmp_path / ".leyden" / "run"
    return ly.Trainer(algorithm=algorithm, **{**given, **options})


def train_metrics(directory: Path) -> list[dict[str, Any]]:
    return [dict(row.metrics) for row in open_run(directory).metrics("train")]


# ---- the sum ---------------------------------------------------------------------------------------------------------


async def test_the_summary_the_rows_and_the_folder_have_what_the_provider_charges(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    train = trainer(upstream, tmp_path, ly.Baseline(n_epochs=3))
    summary = await train.afit(agent, [1, 2, 3, 4])
    assert summary.spending is not None
    assert (summary.spending.attempts, summary.spending.unpriced_calls) == (12, 0)
    assert summary.spending.cost == pytest.approx(bill(upstream))
    assert f"cost: {summary.spending.in_words('USD')}" in str(summary)
    rows = train_metrics(tmp_path / ".leyden" / "run")
    assert [row["total_cost"] for row in rows] == pytest.approx([bill(upstream) * n / 3 for n in (1, 2, 3)], rel=0.2)
    assert sum(row["cost"] for row in rows) == pytest.approx(rows[-1]["total_cost"])
    assert rows[-1]["total_cost"] == pytest.approx(bill(upstream))
    [shown] = column_of([open_run(tmp_path / ".leyden" / "run")], "cost")
    assert shown == summary.spending.in_words("USD")


class Steps(ly.IterativeAlgorithm):
    """Runs each task once a step, and asks the model once itself."""

    def __init__(self, n_steps: int = 2) -> None:
        super().__init__(max_iters=n_steps)

    async def setup(self, train_dataset: Any, val_dataset: Any) -> None:
        self._tasks: list[Any] = list(train_dataset)

    async def step(self, iteration: int) -> ly.Metrics:
        resources = await self.with_model({})
        rs = await self.publish_resources("r", resources)
        async with self.recorded_calls("reflection") as llm:
            await ask(llm, f"reflect {iteration}")
        requests = [
            EnqueueRolloutRequest(
                rollout_id=f"ro-{self.get_run().run_id}-{iteration}-{place}",
                input=task,
                resources_id=rs,
                config=RolloutConfig(max_attempts=3, retry_condition=["failed"]),
            )
            for place, task in enumerate(self._tasks)
        ]
        return {"reward": float(len([each async for each in self.collector.collect(requests)]))}


failed_once: set[str] = set()


@ly.llm_rollout
async def failing_first(task: Any, llm: ly.LLM) -> float:
    await ask(llm, task)
    if task not in failed_once:
        failed_once.add(task)
        raise ValueError("the first attempt fails")
    return 1.0


async def test_attempts_that_were_tried_again_and_the_algorithms_own_calls_are_in_the_sum(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    failed_once.clear()
    summary = await trainer(upstream, tmp_path, Steps()).afit(failing_first, ["a", "b"])
    assert len(upstream.calls) == 2 + 4 + 2  # 2 steps: one call of the algorithm each; 2 tasks twice, then once each
    assert summary.spending is not None
    assert (summary.spending.attempts, summary.spending.cost) == (8, pytest.approx(bill(upstream)))
    rows = train_metrics(tmp_path / ".leyden" / "run")
    assert [set(row) for row in rows] == [{"reward", "cost", "total_cost"}] * 2
    assert sum(row["cost"] for row in rows) == pytest.approx(bill(upstream))


async def test_a_cost_that_is_a_part_of_the_whole_is_named_so(upstream: FakeUpstream, tmp_path: Path) -> None:
    async with FakeUpstream(model="other") as other:
        models = [UpstreamModel("fake", upstream.endpoint), UpstreamModel("other", other.endpoint)]

        @ly.rollout
        async def both(task: Any, resources: Any) -> float:
            llm = resources["main_llm"]
            async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
                for model in ("fake", "other"):
                    messages: Any = [{"role": "user", "content": str(task)}]
                    await client.chat.completions.create(model=model, messages=messages)
            return 1.0

        class Own(ly.Baseline):
            async def with_model(self, resources: Any, *, model: str | None = None) -> Any:
                return await super().with_model(resources, model="fake")

        train = trainer(upstream, tmp_path, Own(), llm_proxy=LLMProxy(model_list=models))
        summary = await train.afit(both, [1, 2])
    assert summary.spending is not None
    assert (summary.spending.cost, summary.spending.unpriced_calls) == (pytest.approx(bill(upstream)), 2)
    assert "cost: at least" in str(summary)
    assert "(2 calls have no known cost)" in str(summary)
    assert train_metrics(tmp_path / ".leyden" / "run")[-1]["unpriced_calls"] == 2


async def test_a_run_without_prices_has_no_cost_anywhere(upstream: FakeUpstream, tmp_path: Path) -> None:
    summary = await trainer(upstream, tmp_path, ly.Baseline(n_epochs=2), prices=None).afit(agent, [1])
    assert summary.spending is not None
    assert (summary.spending.cost, summary.spending.unpriced_calls) == (None, 2)
    assert "cost" not in str(summary)
    assert all("cost" not in row and "total_cost" not in row for row in train_metrics(tmp_path / ".leyden" / "run"))


async def test_calls_past_several_gateways_are_summed_once_each(upstream: FakeUpstream, tmp_path: Path) -> None:
    """The second gateway is beside the run's own, on the same store, as `leyden gateway` is."""
    store = InMemoryLightningStore()
    async with LLMProxy(model_list=[upstream.llm()], prices=PRICES, store=store) as second:

        @ly.llm_rollout
        async def both(task: Any, llm: ly.LLM) -> float:
            await ask(llm, task)
            rollout = await store.query_rollouts(status_in=["preparing", "running"])
            [mine] = [each for each in rollout if each.input == task]
            attempt: Any = mine
            await ask(second.as_resource(mine.rollout_id, attempt.attempt.attempt_id), task)
            return 1.0

        summary = await trainer(upstream, tmp_path, store=store, run_dir=None).afit(both, [1, 2, 3])
    assert len(upstream.calls) == 6
    assert summary.spending is not None
    assert summary.spending.cost == pytest.approx(bill(upstream))


# ---- the limit -------------------------------------------------------------------------------------------------------


slow_calls: list[str] = []


@ly.llm_rollout
async def finishing(task: Any, llm: ly.LLM) -> float:
    await ask(llm, task)
    await asyncio.sleep(0.3)  # still under way when its call has reached the limit
    slow_calls.append(str(task))
    return 1.0


def new_algorithm(kind: str) -> Any:
    return ly.Baseline() if kind == "baseline" else Steps(1)


@pytest.mark.parametrize(("kind", "strategy"), [("baseline", "shm"), ("steps", "shm"), ("steps", "cs")])
async def test_a_run_that_reaches_its_limit_finishes_what_is_under_way_and_goes_on_with_a_higher_one(
    upstream: FakeUpstream, tmp_path: Path, kind: str, strategy: str
) -> None:
    tasks = [f"task {n}" for n in range(30)]

    async def fit(max_cost: float, concurrency: int, *, resume: bool) -> Any:
        options: dict[str, Any] = {"max_cost": max_cost, "concurrency": concurrency, "strategy": strategy}
        made = trainer(upstream, tmp_path, new_algorithm(kind), **options)
        return await made.afit(finishing, tasks, resume=resume)

    first = await fit(1e-9, 2, resume=False)
    assert first.stopped is not None
    assert first.stopped.startswith("max_cost=1e-09 is reached: the model calls have cost")
    paid = len(upstream.calls)
    assert 1 <= paid <= 6
    assert first.rollouts["failed"] == first.rollouts["cancelled"] == first.rollouts["requeuing"] == 0
    assert first.rollouts["running"] == first.rollouts["preparing"] == 0
    assert first.spending is not None
    assert first.spending.cost == pytest.approx(bill(upstream))
    run = open_run(tmp_path / ".leyden" / "run")
    assert (run.state, run.record.cause) == ("stopped", first.stopped)

    again = await fit(2e-9, 2, resume=True)
    assert again.stopped is not None  # because the sum goes on
    assert len(upstream.calls) <= paid + 4

    last = await fit(100.0, 30, resume=True)
    assert (last.stopped, last.rollouts["succeeded"]) == (None, 30)
    assert last.spending is not None
    assert last.spending.cost == pytest.approx(bill(upstream))
    own_calls = len(upstream.calls) - 30
    assert own_calls == 0 if kind == "baseline" else 1 <= own_calls <= 3  # the step begins again; no rollout does


@pytest.mark.parametrize("is_async", [True, False])
async def test_the_limit_ends_a_free_algorithm_too(upstream: FakeUpstream, tmp_path: Path, is_async: bool) -> None:
    async def enqueue(store: Any, llm_proxy: Any, tasks: Any) -> list[str]:
        await store.update_resources("r", {"main_llm": llm_proxy.as_resource()})
        return [(await store.enqueue_rollout(task, resources_id="r")).rollout_id for task in tasks]

    @ly.algo
    async def free(*, store: LightningStore, llm_proxy: Any, train_dataset: Any) -> None:
        await store.wait_for_rollouts(rollout_ids=await enqueue(store, llm_proxy, train_dataset))

    @ly.algo
    def blocking(*, store: LightningStore, llm_proxy: Any, train_dataset: Any) -> None:
        async def work() -> None:
            await store.wait_for_rollouts(rollout_ids=await enqueue(store, llm_proxy, train_dataset))

        asyncio.run(work())

    made = trainer(upstream, tmp_path, free if is_async else blocking, max_cost=1e-9, concurrency=2)
    summary = await made.afit(finishing, list(range(30)))
    assert summary.stopped is not None
    assert "max_cost" in summary.stopped
    assert 1 <= len(upstream.calls) <= 6
    assert summary.rollouts["succeeded"] == len(upstream.calls)


async def test_a_run_that_is_done_when_it_reaches_its_limit_has_succeeded(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    summary = await trainer(upstream, tmp_path, max_cost=1e-9).afit(finishing, [1, 2])
    assert (summary.stopped, summary.rollouts["succeeded"]) == (None, 2)


async def test_a_call_of_unknown_cost_ends_a_run_with_a_limit(upstream: FakeUpstream, tmp_path: Path) -> None:
    upstream.misbehave(Misbehaviour(no_usage=True))
    summary = await trainer(upstream, tmp_path, max_cost=100.0, concurrency=1).afit(finishing, list(range(20)))
    assert summary.stopped is not None
    assert "cannot be kept, because 1 model call has no known cost" in summary.stopped
    assert len(upstream.calls) <= 3


async def test_the_limit_holds_on_a_store_that_others_work_on_too(upstream: FakeUpstream, tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    async with LightningStoreServer(store) as server:
        made = trainer(upstream, tmp_path, Steps(1), max_cost=1e-9, store=server.endpoint, run_dir=None, concurrency=2)
        summary = await made.afit(finishing, list(range(20)))
    assert summary.stopped is not None
    assert len(upstream.calls) <= 6
    assert summary.rollouts["running"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prices": None}, r"max_cost=1 needs a price of 'fake'"),
        ({"llm_proxy": None}, "no gateway that records what calls cost"),
        ({"max_cost": 0}, "max_cost is 0"),
        ({"max_cost": float("nan")}, "max_cost is nan"),
        ({"max_cost": "5"}, "max_cost is '5'"),
    ],
)
async def test_a_limit_that_cannot_be_kept_is_refused_before_the_run(
    upstream: FakeUpstream, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(upstream, tmp_path, **{"max_cost": 1, **options}).check(agent, [1])
    assert not (tmp_path / ".leyden").exists()


async def test_the_costs_of_a_killed_run_count_in_the_run_that_continues_it(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    directory = tmp_path / ".leyden" / "run"
    command = [sys.executable, str(CHILD), upstream.endpoint, str(directory)]
    environment = os.environ | {"PYTHONPATH": str(CHILD.parents[2])}
    process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    try:
        await until(lambda: len(upstream.calls) >= 5)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    paid = len(upstream.calls)
    async with SqliteLightningStore(directory / "store.sqlite") as store:
        [run] = await store.query_runs()
        before = await store.sum_spending(run.run_id)
    # A durable gateway keeps all calls but those that were on their way when it was killed.
    assert before.cost is not None
    assert paid - 2 <= before.attempts <= paid + 2
    proxy = LLMProxy(model_list=[UpstreamModel("fake", upstream.endpoint)], durable=True)
    made = trainer(upstream, tmp_path, max_cost=before.cost, llm_proxy=proxy)
    summary = await made.afit(agent, list(range(60)), resume=True)
    assert summary.stopped is not None
    assert f"max_cost={before.cost:g} is reached" in summary.stopped


# ---- the estimate ----------------------------------------------------------------------------------------------------


async def test_an_estimate_multiplies_what_an_earlier_run_of_the_agent_took(
    upstream: FakeUpstream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer(upstream, tmp_path)
    assert first.estimate(agent, [1] * 4).startswith("no estimate: 4 rollouts at most, and no run of")
    await first.afit(agent, ["a"] * 4)
    second = trainer(upstream, tmp_path, run_dir=tmp_path / ".leyden" / "second", progress=True)
    expected = second.estimate(agent, ["a"] * 40)
    assert expected.startswith("estimate: 40 rollouts x")
    assert f"about {bill(upstream) * 10:.4g} USD" in expected
    assert "no run of" in second.estimate(failing_first, [1])
    await second.afit(agent, ["a"] * 40)
    assert expected in capsys.readouterr().err


async def test_an_estimate_says_what_it_does_not_know(upstream: FakeUpstream, tmp_path: Path) -> None:
    await trainer(upstream, tmp_path, prices=None).afit(agent, [1, 2])
    unpriced = trainer(upstream, tmp_path, prices=None, run_dir=tmp_path / ".leyden" / "b")
    assert "about" not in unpriced.estimate(agent, [1])
    assert "Steps does not know" in trainer(upstream, tmp_path, Steps()).estimate(agent, [1])

    @ly.rollout
    async def silent(task: Any) -> float:
        return 1.0

    silent_run = tmp_path / ".leyden" / "silent"
    await trainer(upstream, tmp_path, run_dir=silent_run).afit(silent, [1])
    assert "recorded no tokens" in trainer(upstream, tmp_path, run_dir=silent_run).estimate(silent, [1])


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({"n_steps": 3, "tasks_per_step": 2, "rollouts_per_task": 4}, 3 * 2 * 4 + 5),
        ({"n_steps": 4, "val_every_n_steps": 2, "validate_first": True, "rollouts_per_task": 4}, 4 * 8 * 4 + 3 * 5),
        ({"n_steps": 2, "max_groups_per_step": 9, "rollouts_per_task": 4}, 2 * 9 * 4 + 5),
    ],
)
def test_a_policys_planned_rollouts_are_those_of_its_steps_and_validations(options: Any, planned: int) -> None:
    pytest.importorskip("torch")
    from leyden.cli.demo import WEIGHTS

    algorithm = ly.PolicyGradient(ly.EmbeddedBackend(WEIGHTS, device="cpu"), **options)
    assert algorithm.planned_rollouts(100, 5) == planned
