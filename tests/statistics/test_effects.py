"""`EffectModel` finds the effects that rewards were made with, and luck counts for little in the rewards that it expects."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.statistics import EffectModel

SPREAD, TASKS, GAIN, N_TASKS = 0.7, 1.0, 0.2, 40
UNIT = (0.0, 1.0)


def expected_rewards(
    parents: Sequence[int | None], rewards: Sequence[dict[int, float]], limits: tuple[float, float]
) -> list[float]:
    """Return what the logistic model expects of candidates each of which has the edits of its parent and one more."""
    edits = list[tuple[int, ...]]()
    for index, parent in enumerate(parents):
        edits.append(() if parent is None else (*edits[parent], index))
    return EffectModel(edits, rewards, len(edits), limits=limits).expected_rewards()


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def drawn(
    seed: int, kind: Literal["solved or not", "graded"] = "solved or not", n: int = 25
) -> tuple[list[int | None], list[dict[int, float]], list[float]]:
    """Return parents, rewards and true mean rewards of candidates, drawn from the model."""
    chance = random.Random(seed)
    effects = [chance.gauss(0, TASKS) for _ in range(N_TASKS)]
    parents: list[int | None] = [None]
    values = [-1.0]
    for place in range(1, n):
        parent = chance.randrange(place)
        parents.append(parent)
        values.append(values[parent] + chance.gauss(GAIN, SPREAD))
    counts = [16, *(chance.choice((0, 4, 8, 16)) for _ in range(1, n))]

    def reward(mean: float) -> float:
        return (
            float(chance.random() < mean)
            if kind == "solved or not"
            else min(1.0, max(0.0, mean + chance.gauss(0, 0.05)))
        )

    rewards = [
        {task: reward(logistic(value + effects[task])) for task in chance.sample(range(N_TASKS), count)}
        for value, count in zip(values, counts, strict=True)
    ]
    truth = [statistics.fmean(logistic(value + effect) for effect in effects) for value in values]
    return parents, rewards, truth


@pytest.mark.parametrize(("kind", "share"), [("solved or not", 0.7), ("graded", 0.7)])
def test_the_estimate_is_closer_to_the_truth_than_the_mean_of_a_candidates_own_rewards(
    kind: Literal["solved or not", "graded"], share: float
) -> None:
    ours, raw = list[float](), list[float]()
    for seed in range(20):
        parents, rewards, truth = drawn(seed, kind)
        for found, own, true in zip(expected_rewards(parents, rewards, UNIT), rewards, truth, strict=True):
            if own:
                ours.append(abs(found - true))
                raw.append(abs(statistics.fmean(own.values()) - true))
    assert statistics.fmean(ours) < share * statistics.fmean(raw)


def test_the_best_one_is_expected_to_be_as_good_as_it_is_and_its_mean_is_too_high() -> None:
    by_mean, by_model, of_unchosen = list[float](), list[float](), list[float]()
    for seed in range(60):
        parents, rewards, truth = drawn(seed)
        means = {place: statistics.fmean(own.values()) for place, own in enumerate(rewards) if len(own) == 16}
        best = max(means, key=means.__getitem__)
        found = expected_rewards(parents, rewards, UNIT)
        by_mean.append(means[best] - truth[best])
        by_model.append(found[best] - truth[best])
        of_unchosen += [each - true for each, true, own in zip(found, truth, rewards, strict=True) if own]
    assert statistics.fmean(by_mean) > 0.05, "the best of several was also lucky"
    assert abs(statistics.fmean(by_model)) < 0.3 * statistics.fmean(by_mean)
    assert statistics.fmean(map(abs, by_model)) < 0.8 * statistics.fmean(map(abs, by_mean))
    assert abs(statistics.fmean(of_unchosen)) < 0.02


def test_luck_on_few_tasks_counts_for_little_and_hard_tasks_do_not_count() -> None:
    root = {task: float(task % 2) for task in range(20)}
    lucky, unlucky = expected_rewards([None, 0, 0], [root, {1: 1.0, 3: 1.0}, {0: 0.0, 2: 0.0}], UNIT)[1:]
    assert abs(lucky - unlucky) < 0.25, "both did on their tasks as the first one"
    many = expected_rewards([None, 0], [root, dict.fromkeys(range(20), 1.0)], UNIT)
    assert many[1] > 0.8


def test_a_candidate_without_rewards_is_as_good_as_its_parent_and_the_edits_so_far() -> None:
    bad, good = dict.fromkeys(range(10), 0.0), dict.fromkeys(range(10), 1.0)
    found = expected_rewards([None, 0, 0, 0], [bad, good, good, {}], UNIT)
    assert found[0] + 0.3 < found[3] < found[1]


def test_near_the_highest_reward_an_edit_is_expected_to_gain_less() -> None:
    half = {task: float(task % 2) for task in range(40)}
    most = {task: float(task % 20 != 0) for task in range(40)}
    all_but_one = {task: float(task != 0) for task in range(40)}
    gains = list[float]()
    for first, second in ((half, most), (most, all_but_one)):
        found = expected_rewards([None, 0, 1], [first, second, {}], UNIT)
        gains.append(found[2] - found[1])
    assert gains[0] > 0 and gains[1] < 0.05


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.integers(0, 5), st.floats(-10, 10), max_size=6), min_size=1, max_size=6))
def test_estimates_are_within_the_range_of_rewards(rewards: list[dict[int, float]]) -> None:
    if not any(rewards):
        return
    parents = [None if place == 0 else place // 2 for place in range(len(rewards))]
    assert all(-10 <= found <= 10 for found in expected_rewards(parents, rewards, (-10.0, 10.0)))


def test_rewards_of_another_scale_give_the_same_order() -> None:
    parents, rewards, _ = drawn(1)
    plain = expected_rewards(parents, rewards, UNIT)
    scaled = [{task: 100 * reward - 7 for task, reward in each.items()} for each in rewards]
    assert expected_rewards(parents, scaled, (-7.0, 93.0)) == pytest.approx([100 * each - 7 for each in plain])


def test_the_effect_of_an_edit_is_found_from_all_prompts_that_have_it() -> None:
    chance = random.Random(0)
    true, noise = [0.3, 0.2, 0.1, 0.0, -0.1, 0.0], 0.2
    edits = [[edit for edit in range(6) if chance.random() < 0.5] for _ in range(40)]
    tasks = [chance.gauss(0, 0.3) for _ in range(30)]
    rewards = [
        {
            task: 0.2 + sum(true[edit] for edit in own) + tasks[task] + chance.gauss(0, noise)
            for task in chance.sample(range(30), 6)
        }
        for own in edits
    ]
    model = EffectModel(edits, rewards, 7)
    assert model.expected.edits[:6] == pytest.approx(true, abs=0.1)
    draws = [model.draw(chance).edits for _ in range(300)]
    deviations = [statistics.pstdev(each[edit] for each in draws) for edit in (0, 6)]
    assert 0.01 < deviations[0] < 0.03, "half of the posterior deviation, which is close to 2 * noise / sqrt(240)"
    assert deviations[1] > 0.1, "an edit that never ran may be worth as much as any other"
    assert statistics.fmean(each[0] for each in draws) == pytest.approx(model.expected.edits[0], abs=0.02)


def test_rewards_whose_squares_are_no_floats_have_the_effects_of_smaller_ones() -> None:
    rewards = [{0: 0.1, 1: 0.3}, {0: 0.5, 1: 0.4}, {0: 0.9, 2: 0.2}]
    huge = [{task: 1e300 * reward for task, reward in found.items()} for found in rewards]
    one, other = (EffectModel([[], [0], [0, 1]], each, 2) for each in (rewards, huge))
    assert [each / 1e300 for each in other.expected.edits] == pytest.approx(one.expected.edits, rel=0.05)
    assert other.expected.base / 1e300 == pytest.approx(one.expected.base, rel=0.05)
    assert other.deviation / 1e300 == pytest.approx(one.deviation)
    assert all(math.isfinite(each) for each in other.draw(random.Random(1)).edits)
