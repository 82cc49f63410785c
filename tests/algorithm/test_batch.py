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
from leyden.algorithm.policy_gradient.step_data import (
    Group,
    RolloutData,
    StepData,
    build_step,
    epoch_place,
    estimate_advantages,
    minibatches,
    number_calls,
    weighted,
)
from leyden.objectives import Advantages
from leyden.objectives.advantages import (
    DrGRPOAdvantages,
    GAEAdvantages,
    GRPOAdvantages,
    ProcessAdvantages,
    ReinforcePPAdvantages,
    ReMaxAdvantages,
    RLOOAdvantages,
)
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


def step_of(batch: list[Group], advantages: Advantages) -> StepData:
    """Return the step with its advantages."""
    step = build_step(batch, advantages)
    if step.rollouts:
        estimate_advantages(step, advantages)
    return step


def weight(sequences: list[TrainingSequence]) -> float:
    return math.fsum(value for sequence in sequences for value in sequence.weights)


@given(groups(), st.sampled_from([GRPOAdvantages(), DrGRPOAdvantages(), RLOOAdvantages()]))
def test_groups_are_trained_on_counted_as_flat_or_counted_as_small(batch: list[Group], advantages: Advantages) -> None:
    step = step_of(batch, advantages)
    trained = [
        group for group in batch if len(group.rollouts) > 1 and len({rollout.reward for rollout in group.rollouts}) > 1
    ]
    assert step.small_groups == sum(len(group.rollouts) < 2 for group in batch)
    assert step.flat_groups + step.small_groups + len(trained) == len(batch)
    assert len(step.rollouts) == sum(len(group.rollouts) for group in trained)
    assert math.isclose(math.fsum(rollout.advantages[0] for rollout in step.rollouts), 0.0, abs_tol=1e-6)
    for rollout in step.rollouts:
        assert math.isclose(weight(rollout.sequences), 1.0, rel_tol=1e-9)


@given(groups())
def test_only_sampled_tokens_have_a_weight_and_an_advantage(batch: list[Group]) -> None:
    for rollout in step_of(batch, GRPOAdvantages()).rollouts:
        for sequence in rollout.sequences:
            assert (
                len(sequence.token_ids)
                == len(sequence.columns["logprobs"])
                == len(sequence.weights)
                == len(sequence.columns["advantages"])
            )
            for token_weight, advantage in zip(sequence.weights, sequence.columns["advantages"], strict=True):
                assert advantage == (rollout.advantages[0] if token_weight else 0.0)


@given(groups(), st.integers(1, 20), st.integers(), st.integers(0, 99), st.integers(0, 9))
def test_minibatches_partition_the_rollouts_and_each_weighs_one(
    batch: list[Group], size: int, seed: int, step: int, epoch: int
) -> None:
    data = step_of(batch, DrGRPOAdvantages())
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
    data = step_of(batch, DrGRPOAdvantages())
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
    def trained_on(trajectories: Any) -> Any:
        rollouts = [
            RolloutData(f"ro-{place}", float(place), trajectories(calls)) for place, calls in enumerate(attempts)
        ]
        return step_of([Group(rollouts)], GRPOAdvantages()).rollouts

    merged = trained_on(merge_triplets)
    apart = trained_on(lambda calls: [trajectory for call in calls for trajectory in merge_triplets([call])])
    assert list(map(tokens_with_context, merged)) == list(map(tokens_with_context, apart))


