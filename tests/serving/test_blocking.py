"""The loops of seed 003 run as they are written; only what their variables stand for is made here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leyden import LitAgentRunner, algo, prompt_rollout
from leyden.algorithm import FewShot
from leyden.errors import ConfigError, UnknownAttempt, UnknownResources
from leyden.serving import BlockingAlgorithm, BlockingStore
from leyden.store import InMemoryLightningStore
from leyden.types import NamedResources, PromptTemplate, Span, get_reward_value, reward_attributes

OLD: NamedResources = {"prompt": PromptTemplate(template="old {task}")}
NEW: NamedResources = {"prompt": PromptTemplate(template="new {task}")}


@dataclass
class Result:
    spans: Sequence[Span]


class Agent:
    """Answers with spans of its own, as the agent of the A/B example does."""

    def rollout(self, task: str, resources: NamedResources | None) -> Result:
        prompt = (resources or {})["prompt"]
        assert isinstance(prompt, PromptTemplate)
        reward: Any = reward_attributes({"primary": float(prompt.template.startswith("new"))})
        ids: dict[str, Any] = {"rollout_id": "", "attempt_id": "", "trace_id": "t", "sequence_id": 0}
        return Result([Span(**ids, span_id="s", name="answer", attributes=reward)])


@pytest.fixture
def store():
    with BlockingStore(InMemoryLightningStore()) as store:
        yield store


def released_as_versions(store: BlockingStore) -> None:
    store.update_resources("rs", OLD)
    store.update_resources("rs", NEW)  # the latest
    store.set_label("production", "rs", 1)
    store.set_label("canary", "rs", 2)


def released_first(store: BlockingStore) -> None:
    store.add_resources(OLD, resources_id="rs-old")
    store.add_resources(NEW, resources_id="rs-new")  # the latest
    store.set_label("production", "rs-old", 1)
    store.set_label("canary", "rs-new", 1)


def released(store: BlockingStore) -> None:
    store.add_resources(NEW, resources_id="rs-new")
    store.add_resources(OLD, resources_id="rs-old")  # the latest
    store.set_label("production", "rs-old", 1)
    store.set_label("canary", "rs-new", 1)


@pytest.mark.parametrize("release", [released, released_first, released_as_versions])
def test_the_ab_example_runs_as_written(store: BlockingStore, release: Callable[[BlockingStore], None]) -> None:
    release(store)
    agent = Agent()
    for n in range(6):
        store.enqueue_rollout(f"task {n}", arm="control" if n % 2 else "treatment")

    for rollout in store.dequeue_rollout():
        if rollout.group == 'control':  # fmt: skip
            resources = store.get_latest_resources()
        else:
            resources = store.get_optimized_resources()
        result = agent.rollout(rollout.input, resources)
        store.add_span(rollout.id, result.spans, metadata={'group': rollout.group})  # fmt: skip

    rollouts = store.query_rollouts()
    assert [(each.status, each.arm, each.attempt.reward) for each in rollouts] == [
        ("succeeded", "treatment", 1.0),
        ("succeeded", "control", 0.0),
    ] * 3
    assert store.summarise_rollouts(arm_in=["treatment"]).measures["reward"].mean == 1.0
    spans = store.query_spans()
    assert [span.attributes["group"] for span in spans] == ["treatment", "control"] * 3


def test_the_latest_resources_are_those_in_production_once_there_are_any(store: BlockingStore) -> None:
    assert store.get_latest_resources() is None
    released_as_versions(store)
    assert store.get_latest_resources() == OLD
    store.set_label("production", "rs", 2)
    assert store.get_latest_resources() == NEW, "a promotion"
    store.set_label("production", "rs", 1)
    assert store.get_latest_resources() == OLD, "a rollback"
    store.remove_label("production")
    assert store.get_latest_resources() == NEW, "nothing is released, and the newest is all there is"


@prompt_rollout
def greets(task: str, prompt_template: PromptTemplate) -> float:
    return float(prompt_template.template.startswith("new"))


async def test_the_continual_example_runs_as_written(tmp_path: Path) -> None:
    memory = InMemoryLightningStore()
    await memory.add_resources(OLD)
    collected: list[Span] = []
    learned: list[int] = []
    tasks = iter(["hello", "hello", "good morning", "hello", "bye"])

    class NoMoreTasks(Exception):
        pass

    def user_prepare_next_task() -> str:
        if (task := next(tasks, None)) is None:
            raise NoMoreTasks
        return task

    def is_sufficient_data(new_data: Sequence[Span]) -> bool:
        collected.extend(new_data)
        return len([span for span in collected if get_reward_value(span) is not None]) == 3

    @algo
    async def prefers_new(*, store: Any, train_dataset: Sequence[str]) -> NamedResources:
        rewards = [each.attempt.reward for each in await store.query_rollouts()]
        learned.extend([len(rewards), len(train_dataset)])
        return NEW if max(rewards) < 1 else OLD

    with BlockingStore(memory) as store:
        algorithm = BlockingAlgorithm(prefers_new, greets, store, run_dir=tmp_path / "run")
        resources = result = None
        async with LitAgentRunner[str]().run_context(agent=greets, store=memory) as runner:
            with pytest.raises(NoMoreTasks):  # noqa: PT012 -- the example's loop never ends
                while True:
                    next_task = user_prepare_next_task()
                    result = await runner.step(next_task, resources)
                    new_data = store.poll_new_spans()
                    if is_sufficient_data(new_data):
                        updated_resources = algorithm.optimize(new_data)
                        store.add_resources(updated_resources)
        assert result is not None
        assert result.status == "succeeded"
        assert learned == [1, 1]  # the spans of the last step alone are new
        assert store.get_latest_resources() == NEW
        assert [each.attempt.reward for each in store.query_rollouts()] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_an_algorithm_learns_from_recorded_spans_with_rollouts_of_its_own(store: BlockingStore, tmp_path: Path) -> None:
    released(store)
    for task in ("a", "b", "a"):
        store.enqueue_rollout(task)
    for rollout in store.dequeue_rollout():
        store.add_span(rollout.id, Agent().rollout(rollout.input, OLD).spans)
    search = FewShot(n_candidates=2, instructions=["new {task}"], n_demonstrations=1)
    algorithm = BlockingAlgorithm(search, greets, store, run_dir=tmp_path / "run")
    assert algorithm.optimize(store.poll_new_spans()) == NEW
    assert store.query_rollouts().total == 3, "training must not add rollouts to the store that serves"


def test_an_algorithm_without_resources_is_refused(store: BlockingStore, tmp_path: Path) -> None:
    released(store)
    store.enqueue_rollout("a")
    for rollout in store.dequeue_rollout():
        store.add_span(rollout.id, Agent().rollout(rollout.input, OLD).spans)

    @algo
    def counts(*, train_dataset: Sequence[str]) -> int:
        return len(train_dataset)

    with pytest.raises(ConfigError, match="result is 1, which has no resources"):
        BlockingAlgorithm(counts, greets, store, run_dir=tmp_path / "run").optimize(store.poll_new_spans())


def test_a_rollout_whose_loop_is_left_returns_to_the_queue(store: BlockingStore) -> None:
    for task in ("a", "b"):
        store.enqueue_rollout(task)
    with pytest.raises(KeyError):
        _process(store)
    assert [each.status for each in store.query_rollouts()] == ["requeuing", "queuing"]
    assert [rollout.input for rollout in store.dequeue_rollout()] == ["a", "b"]
    assert [each.status for each in store.query_rollouts()] == ["succeeded", "succeeded"]


def _process(store: BlockingStore) -> None:
    for rollout in store.dequeue_rollout():
        raise KeyError(rollout.id)


def test_a_loop_can_end_its_rollouts_itself(store: BlockingStore) -> None:
    store.enqueue_rollout("a")
    for rollout in store.dequeue_rollout():
        store.update_attempt(rollout.id, rollout.attempt.attempt_id, status="failed")
    assert store.query_rollouts()[0].status == "failed"


def test_released_resources_are_chosen_by_group(store: BlockingStore) -> None:
    with pytest.raises(UnknownResources, match="production"):
        store.get_optimized_resources()
    released(store)
    assert store.get_optimized_resources() == store.get_optimized_resources(group="canary") == NEW
    assert store.get_optimized_resources(group="control") == store.get_optimized_resources(group="other") == OLD
    store.remove_label("canary")
    assert store.get_optimized_resources() == OLD


def test_spans_need_an_attempt(store: BlockingStore) -> None:
    waiting = store.enqueue_rollout("a")
    with pytest.raises(UnknownAttempt, match="claim it first"):
        store.add_span(waiting.rollout_id, [])


async def test_methods_block_under_a_running_loop(store: BlockingStore) -> None:
    store.enqueue_rollout("a")
    asked = [asyncio.to_thread(store.statistics) for _ in range(4)]
    assert [each["total_rollouts"] for each in await asyncio.gather(*asked)] == [1] * 4
    assert store.url == "memory://"


def test_spans_can_be_watched_in_a_plain_loop(store: BlockingStore) -> None:
    store.enqueue_rollout("a")
    for rollout in store.dequeue_rollout():
        store.add_span(rollout.id, Agent().rollout("a", OLD).spans)
    watching = store.watch_spans(after=None)
    assert next(watching).name == "answer"
    watching.close()
