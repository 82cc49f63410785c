"""Groups that run ahead of their use: none is lost, none is trained on twice, and the old ones are given up."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("openai")

import leyden as ly  # noqa: E402
from leyden.algorithm.collector import CollectedRollout, RolloutCollector  # noqa: E402
from leyden.algorithm.policy_gradient.group_stream import GroupStream  # noqa: E402
from leyden.algorithm.policy_gradient.preparation import Preparation  # noqa: E402
from leyden.algorithm.policy_gradient.step_data import RolloutData, StepData, StepRollout  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.errors import ConfigError, EngineError  # noqa: E402
from leyden.objectives.losses import PPOLoss  # noqa: E402
from leyden.store import InMemoryLightningStore  # noqa: E402
from leyden.types import (  # noqa: E402
    EnqueueRolloutRequest,
    TrainingSequence,
    semconv,
)
from tests.algorithm.asking import Rows, ask, backend  # noqa: E402

SIZE = 2
"""Rollouts in a group of the tests without a policy."""


def requests_of(number: int) -> list[EnqueueRolloutRequest]:
    return [EnqueueRolloutRequest(rollout_id=f"ro-{number}-{place}", input=number) for place in range(SIZE)]


class Streaming:
    """A stream on a store whose rollouts the test finishes."""

    def __init__(self, store: ly.LightningStore) -> None:
        self.store = store
        self.claimed = dict[str, str]()
        self.collector = RolloutCollector(store)
        self.stream = GroupStream(self.collector, requests_of, self._collect)

    def _collect(self, requests: Sequence[EnqueueRolloutRequest], keep_until: int) -> AsyncGenerator[CollectedRollout]:
        return self.collector.collect(requests, keep_until=keep_until)

    async def finish(self, *numbers: int) -> None:
        """End all rollouts of some groups."""
        waiting = {f"ro-{number}-{place}" for number in numbers for place in range(SIZE)}
        while waiting:
            for rollout in await self.store.dequeue_many_rollouts(limit=100):
                self.claimed[rollout.rollout_id] = rollout.attempt.attempt_id
            for rollout_id in waiting & self.claimed.keys():
                await self.store.update_attempt(rollout_id, self.claimed[rollout_id], status="succeeded")
                waiting = waiting - {rollout_id}
            await asyncio.sleep(0.01)


async def test_groups_are_taken_as_they_finish_the_lowest_number_first() -> None:
    async with InMemoryLightningStore() as store:
        streaming = Streaming(store)
        streaming.stream.enqueue(range(4), step=0, keep_until=1)
        await streaming.finish(3, 1)
        taken = await streaming.stream.take(2)
        assert [group.number for group in taken] == [1, 3]
        assert [result.rollout_id for result in taken[0].results if result] == ["ro-1-0", "ro-1-1"]
        await streaming.finish(0, 2)
        assert [group.number for group in await streaming.stream.take(2)] == [0, 2]
        assert streaming.stream.groups == {}


async def test_a_dropped_group_is_cancelled_and_the_others_go_on() -> None:
    async with InMemoryLightningStore() as store:
        streaming = Streaming(store)
        streaming.stream.enqueue([0], step=0, keep_until=1)
        streaming.stream.enqueue([1], step=1, keep_until=2)
        await streaming.finish(1)  # by then both are enqueued
        await streaming.stream.drop([0])
        assert [group.number for group in await streaming.stream.take(1)] == [1]
        status = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
        assert status == {"ro-0-0": "cancelled", "ro-0-1": "cancelled", "ro-1-0": "succeeded", "ro-1-1": "succeeded"}


async def test_what_ends_a_collection_is_raised_by_take() -> None:
    async def fails(requests: Sequence[EnqueueRolloutRequest], keep_until: int) -> AsyncGenerator[CollectedRollout]:
        await asyncio.sleep(0.01)
        raise EngineError("the policy has died")
        yield  # a generator

    async with InMemoryLightningStore() as store:
        stream = GroupStream(RolloutCollector(store), requests_of, fails)
        stream.enqueue([0], step=0, keep_until=1)
        with pytest.raises(EngineError, match="the policy has died"):
            await stream.take(1)
        await stream.close()


# ---- in an algorithm ---------------------------------------------------------------------------------------------------


class Noting(ly.PolicyGradient):
    """Remembers which rollouts each step trained on."""

    trained: list[list[str]]

    async def _update(self, iteration: int, data: Any) -> Any:
        self.trained.append([rollout.data.rollout_id for rollout in data.trained])
        return await super()._update(iteration, data)


def noting(rows: Rows, **options: Any) -> Noting:
    defaults: dict[str, Any] = {"n_steps": 4, "tasks_per_step": 2, "rollouts_per_task": 3, "max_tokens": 4}
    policy = options.pop("backend", None) or backend()
    algorithm = Noting(policy, writers=[rows], **(defaults | options))
    algorithm.trained = []
    return algorithm


@ly.llm_rollout
async def plays(task: int, llm: ly.LLM) -> float:
    await ask(llm)
    return random.random()


async def test_rollouts_of_the_next_step_run_while_the_policy_is_trained() -> None:
    rows = Rows()
    algorithm = noting(rows, max_staleness=1)
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(plays, list(range(5)))
        rollouts = await store.query_rollouts()
    trained = list(itertools.chain.from_iterable(algorithm.trained))
    assert len(trained) == len(set(trained)) == 4 * 2 * 3, "each rollout is trained on once"
    replaced = sum(rows.column("stale_groups"))
    assert len(rollouts) == (4 * 2 + replaced) * 3, "none is run that no step needs"
    staleness = rows.column("staleness")
    assert staleness[0] == 0
    assert all(0 < value <= 1 for value in staleness[1:]), "they were enqueued one step before"


async def test_a_group_that_is_too_old_is_cancelled_and_counted() -> None:
    """The first rollout of all hangs; the others are quick."""
    hanging: list[int] = []

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        if not hanging:
            hanging.append(task)
            await asyncio.sleep(3600)
        return random.random()

    rows = Rows()
    algorithm = noting(rows, max_staleness=1, timeout_seconds=None)
    started = time.monotonic()
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(agent, list(range(5)))
        status = Counter(rollout.status for rollout in await store.query_rollouts())
    assert time.monotonic() - started < 60
    assert sum(rows.column("stale_groups")) == 1
    assert status["cancelled"] == 1
    assert rows.column("groups") == [2] * 4


async def test_groups_without_signal_are_replaced_up_to_a_limit() -> None:
    """Task 0 always has one reward; of six groups in three steps, every second one is its."""

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return random.random() if task else 1.0

    rows = Rows()
    algorithm = noting(rows, n_steps=3, max_groups_per_step=6)
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(agent, [0, 1])
        n_rollouts = len(await store.query_rollouts())
    with_signal = [
        groups - flat for groups, flat in zip(rows.column("groups"), rows.column("flat_groups"), strict=True)
    ]
    assert with_signal == [2, 2, 2]
    assert n_rollouts == 3 * sum(rows.column("groups"))
    limited = Rows()
    algorithm = noting(limited, n_steps=2, max_groups_per_step=3)
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(agent, [0])
    assert limited.column("groups") == limited.column("flat_groups") == [3, 3]


async def test_failed_rollouts_count_in_the_reward_and_may_be_left_out() -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        if next(calls) % 3 == 0:
            raise ValueError("no such luck")
        return 1.0

    for failed_reward, reward, flat in ((0.0, 2 / 3, 0), (None, 1.0, 2), (-2.0, 0.0, 0)):
        calls, rows = itertools.count(), Rows()
        algorithm = noting(rows, n_steps=1, failed_reward=failed_reward, success_reward=1.0)
        async with InMemoryLightningStore() as store:
            await ly.Trainer(algorithm=algorithm, store=store, concurrency=1).afit(agent, [0, 1])
        (row,) = rows.train
        assert (row["failed"], row["reward"]) == (2, pytest.approx(reward))
        assert row["flat_groups"] == flat, "without its failures, a group has equal rewards"
        assert row["pass@3"] == 1.0


async def test_a_run_that_was_ahead_resumes_with_the_groups_that_were_under_way(tmp_path: Path) -> None:
    class Stopping(Noting):
        async def _update(self, iteration: int, data: Any) -> Any:
            result = await super()._update(iteration, data)
            if iteration == self.stop_at:
                raise ZeroDivisionError("in step 3")
            return result

        stop_at: int | None = None

    def stopping(rows: Rows, stop_at: int | None) -> Stopping:
        algorithm = Stopping(
            backend(), writers=[rows], n_steps=5, tasks_per_step=2, rollouts_per_task=3, max_tokens=4, max_staleness=1
        )
        algorithm.trained, algorithm.stop_at = [], stop_at
        return algorithm

    first = stopping(Rows(), 2)
    with pytest.raises(ZeroDivisionError):
        await ly.Trainer(algorithm=first, run_dir=tmp_path / "run").afit(plays, list(range(5)))
    second = stopping(Rows(), None)
    await ly.Trainer(algorithm=second, run_dir=tmp_path / "run").afit(plays, list(range(5)), resume=True)
    trained = [*first.trained[:2], *second.trained]
    flat = list(itertools.chain.from_iterable(trained))
    assert len(flat) == len(set(flat)) == 5 * 2 * 3, (
        "the third step, which no checkpoint holds, is done again; the others once"
    )


async def test_a_greedy_rollout_of_each_group_is_its_baseline() -> None:
    temperatures: list[float] = []

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        temperatures.append(llm.sampling_parameters["temperature"])
        return random.random()

    rows = Rows()
    algorithm = noting(rows, n_steps=1, rollouts_per_task=1, advantages="remax", failed_reward=0.0)
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(agent, [0, 1])
    assert Counter(temperatures) == {1.0: 2, 0.0: 2}
    (row,) = rows.train
    assert (row["rollouts"], row["groups"], row["flat_groups"]) == (2, 2, 0), "greedy rollouts are not counted"
    assert len(algorithm.trained[0]) == 2


async def test_a_kl_term_compares_with_the_policy_of_the_start() -> None:
    rows = Rows()
    algorithm = noting(
        rows, n_steps=3, loss=PPOLoss(kl_coefficient=0.1), kl_in_reward=0.01, optim=ly.OptimParams(learning_rate=1e-3)
    )
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(plays, [0, 1])
    kl = rows.column("reference_kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-4), "at first they are one"
    assert any(abs(value) > 1e-3 for value in kl[1:])


@pytest.mark.parametrize(
    ("estimator", "estimate"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_a_kl_penalty_in_the_reward_is_the_sum_over_the_sampled_tokens(
    estimator: str, estimate: Callable[[float], float]
) -> None:
    columns = {"logprobs": [0.0, -1.0, -2.0, -0.5], "reference_logprobs": [-9.0, -1.5, -1.0, -9.0]}
    sequence = TrainingSequence([1, 2, 3, 4], [0.0, 0.5, 0.5, 0.0], columns)
    step = StepData(
        [StepRollout(RolloutData("of two tokens", 1.0), [sequence]), StepRollout(RolloutData("of none", 0.0), [])]
    )
    algorithm = noting(Rows(), kl_in_reward=0.1, kl_in_reward_estimator=estimator)
    preparation = Preparation(
        algorithm.backend,
        algorithm.loss,
        algorithm.advantages,
        1.0,
        kl_in_reward=algorithm.kl_in_reward,
        kl_in_reward_estimator=algorithm.kl_in_reward_estimator,
    )
    wanted = [0.1 * (estimate(0.5) + estimate(-1.0)), 0.0]
    assert preparation.penalties(step) == pytest.approx(wanted)


async def test_groups_of_a_checkpoint_that_are_too_old_are_cancelled_and_not_run() -> None:
    rows = Rows()

    class Resumed(Noting):
        async def setup(self, train_dataset: Any, val_dataset: Any) -> None:
            await super().setup(train_dataset, val_dataset)
            self._next_group, self._waiting, self._generations = 8, {3: -2, 7: 0}, {7: 2}

    algorithm = Resumed(
        backend(), writers=[rows], n_steps=1, tasks_per_step=2, rollouts_per_task=3, max_tokens=4, max_staleness=1
    )
    algorithm.trained = []
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(plays, list(range(5)))
        rollouts = await store.query_rollouts()
    assert rows.column("stale_groups") == [1]
    assert Counter(rollout.status for rollout in rollouts) == {"cancelled": 3, "succeeded": 6}
    generations = {
        rollout.metadata[semconv.SAMPLING_KEY].count("/") for rollout in rollouts if rollout.metadata["step"] == 3
    }
    assert generations == {3}, "group 7 is sampled as it was before"


async def test_what_is_saved_of_a_collection_is_what_is_loaded(tmp_path: Path) -> None:
    algorithm = noting(Rows(), max_staleness=1)
    algorithm._next_group, algorithm._waiting, algorithm._generations = 9, {7: 3}, {7: 1}
    async with algorithm.backend:
        written = await algorithm.save(tmp_path)
        assert written is not None
        await written()
        again = noting(Rows(), max_staleness=1, backend=algorithm.backend)
        await again.load(tmp_path)
    assert (again._next_group, again._waiting, again._generations) == (9, {7: 3}, {7: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosine", "n_steps": 5, "warmup_steps": 5}, "warmup_steps is 5 and n_steps is 5"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_groups_per_step": 1}, "max_groups_per_step is 1"),
        ({"weighting": "rollouts"}, "weighting is 'rollouts'; did you mean 'rollout'"),
        ({"weighting": 0}, "weighting is 0"),
        ({"kl_in_reward": -0.1}, "kl_in_reward is -0.1"),
        ({"kl_in_reward": 0.1, "kl_in_reward_estimator": "k4"}, "kl_in_reward_estimator is 'k4'"),
        ({"kl_in_reward_estimator": "k3"}, "kl_in_reward_estimator is 'k3', and kl_in_reward is 0; set kl_in_reward"),
        ({"failed_reward": float("nan")}, "failed_reward is nan"),
        ({"schedule": "cosin"}, "cosin"),
        ({"advantages": "gae"}, "has no value head; make it with value_head=True, or give critic="),
        ({"reference": ly.EmbeddedBackend(WEIGHTS)}, "nothing compares with it; set kl_in_reward"),
        ({"critic": ly.EmbeddedBackend(WEIGHTS)}, "needs no values; leave critic out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_with_their_name_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        noting(Rows(), **options)