@given(st.integers(1, 12), st.integers(), st.integers(1, 4))
def test_an_epoch_visits_each_task_once(n_tasks: int, seed: int, n_epochs: int) -> None:
    visited = [epoch_place(n_tasks, number, seed) for number in range(n_tasks * n_epochs)]
    for epoch in range(n_epochs):
        assert sorted(visited[epoch * n_tasks : (epoch + 1) * n_tasks]) == list(range(n_tasks))
    assert [epoch_place(n_tasks, number, seed) for number in reversed(range(n_tasks * n_epochs))] == visited[::-1]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [[epoch_place(20, 20 * epoch + n, seed) for n in range(20)] for epoch in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("n_rollouts", "size", "expected"), [(12, 4, [4, 4, 4]), (12, 5, [6, 6]), (3, 100, [3]), (5, 2, [2, 3])]
)
def test_minibatches_are_about_as_large_as_asked(n_rollouts: int, size: int, expected: list[int]) -> None:
    call = Triplet(prompt=TripletPrompt(token_ids=[1]), response=TripletResponse(token_ids=[2], logprobs=[-1.0]))
    rollouts = [RolloutData(f"ro-{n}", float(n), merge_triplets([call])) for n in range(n_rollouts)]
    data = step_of([Group(rollouts)], DrGRPOAdvantages())
    cut = minibatches(data.rollouts, size=size, seed=0, step=0, epoch=0)
    assert sorted(map(len, cut)) == sorted(expected)


# ---- failed rollouts, credit, critics, weights -------------------------------------------------------------------------


def a_call(prompt: list[int], answer: list[int], reward: float | None = None) -> Triplet:
    response = TripletResponse(token_ids=answer, logprobs=[-1.0] * len(answer))
    return Triplet(prompt=TripletPrompt(token_ids=prompt), response=response, reward=reward)


def a_rollout(name: str, reward: float, *calls: Triplet) -> RolloutData:
    return RolloutData(name, reward, merge_triplets(calls))


def test_a_failed_rollout_counts_in_the_baseline_of_its_group_and_is_not_trained_on() -> None:
    won, lost = a_rollout("won", 1.0, a_call([1], [2])), a_rollout("lost", 0.0, a_call([1], [3]))
    step = step_of([Group([won, lost, RolloutData("failed", 0.0)])], DrGRPOAdvantages())
    assert [rollout.advantages for rollout in step.trained] == [[pytest.approx(2 / 3)], [pytest.approx(-1 / 3)]]
    (sequences,) = minibatches(step.trained, size=9, seed=0, step=0, epoch=0)
    assert weight(sequences) == pytest.approx(1.0), "shared by the two that are trained on"


def test_a_group_of_one_success_among_failures_has_signal() -> None:
    step = step_of([Group([a_rollout("won", 1.0, a_call([1], [2])), RolloutData("failed", 0.0)])], GRPOAdvantages())
    assert (step.small_groups, step.flat_groups, len(step.trained)) == (0, 0, 1)
    assert step.trained[0].advantages[0] > 0


def test_a_group_without_a_rollout_to_train_on_is_small() -> None:
    step = step_of([Group([RolloutData("a", 0.0), RolloutData("b", 1.0)])], GRPOAdvantages())
    assert (step.small_groups, step.rollouts) == (1, [])


def test_rewards_of_calls_reach_the_tokens_of_those_calls_alone() -> None:
    """Two calls in two branches: the second one's prompt does not extend the first, and it comes back to it in the third."""
    first, second, third = a_call([1], [2, 3], 0.0), a_call([9], [8], 1.0), a_call([1, 2, 3, 4], [5], 0.0)
    good = a_rollout("good", 1.0, first, second, third)
    bad = a_rollout("bad", 0.0, a_call([1], [6, 6], 0.0), a_call([9], [7], 0.0), a_call([1, 6, 6, 4], [5], 0.0))
    step = step_of([Group([good, bad])], ProcessAdvantages(baseline="position", scale=False))
    assert [rollout.advantages for rollout in step.rollouts] == [[0.5, 0.5, 0.0], [-0.5, -0.5, 0.0]]
    long, short = step.rollouts[0].sequences
    assert long.token_ids == [1, 2, 3, 4, 5]
    assert long.columns["advantages"] == [0.0, 0.5, 0.5, 0.0, 0.0]
    assert short.columns["advantages"] == [0.0, 0.5]
    number_calls(step.rollouts[0])
    assert (long.columns["calls"], short.columns["calls"]) == ([0.0, 0.0, 0.0, 0.0, 2.0], [0.0, 1.0])


