"""What one step trains on, as properties: every rollout weighs the same, every task has its turn, and all of
it is a function of the seed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.adapter import merge_triplets
from leyden.algorithm.policy_gradient.batch import Group, RolloutData, build_step, minibatches, task_indices
from leyden.maths import ESTIMATORS
from leyden.maths.advantages import dr_grpo, grpo
from leyden.types import TrainingSequence, Triplet, TripletPrompt, TripletResponse

TOKENS = st.lists(st.integers(0, 50), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> list[Triplet]:
    """Calls of one attempt; each prompt extends the last answer, or starts anew."""
    calls: list[Triplet] = []
    seen: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(TOKENS) if draw(st.booleans()) else seen + draw(TOKENS)
        answer = draw(TOKENS)
        logprobs = [-draw(st.floats(0.0, 5.0, width=32)) for _ in answer]
        calls.append(
            Triplet(
                prompt=TripletPrompt(token_ids=prompt), response=TripletResponse(token_ids=answer, logprobs=logprobs)
            )
        )
        seen = prompt + answer
    return calls


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    rewards = st.sampled_from([0.0, 0.25, 1.0])
    return [
        Group(
            [
                RolloutData(f"ro-{group}-{place}", draw(rewards), merge_triplets(draw(conversations())))
                for place in range(draw(st.integers(0, 4)))
            ]
        )
        for group in range(draw(st.integers(1, 4)))
    ]


def weight(sequences: list[TrainingSequence]) -> float:
    return math.fsum(value for sequence in sequences for value in sequence.weights)


@given(groups(), st.sampled_from(sorted(ESTIMATORS)))
def test_groups_are_trained_on_counted_as_flat_or_counted_as_small(batch: list[Group], advantages: str) -> None:
    step = build_step(batch, ESTIMATORS[advantages])
    trained = [
        group for group in batch if len(group.rollouts) > 1 and len({rollout.reward for rollout in group.rollouts}) > 1
    ]
    assert step.small_groups == sum(len(group.rollouts) < 2 for group in batch)
    assert step.flat_groups + step.small_groups + len(trained) == len(batch)
    assert len(step.rollouts) == sum(len(group.rollouts) for group in trained)
    assert math.isclose(math.fsum(rollout.advantage for rollout in step.rollouts), 0.0, abs_tol=1e-6)
    for rollout in step.rollouts:
        assert math.isclose(weight(rollout.sequences), 1.0, rel_tol=1e-9)


@given(groups())
def test_only_sampled_tokens_have_a_weight_and_an_advantage(batch: list[Group]) -> None:
    for rollout in build_step(batch, grpo).rollouts:
        for sequence in rollout.sequences:
            assert (
                len(sequence.token_ids)
                == len(sequence.columns["logprobs"])
                == len(sequence.weights)
                == len(sequence.columns["advantages"])
            )
            for token_weight, advantage in zip(sequence.weights, sequence.columns["advantages"], strict=True):
                assert advantage == (rollout.advantage if token_weight else 0.0)


@given(groups(), st.integers(1, 20), st.integers(), st.integers(0, 99), st.integers(0, 9))
def test_minibatches_partition_the_rollouts_and_each_weighs_one(
    batch: list[Group], size: int, seed: int, step: int, epoch: int
) -> None:
    data = build_step(batch, dr_grpo)
    if not data.rollouts:
        return
    cut = minibatches(data.rollouts, size=size, seed=seed, step=step, epoch=epoch)
    assert cut == minibatches(data.rollouts, size=size, seed=seed, step=step, epoch=epoch)
    everything = Counter(str(sequence.token_ids) for rollout in data.rollouts for sequence in rollout.sequences)
    assert Counter(str(sequence.token_ids) for sequences in cut for sequence in sequences) == everything
    for sequences in cut:
        assert math.isclose(weight(sequences), 1.0, rel_tol=1e-9)
    assert len(cut) == max(1, round(len(data.rollouts) / size))


@given(groups())
def test_in_one_minibatch_each_rollout_weighs_the_same_however_many_turns_it_took(batch: list[Group]) -> None:
    data = build_step(batch, dr_grpo)
    if not data.rollouts:
        return
    (sequences,) = minibatches(data.rollouts, size=len(data.rollouts), seed=0, step=0, epoch=0)
    found = Counter((tuple(s.token_ids), tuple(s.weights), tuple(s.columns["advantages"])) for s in sequences)
    share = 1 / len(data.rollouts)
    wanted = Counter(
        (tuple(s.token_ids), tuple(w * share for w in s.weights), tuple(s.columns["advantages"]))
        for rollout in data.rollouts
        for s in rollout.sequences
    )
    assert found == wanted  # and each rollout's own weights sum to 1: see above


def tokens_with_context(rollout: Any) -> Counter[tuple[tuple[int, ...], int, float, float]]:
    """Each trained token with all that its loss depends on: what came before it, its log-probability, its weight times advantage."""
    found: Counter[tuple[tuple[int, ...], int, float, float]] = Counter()
    for sequence in rollout.sequences:
        for place, token_weight in enumerate(sequence.weights):
            if token_weight:
                pull = round(token_weight * sequence.columns["advantages"][place], 12)
                context = tuple(sequence.token_ids[:place])
                found[context, sequence.token_ids[place], sequence.columns["logprobs"][place], pull] += 1
    return found


@given(st.lists(conversations(), min_size=2, max_size=4))
@settings(max_examples=50)
def test_merging_the_calls_of_a_conversation_changes_no_token_of_the_loss(attempts: list[list[Triplet]]) -> None:
    def step_of(trajectories: Any) -> Any:
        rollouts = [
            RolloutData(f"ro-{place}", float(place), trajectories(calls)) for place, calls in enumerate(attempts)
        ]
        return build_step([Group(rollouts)], grpo).rollouts

    merged = step_of(merge_triplets)
    apart = step_of(lambda calls: [trajectory for call in calls for trajectory in merge_triplets([call])])
    assert list(map(tokens_with_context, merged)) == list(map(tokens_with_context, apart))


@given(st.integers(1, 12), st.integers(1, 7), st.integers(), st.integers(1, 4))
def test_an_epoch_visits_each_task_once_however_it_is_cut_into_steps(
    n_tasks: int, tasks_per_step: int, seed: int, n_epochs: int
) -> None:
    n_steps = -(-n_tasks * n_epochs // tasks_per_step)
    visited = [
        task
        for step in range(n_steps)
        for task in task_indices(n_tasks, step, tasks_per_step=tasks_per_step, seed=seed)
    ]
    for epoch in range(n_epochs):
        assert sorted(visited[epoch * n_tasks : (epoch + 1) * n_tasks]) == list(range(n_tasks))


@given(st.integers(1, 30), st.integers(0, 200), st.integers(1, 30), st.integers())
def test_the_tasks_of_a_step_are_a_function_of_seed_and_step_alone(
    n_tasks: int, step: int, tasks_per_step: int, seed: int
) -> None:
    once = task_indices(n_tasks, step, tasks_per_step=tasks_per_step, seed=seed)
    assert once == task_indices(n_tasks, step, tasks_per_step=tasks_per_step, seed=seed)
    assert len(once) == tasks_per_step


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [task_indices(20, step, tasks_per_step=20, seed=seed) for step in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("n_rollouts", "size", "expected"), [(12, 4, [4, 4, 4]), (12, 5, [6, 6]), (3, 100, [3]), (5, 2, [2, 3])]
)
def test_minibatches_are_about_as_large_as_asked(n_rollouts: int, size: int, expected: list[int]) -> None:
    call = Triplet(prompt=TripletPrompt(token_ids=[1]), response=TripletResponse(token_ids=[2], logprobs=[-1.0]))
    rollouts = [RolloutData(f"ro-{n}", float(n), merge_triplets([call])) for n in range(n_rollouts)]
    data = build_step([Group(rollouts)], dr_grpo)
    cut = minibatches(data.rollouts, size=size, seed=0, step=0, epoch=0)
    assert sorted(map(len, cut)) == sorted(expected)
