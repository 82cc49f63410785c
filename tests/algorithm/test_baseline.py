"""`Baseline`: every task once an epoch, in the right mode, with no more in the queue than was asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.errors import ConfigError
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import Retention


@ly.rollout
async def double(task: int) -> float:
    return 2.0 * task


async def modes(baseline: ly.Baseline, train: Any, val: Any = None, agent: Any = double) -> Counter[tuple[Any, Any]]:
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=baseline, store=store).afit(agent, train, val_dataset=val)
        return Counter((rollout.mode, rollout.input) for rollout in await store.query_rollouts())


@pytest.mark.parametrize(
    ("split", "n_train"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)], ids=lambda value: str(value)
)
async def test_without_a_validation_set_the_training_set_is_split(split: float, n_train: int) -> None:
    found = await modes(ly.Baseline(train_split=split), [10, 20, 30, 40])
    expected = [("train" if place < n_train else "val", task) for place, task in enumerate([10, 20, 30, 40])]
    assert found == Counter(expected)


async def test_with_a_validation_set_nothing_is_split() -> None:
    assert await modes(ly.Baseline(), [1, 2, 3]) == {("train", 1): 1, ("train", 2): 1, ("train", 3): 1}
    assert await modes(ly.Baseline(), [1, 2], [3]) == {("train", 1): 1, ("train", 2): 1, ("val", 3): 1}
    with pytest.raises(ConfigError, match=r"train_split is 0\.5, and with a val_dataset nothing is split off"):
        await modes(ly.Baseline(train_split=0.5), [1, 2], [3])


async def test_a_validation_set_alone_is_enough() -> None:
    assert await modes(ly.Baseline(), None, [3]) == {("val", 3): 1}


async def test_every_task_is_run_once_an_epoch() -> None:
    assert set((await modes(ly.Baseline(n_epochs=3), [1, 2], [3])).values()) == {3}


class WatchedStore(InMemoryLightningStore):
    """Counts what is enqueued and not finished."""

    most = 0
    enqueued = 0

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Sequence[ly.Rollout]:
        answer = await super().enqueue_many_rollouts(rollouts)
        self.enqueued += len(answer)
        finished = await self.query_rollouts(status_in=["succeeded", "failed"], limit=1)
        self.most = max(self.most, self.enqueued - finished.total)
        return answer


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (None, 12), (100, 12)])
async def test_no_more_rollouts_are_in_the_queue_than_asked_for(limit: int | None, most: int) -> None:
    @ly.rollout
    async def slow(task: int) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    async with WatchedStore() as store:
        summary = await ly.Trainer(algorithm=ly.Baseline(max_queue_length=limit), store=store).afit(
            slow, list(range(12))
        )
        assert summary.rollouts["succeeded"] == 12
        assert store.most == most


async def test_bad_rollouts_are_counted_and_the_others_go_on() -> None:
    @ly.rollout
    async def picky(task: int) -> float:
        if task == 2:
            raise ValueError("not 2")
        return 1.0

    async with InMemoryLightningStore() as store:
        summary = await ly.Trainer(algorithm="baseline", store=store).afit(picky, [1, 2, 3])
    assert (summary.rollouts["succeeded"], summary.failures) == (2, {"ValueError: not 2": 1})


@pytest.mark.parametrize(("n_bad", "n_warnings"), [(40, 1), (39, 0)])
async def test_a_run_in_which_everything_fails_says_so_before_its_end(
    n_bad: int, n_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    @ly.rollout
    async def picky(task: int) -> float:
        if task < n_bad:
            raise ValueError("no such tool")
        return 1.0

    await modes(ly.Baseline(max_queue_length=1), list(reversed(range(40))), agent=picky)
    warnings = [record.message for record in caplog.records if "rollouts failed" in record.message]
    assert [
        message.startswith("all of the first 16 rollouts failed, 24 are left: 16 x ValueError: no such tool.")
        for message in warnings
    ] == [True] * n_warnings


@pytest.mark.parametrize(
    ("verbosity", "shown", "hidden"),
    [
        ("none", "reward 2.0", "leyden.reward"),
        ("keys", "leyden.reward.0.value", ": 2.0"),
        ("key_values", "'leyden.reward.0.value': 2.0", "never"),
    ],
)
async def test_each_rollout_is_logged_as_much_as_asked_for(
    verbosity: Any, shown: str, hidden: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="leyden")
    await modes(ly.Baseline(span_verbosity=verbosity), [1])
    assert shown in caplog.text
    assert hidden not in caplog.text
    assert "1 of 1 rollouts finished, mean reward 2.000" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_epochs": 0}, "n_epochs is 0"),
        ({"train_split": 1.5}, "train_split is 1.5"),
        ({"polling_interval": 0.0}, "polling_interval is 0.0"),
        ({"max_queue_length": 0}, "max_queue_length is 0"),
        ({"span_verbosity": "all"}, "span_verbosity is 'all'; possible: none, keys, key_values"),
    ],
)
def test_wrong_options_are_refused_with_their_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ly.Baseline(**options)


@pytest.mark.parametrize("data", [None, []])
def test_no_data_is_an_error(data: Any) -> None:
    with pytest.raises(ConfigError, match="pass a train_dataset or a val_dataset"):
        ly.Trainer(algorithm="baseline").dev(double, data)


def test_a_task_that_is_no_json_value_is_named() -> None:
    with pytest.raises(ConfigError, match="task 0 of train_dataset is <object object"):
        ly.Trainer(algorithm="baseline").dev(double, [object()])


class Crowd:
    """An agent that counts how many of it run at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = self.most = 0

    def agent(self) -> Any:
        @ly.rollout
        async def wait(task: int) -> float:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(self.seconds * (1 + task % 10 / 10))
            self.running -= 1
            return 1.0

        return wait