def test_equal_final_rewards_that_were_earned_at_other_calls_are_no_flat_group() -> None:
    early = a_rollout("early", 1.0, a_call([1], [2], 1.0), a_call([1, 2], [3], 0.0))
    late = a_rollout("late", 1.0, a_call([1], [4], 0.0), a_call([1, 4], [3], 1.0))
    assert build_step([Group([early, late])], ProcessAdvantages()).flat_groups == 0
    assert build_step([Group([early, late])], GRPOAdvantages()).flat_groups == 1


def test_a_critic_is_read_where_a_call_begins_and_has_returns_as_targets() -> None:
    rollout = a_rollout("one", 1.0, a_call([1], [2, 3], 0.25), a_call([1, 2, 3, 4], [5], 0.75))
    gae = GAEAdvantages(gamma=1.0, lam=1.0, whiten=False)
    step = build_step([Group([rollout])], gae)
    (sequence,) = step.rollouts[0].sequences
    sequence.columns["values"] = [0.0, 0.5, 0.9, 0.0, 0.125]
    estimate_advantages(step, gae)
    assert sequence.columns["returns"] == [0.0, 1.0, 1.0, 0.0, 0.75]
    assert sequence.columns["advantages"] == [0.0, 0.5, 0.5, 0.0, 0.625]


def test_a_greedy_rollout_is_the_baseline_and_a_group_that_equals_it_is_flat() -> None:
    sampled = [a_rollout("a", 1.0, a_call([1], [2])), a_rollout("b", 0.5, a_call([1], [3]))]
    step = step_of([Group(sampled, baseline=0.5), Group(sampled[1:], baseline=0.5)], ReMaxAdvantages())
    assert ([each.advantages for each in step.rollouts], step.flat_groups) == ([[0.5], [0.0]], 1)
    assert build_step([Group(sampled)], ReMaxAdvantages()).small_groups == 1, "the greedy rollout failed"


def test_a_penalty_is_subtracted_from_the_reward() -> None:
    rollouts = [a_rollout("a", 1.0, a_call([1], [2])), a_rollout("b", 0.0, a_call([1], [3]))]
    step = build_step([Group(rollouts)], DrGRPOAdvantages())
    estimate_advantages(step, DrGRPOAdvantages(), penalties=[0.5, 0.0])
    assert [rollout.advantages for rollout in step.rollouts] == [[0.25], [-0.25]]


@pytest.mark.parametrize(
    ("weighting", "expected"), [("rollout", [1 / 4, 1 / 4, 1 / 2]), ("token", [1 / 3] * 3), (10, [1 / 20] * 3)]
)
def test_a_weighting_says_how_tokens_share_the_loss(weighting: Any, expected: list[float]) -> None:
    rollouts = [a_rollout("long", 1.0, a_call([1], [2, 3])), a_rollout("short", 0.0, a_call([1], [4]))]
    step = step_of([Group(rollouts)], GRPOAdvantages())
    weights = [w for sequence in weighted(step.trained, weighting) for w in sequence.weights if w]
    assert weights == pytest.approx(expected)


def test_a_step_with_one_rollout_left_gives_it_no_advantage() -> None:
    for advantages in (GAEAdvantages(), ReinforcePPAdvantages()):
        step = build_step([Group([a_rollout("one", 1.0, a_call([1], [2, 3]))])], advantages)
        step.rollouts[0].sequences[0].columns["values"] = [0.0, 0.25, 0.5]
        estimate_advantages(step, advantages)
        assert step.rollouts[0].advantages == [0.0]


def test_flat_groups_are_kept_for_a_loss_with_a_term_of_its_own() -> None:
    group = Group([a_rollout("a", 1.0, a_call([1], [2])), a_rollout("b", 1.0, a_call([1], [3]))])
    step = build_step([group], GRPOAdvantages(), keep_flat=True)
    estimate_advantages(step, GRPOAdvantages())
    assert (step.flat_groups, [rollout.advantages for rollout in step.trained]) == (1, [[0.0], [0.0]])
    assert build_step([group], GRPOAdvantages()).trained == []
