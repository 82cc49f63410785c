"""The part of the store's contract about what attempts came to: rewards, tokens, cost, failures; pages and summaries of them."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.errors import ConfigError, UnknownRun
from leyden.store import LightningStore
from leyden.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Retention,
    RolloutConfig,
    RunRecord,
    Span,
    SpanStatus,
    Spending,
    find_final_reward,
    reward_attributes,
    semconv,
)
from leyden.types.run_record import algorithm_group
from tests.contracts.store.support import claimed, ids, span_of


def reward_span(rollout: AttemptedRollout, number: int, *, sequence_id: int = 0, **rewards: float) -> Span:
    """A span that says rewards; `number` makes its id."""
    return span_of(
        rollout, f"{number:016x}", name=semconv.REWARD, sequence_id=sequence_id, attributes=reward_attributes(rewards)
    )


def call_span(rollout: AttemptedRollout, number: int, prompt: int, response: int, cost: float | None = None) -> Span:
    """A model call as the gateway records it."""
    attributes: dict[str, Any] = {semconv.GEN_AI_INPUT_TOKENS: prompt, semconv.GEN_AI_OUTPUT_TOKENS: response}
    if cost is not None:
        attributes[semconv.COST] = cost
    return span_of(rollout, f"{number:016x}", name=semconv.MODEL_CALL, attributes=attributes)


async def attempt_of(store: LightningStore, rollout: AttemptedRollout) -> Attempt:
    """The attempt as the store has it now."""
    return await store.get_attempt_by_id(rollout.rollout_id, rollout.attempt.attempt_id)


async def finished(
    store: LightningStore,
    *,
    reward: float | None = None,
    tokens: int = 0,
    cost: float | None = None,
    status: Any = "succeeded",
    metadata: dict[str, Any] | None = None,
    **fields: Any,
) -> AttemptedRollout:
    """A rollout whose only attempt came to this."""
    rollout = await claimed(store, **fields)
    if tokens or cost is not None:
        await store.add_span(call_span(rollout, 1, tokens, 0, cost))
    if reward is not None:
        await store.add_span(reward_span(rollout, 2, primary=reward))
    await store.update_attempt(**ids(rollout), status=status, metadata=metadata or UNSET)
    return rollout


# ---- attempts --------------------------------------------------------------------------------------------------------


async def test_an_attempt_without_spans_came_to_nothing(store: LightningStore) -> None:
    rollout = await claimed(store)
    assert rollout.attempt == await attempt_of(store, rollout)
    assert (rollout.attempt.reward, rollout.attempt.rewards, rollout.attempt.cost) == (None, {}, None)
    assert (rollout.attempt.prompt_tokens, rollout.attempt.response_tokens, rollout.attempt.failure) == (0, 0, None)


async def test_the_last_reward_counts_with_all_its_dimensions(store: LightningStore) -> None:
    rollout = await claimed(store)
    await store.add_span(reward_span(rollout, 1, primary=0.25))
    assert (await attempt_of(store, rollout)).reward == 0.25
    await store.add_many_spans([reward_span(rollout, 2, score=0.5, style=-1.0), span_of(rollout, "00000000000000ff")])
    attempt = await attempt_of(store, rollout)
    assert (attempt.reward, attempt.rewards) == (0.5, {"score": 0.5, "style": -1.0})


async def test_the_reward_is_what_find_final_reward_finds_whatever_the_order_of_arrival(store: LightningStore) -> None:
    rollout = await claimed(store)
    for number, sequence_id in enumerate((5, 3, 9, 4), start=1):
        await store.add_span(reward_span(rollout, number, sequence_id=sequence_id, primary=float(sequence_id)))
        spans = await store.query_spans(rollout.rollout_id, "latest")
        assert (await attempt_of(store, rollout)).reward == find_final_reward(spans.items)
    assert (await attempt_of(store, rollout)).reward == 9.0


async def test_a_span_that_is_there_already_counts_once(store: LightningStore) -> None:
    rollout = await claimed(store)
    for _ in range(2):
        await store.add_many_spans([call_span(rollout, 1, 10, 2, 0.5), call_span(rollout, 2, 1, 1)])
        await store.add_span(call_span(rollout, 1, 10, 2, 0.5))
    attempt = await attempt_of(store, rollout)
    assert (attempt.prompt_tokens, attempt.response_tokens, attempt.cost) == (11, 3, 0.5)


@pytest.mark.parametrize("said", [True, "7", -1, 1.5, 2**60])
async def test_what_is_no_number_of_tokens_counts_nothing(store: LightningStore, said: Any) -> None:
    rollout = await claimed(store)
    attributes = {semconv.GEN_AI_INPUT_TOKENS: said, semconv.GEN_AI_OUTPUT_TOKENS: 3, semconv.COST: "free"}
    await store.add_span(span_of(rollout, name=semconv.MODEL_CALL, attributes=attributes))
    attempt = await attempt_of(store, rollout)
    assert (attempt.prompt_tokens, attempt.response_tokens, attempt.cost) == (0, 3, None)


async def test_a_call_that_an_sdk_recorded_too_counts_once(store: LightningStore) -> None:
    rollout = await claimed(store)
    usage = {semconv.GEN_AI_INPUT_TOKENS: 10, semconv.GEN_AI_OUTPUT_TOKENS: 2}
    await store.add_many_spans([call_span(rollout, 1, 10, 2), span_of(rollout, name="chat gpt", attributes=usage)])
    assert (await attempt_of(store, rollout)).prompt_tokens == 10


@pytest.mark.parametrize(
    ("status", "metadata", "failure"),
    [
        ("succeeded", {"reason_kind": "agent"}, None),
        ("failed", {}, "failed"),
        ("failed", {"reason_kind": "agent"}, "agent"),
        ("failed", {"reason_kind": 7}, "failed"),
        ("timeout", {}, "timeout"),
    ],
)
async def test_an_attempt_that_ends_without_success_has_a_kind_of_failure(
    store: LightningStore, status: Any, metadata: dict[str, Any], failure: str | None
) -> None:
    rollout = await claimed(store)
    ended = await store.update_attempt(**ids(rollout), status=status, metadata=metadata)
    assert ended.failure == failure
    assert (await attempt_of(store, rollout)).failure == failure
    assert (await store.query_attempts(rollout.rollout_id))[0].failure == failure


# ---- rollouts --------------------------------------------------------------------------------------------------------


async def test_a_rollout_has_its_arm_and_the_version_that_was_the_newest(store: LightningStore) -> None:
    await store.add_resources({}, resources_id="rs")
    first = await store.enqueue_rollout(1, resources_id="rs", arm="control")
    await store.update_resources("rs", {})
    await store.add_resources({}, resources_id="other")
    await store.update_resources("rs", {})
    second = await store.enqueue_rollout(2, arm="canary")
    started = await store.start_rollout(3, resources_id="other", arm="canary")
    versions = {(rollout.resources_id, rollout.resources_version) for rollout in (first, second, started)}
    assert ("rs", 1) in versions
    assert ("other", 1) in versions
    assert [rollout.arm for rollout in await store.query_rollouts()] == ["control", "canary", "canary"]
    assert [rollout.input for rollout in await store.query_rollouts(arm_in=["canary"])] == [2, 3]
    found = await store.query_rollouts(resources_id="rs", resources_version=1)
    assert [rollout.rollout_id for rollout in found] == [first.rollout_id]
    moved = await store.update_rollout(second.rollout_id, resources_id="other")
    assert (moved.resources_id, moved.resources_version) == ("other", 1)


@pytest.mark.parametrize("sort_order", ["asc", "desc"])
async def test_rollouts_sort_by_what_they_came_to_and_those_without_it_come_last(
    store: LightningStore, sort_order: Any
) -> None:
    for index, reward in enumerate((0.5, None, 1.0, 0.0, 0.5)):
        await finished(store, task=index, reward=reward, tokens=10 * index, cost=None if index == 2 else index / 4)
    await store.enqueue_rollout("waits")
    ascending = sort_order == "asc"

    async def order(measure: str, **page: Any) -> list[Any]:
        found = await store.query_rollouts(sort_by=measure, sort_order=sort_order, **page)
        return [rollout.input for rollout in found]

    by_reward = [3, 0, 4, 2] if ascending else [2, 4, 0, 3]
    last = [1, "waits"] if ascending else ["waits", 1]
    assert await order("reward") == by_reward + last
    assert [await order("reward", limit=2, offset=start) for start in (0, 2, 4, 6)] == [
        by_reward[:2],
        by_reward[2:],
        last,
        [],
    ]
    assert await order("tokens", limit=5) == ([0, 1, 2, 3, 4] if ascending else [4, 3, 2, 1, 0])
    assert (await order("cost"))[:4] == ([0, 1, 3, 4] if ascending else [4, 3, 1, 0])
    page = await store.query_rollouts(sort_by="reward", limit=2)
    assert (page.total, page.exact) == (6, True)


async def test_rollouts_are_found_by_ranges_and_failures(store: LightningStore) -> None:
    for index, reward in enumerate((0.0, 0.5, 1.0)):
        await finished(store, task=index, reward=reward, tokens=100 * index)
    await finished(store, task="broken", status="failed", metadata={"reason_kind": "agent"})
    await finished(store, task="slow", status="timeout")
    await store.enqueue_rollout("waits")

    async def found(**filters: Any) -> list[Any]:
        return [rollout.input for rollout in await store.query_rollouts(**filters)]

    assert await found(between={"reward": (0.5, None)}) == [1, 2]
    assert await found(between={"reward": (None, 0.5)}) == [0]
    assert await found(between={"reward": (0.5, None), "tokens": (0, 200)}) == [1]
    assert await found(between={"reward": (None, None)}) == [0, 1, 2]
    assert await found(failure_in=["agent"]) == ["broken"]
    assert await found(failure_in=["agent", "timeout"], limit=1, offset=1) == ["slow"]
    assert await found(failure_in=["agent"], between={"reward": (1.0, None)}, filter_logic="or") == [2, "broken"]
    assert await found(failure_in=[]) == []
    assert await found(status_in=["failed"], sort_by="failure", sort_order="desc") == ["slow", "broken"]


async def test_a_rollout_that_was_tried_again_has_what_its_last_attempt_came_to(store: LightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    first = await claimed(store, config=config)
    await store.add_span(reward_span(first, 1, primary=0.25))
    await store.update_attempt(**ids(first), status="failed", metadata={"reason_kind": "agent"})
    second = await store.dequeue_rollout()
    assert second is not None
    await store.add_span(reward_span(second, 1, primary=0.75))
    await store.update_attempt(**ids(second), status="succeeded")
    await store.add_span(reward_span(first, 2, primary=0.0))  # late, and of the attempt that does not count
    summary = await store.summarise_rollouts()
    assert (summary.by_failure, summary.measures["reward"].mean) == ({}, 0.75)
    assert [attempt.reward for attempt in await store.query_attempts(first.rollout_id)] == [0.0, 0.75]


async def test_a_late_reward_reaches_the_finished_rollout(store: LightningStore) -> None:
    rollout = await finished(store, reward=0.25, tokens=3)
    await store.add_span(reward_span(rollout, 9, primary=1.0))
    await store.add_span(call_span(rollout, 10, 4, 0, 0.5))
    assert [found.rollout_id for found in await store.query_rollouts(between={"reward": (1.0, None)})] == [
        rollout.rollout_id
    ]
    summary = await store.summarise_rollouts(measures=["reward", "tokens", "cost"])
    assert {name: measure.mean for name, measure in summary.measures.items()} == {
        "reward": 1.0,
        "tokens": 7,
        "cost": 0.5,
    }


# ---- summaries -------------------------------------------------------------------------------------------------------


async def test_a_summary_of_nothing_is_empty(store: LightningStore) -> None:
    summary = await store.summarise_rollouts(measures=["reward", "seconds"])
    assert (summary.finished, summary.by_status, summary.by_failure, summary.measures) == (0, {}, {}, {})


async def test_a_summary_counts_statuses_failures_and_values(store: LightningStore) -> None:
    await store.start_run(RunRecord(run_id="run-1", name="n", kind="fit", start_time=1.0))
    rewards = [0.0, 0.1, 0.25, 0.25, 0.5, 0.99, 1.0]
    for index, reward in enumerate(rewards):
        await finished(store, reward=reward, tokens=index, run_id="run-1" if index % 2 else None, mode="train")
    await finished(store, status="failed", metadata={"reason_kind": "agent"}, mode="val", arm="canary")
    await finished(store, status="timeout", mode="val", arm="canary")
    cancelled = await store.enqueue_rollout("never", mode="val")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    await store.enqueue_rollout("waits")

    summary = await store.summarise_rollouts(measures=["reward", "tokens", "cost", "seconds"], bins=4)
    assert summary.finished == 10
    assert summary.by_status == {"succeeded": 7, "failed": 2, "cancelled": 1}
    assert summary.by_failure == {"agent": 1, "timeout": 1}
    assert "cost" not in summary.measures
    reward = summary.measures["reward"]
    assert (reward.count, reward.minimum, reward.maximum) == (7, 0.0, 1.0)
    assert reward.mean == pytest.approx(sum(rewards) / 7)
    assert reward.histogram.edges == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert reward.histogram.counts == [2, 2, 1, 2]
    assert summary.measures["tokens"].count == 9
    assert sum(summary.measures["seconds"].histogram.counts) == 9

    of_run = await store.summarise_rollouts(run_id="run-1")
    assert (of_run.finished, of_run.measures["reward"].count) == (3, 3)
    assert (await store.summarise_rollouts(arm_in=["canary"])).by_failure == {"agent": 1, "timeout": 1}
    assert (await store.summarise_rollouts(mode_in=["train"])).by_status == {"succeeded": 7}
    assert (await store.summarise_rollouts(between={"reward": (0.5, None)})).finished == 3
    assert (await store.summarise_rollouts(measures=[])).finished == 10


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5], [-1e308, 1e308], [0.0, 5e-324], [-3.0, 7.0]])
async def test_a_histogram_holds_every_value_whatever_their_range(store: LightningStore, values: list[float]) -> None:
    for value in values:
        await finished(store, reward=value)
    reward = (await store.summarise_rollouts(bins=7)).measures["reward"]
    assert (reward.minimum, reward.maximum) == (min(values), max(values))
    assert sum(reward.histogram.counts) == len(values)
    assert len(reward.histogram.edges) == len(reward.histogram.counts) + 1
    assert (reward.histogram.edges[0], reward.histogram.edges[-1]) == (min(values), max(values))


@pytest.mark.parametrize("name", ["rollout_id_in", "rollout_id_contains", "group_id", "replay_from", "colour"])
async def test_a_summary_refuses_a_filter_that_only_pages_have(store: LightningStore, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        await store.summarise_rollouts(**{name: "x"})  # pyright: ignore[reportArgumentType]  # the tested error
    with pytest.raises(TypeError, match="colour"):
        await store.query_rollouts(colour="x")  # pyright: ignore[reportCallIssue]  # the tested error


async def test_what_no_summary_has_is_refused_by_name(store: LightningStore) -> None:
    with pytest.raises(UnknownRun, match="run-9"):
        await store.summarise_rollouts(run_id="run-9")
    with pytest.raises(ConfigError, match="bins"):
        await store.summarise_rollouts(bins=0)
    wrong: Any = ["colour"]
    with pytest.raises(ConfigError, match="colour"):
        await store.summarise_rollouts(measures=wrong)
    with pytest.raises(ConfigError, match="colour"):
        await store.query_rollouts(between={wrong[0]: (0, 1)})


async def test_forgotten_rollouts_are_in_no_summary(store: LightningStore) -> None:
    for reward in (0.0, 0.5, 1.0):
        await finished(store, reward=reward)
    assert await store.prune(Retention(max_rollouts=1)) == 2
    assert (await store.summarise_rollouts()).measures["reward"].minimum == 1.0


async def test_an_enqueued_arm_is_an_id(store: LightningStore) -> None:
    with pytest.raises(ConfigError, match="arm"):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, arm="")])


# ---- what a run has spent --------------------------------------------------------------------------------------------


async def test_the_spending_of_a_run_has_all_attempts_and_the_algorithms_own_calls(store: LightningStore) -> None:
    await store.start_run(RunRecord(run_id="run-1", name="n", kind="fit", start_time=1.0))
    nothing = await store.sum_spending("run-1")
    assert nothing == Spending(attempts=0, prompt_tokens=0, response_tokens=0, cost=None, unpriced_calls=0)
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    first = await claimed(store, config=config, run_id="run-1")
    await store.add_span(call_span(first, 1, 10, 1, 0.5))
    await store.update_attempt(**ids(first), status="failed")
    second = await store.dequeue_rollout()
    assert second is not None
    await store.add_many_spans([call_span(second, 2, 20, 2, 0.25), call_span(second, 3, 5, 5, 0.0)])
    await store.add_span(call_span(second, 3, 5, 5, 0.0))  # delivered twice
    await store.add_span(call_span(first, 4, 1, 0, 0.125))  # a late call of the attempt that has failed
    own = await store.start_rollout("reflection", run_id=None, group_id=algorithm_group("run-1"))
    await store.add_span(call_span(own, 5, 100, 0, 2.0))
    other = await claimed(store)
    await store.add_span(call_span(other, 6, 1000, 0, 64.0))
    replayed = call_span(second, 7, 1000, 0, 64.0)
    replayed.attributes[semconv.REPLAYED] = True
    await store.add_span(replayed)
    spent = await store.sum_spending("run-1")
    assert spent == Spending(attempts=3, prompt_tokens=136, response_tokens=8, cost=2.875, unpriced_calls=0)
    with pytest.raises(UnknownRun, match="run-9"):
        await store.sum_spending("run-9")


async def test_answered_calls_without_a_cost_are_counted_and_failed_ones_only_if_they_may_be_billed(
    store: LightningStore,
) -> None:
    rollout = await claimed(store)
    ok, failed = SpanStatus(status_code="OK"), SpanStatus(status_code="ERROR")
    spans = [
        call_span(rollout, 1, 1, 1, 0.5).model_copy(update={"status": ok}),
        call_span(rollout, 2, 1, 1).model_copy(update={"status": ok}),
        call_span(rollout, 3, 0, 0).model_copy(update={"status": failed}),
        call_span(rollout, 4, 0, 0).model_copy(update={"status": failed}),
        span_of(rollout, f"{5:016x}", name="a step of the agent").model_copy(update={"status": ok}),
    ]
    spans[3].attributes[semconv.COST_UNKNOWN] = "given up"
    for span in spans:
        await store.add_span(span)
    attempt = await attempt_of(store, rollout)
    assert (attempt.cost, attempt.unpriced_calls) == (0.5, 2)


async def test_what_retention_removes_stays_in_the_spending_of_its_run(store: LightningStore) -> None:
    await store.start_run(RunRecord(run_id="run-1", name="n", kind="fit", start_time=1.0))
    for index in range(4):
        await finished(store, tokens=1, cost=None if index == 3 else 2.0**index, run_id="run-1")
    own = await store.start_rollout("reflection", run_id=None, group_id=algorithm_group("run-1"))
    await store.add_span(call_span(own, 5, 10, 0, 8.0))
    await store.update_attempt(**ids(own), status="succeeded")
    await finished(store, tokens=1, cost=64.0)
    before = await store.sum_spending("run-1")
    assert (before.attempts, before.prompt_tokens, before.cost) == (5, 14, 15.0)
    assert await store.prune(Retention(max_rollouts=1)) >= 5
    assert await store.sum_spending("run-1") == before