async def test_as_many_rollouts_are_in_flight_as_the_runners_work_on_at_once() -> None:
    crowd = Crowd(0.5)
    async with InMemoryLightningStore() as store:
        trainer = ly.Trainer(algorithm="baseline", store=store, concurrency=250, n_runners=2)
        await trainer.afit(crowd.agent(), list(range(500)))
    assert crowd.most == 500


async def test_a_long_list_of_tasks_is_not_enqueued_at_once() -> None:
    async with WatchedStore() as store:
        trainer = ly.Trainer(algorithm="baseline", store=store, concurrency=100)
        summary = await trainer.afit(double, list(range(1500)))
    assert summary.rollouts["succeeded"] == 1500
    assert store.most <= 200


async def test_without_a_trainer_a_baseline_runs_on_the_runners_of_its_store() -> None:
    crowd = Crowd(0.2)
    baseline = ly.Baseline()
    runner = ly.LitAgentRunner(tracer=ly.OtelTracer(), concurrency=300)
    async with InMemoryLightningStore() as store:
        baseline.set_store(store)
        baseline.set_adapter(ly.TraceToMessages())
        async with runner.run_context(agent=crowd.agent(), store=store):
            stop = Latch()
            working = asyncio.create_task(runner.iter(event=stop))
            await baseline.run(list(range(600)), [1, 2])
            stop.set()
            await working
        assert (await store.statistics())["rollouts_by_status"] == {"succeeded": 602}
        while await store.prune(Retention(max_rollouts=0)):
            pass
        assert len(await store.query_rollouts()) <= 2  # nothing is pinned any more
    assert crowd.most > 128  # nothing waited, so more were enqueued


async def test_the_reward_of_a_failed_rollout_is_not_counted() -> None:
    @ly.rollout
    def agent(task: int) -> float:
        ly.emit_reward(100.0)
        if task:
            raise RuntimeError("after the reward")
        return 1.0

    summary = await ly.Trainer(algorithm=ly.Baseline(), store=InMemoryLightningStore()).afit(agent, [0, 1])
    assert summary.reward is not None and summary.reward.values == (1.0,)
    assert summary.rollouts["failed"] == 1


async def test_agents_get_the_model_of_the_gateway() -> None:
    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> float:
        async with llm.openai() as client:
            answer = await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": task}], **llm.sampling_parameters
            )
        return float(answer.choices[0].message.content == "yes" and llm.sampling_parameters == {"max_tokens": 3})

    async with FakeUpstream(reply=lambda _: "yes") as server:
        model = {"model_name": "fake", "endpoint": server.endpoint, "sampling_parameters": {"max_tokens": 3}}
        summary = await ly.Trainer(
            algorithm=ly.Baseline(), llm_proxy=ly.LLMProxy(model_list=[model]), store=InMemoryLightningStore()
        ).afit(agent, ["a", "b"])
    assert summary.reward is not None and summary.reward.last == 1.0
