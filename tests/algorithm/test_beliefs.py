"""`beliefs` comes close to what Bayes' rule says with the true constants, and luck counts for little."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.algorithm.prompts.beliefs import beliefs

NOISE, SPREAD, TASKS, GAIN = 0.4, 0.15, 0.2, 0.05


def drawn(seed: int, n: int = 25) -> tuple[list[int | None], list[dict[int, float]], list[float]]:
    """Return parents, rewards and true values of candidates, drawn from the model."""
    chance = random.Random(seed)
    effects = [chance.gauss(0, TASKS) for _ in range(40)]
    parents: list[int | None] = [None]
    values = [0.3]
    for place in range(1, n):
        parent = chance.randrange(place)
        parents.append(parent)
        values.append(values[parent] + chance.gauss(GAIN, SPREAD))
    counts = [chance.choice((0, 4, 8, 16)) for _ in range(1, n)]
    rewards = [
        {task: value + effects[task] + chance.gauss(0, NOISE) for task in chance.sample(range(40), count)}
        for value, count in zip(values, [16, *counts], strict=True)
    ]
    return parents, rewards, values


def exact(parents: list[int | None], rewards: list[dict[int, float]]) -> list[float]:
    """Return the posterior means with the true constants: one linear system for all candidates and tasks."""
    n = len(parents)
    precision, target = np.zeros((n + 40, n + 40)), np.zeros(n + 40)
    for place, parent in enumerate(parents):
        if parent is not None:
            for a, b, sign in ((place, place, 1), (parent, parent, 1), (place, parent, -1), (parent, place, -1)):
                precision[a, b] += sign / SPREAD**2
            target[place] += GAIN / SPREAD**2
            target[parent] -= GAIN / SPREAD**2
        for task, reward in rewards[place].items():
            for a in (place, n + task):
                target[a] += reward / NOISE**2
                for b in (place, n + task):
                    precision[a, b] += 1 / NOISE**2
    precision[range(n, n + 40), range(n, n + 40)] += 1 / TASKS**2
    return list(np.linalg.solve(precision, target)[:n])


def test_values_are_about_as_well_known_as_with_the_true_constants() -> None:
    ours, best, raw = [], [], []
    for seed in range(20):
        parents, rewards, values = drawn(seed)
        found, known = beliefs(parents, rewards), exact(parents, rewards)
        for place, value in enumerate(values):
            ours.append((found[place].mean - value) ** 2)
            best.append((known[place] - value) ** 2)
            if rewards[place]:
                raw.append((sum(rewards[place].values()) / len(rewards[place]) - value) ** 2)
    assert np.mean(ours) < 1.2 * np.mean(best)
    assert np.mean(ours) < 0.8 * np.mean(raw), "the mean of a candidate's own rewards is worse"


def test_the_best_one_is_expected_to_be_as_good_as_it_is_and_its_mean_is_too_high() -> None:
    by_mean, by_belief = [], []
    for seed in range(60):
        parents, rewards, values = drawn(seed)
        means = {place: sum(each.values()) / len(each) for place, each in enumerate(rewards) if len(each) == 16}
        best = max(means, key=lambda place: means[place])
        by_mean.append(means[best] - values[best])
        by_belief.append(beliefs(parents, rewards)[best].mean - values[best])
    assert np.mean(by_mean) > 0.05, "the best of several was also lucky"
    assert abs(np.mean(by_belief)) < 0.5 * np.mean(by_mean)
    assert np.mean(np.abs(by_belief)) < 0.8 * np.mean(np.abs(by_mean))


def test_luck_on_few_tasks_counts_for_little_and_hard_tasks_do_not_count() -> None:
    root = {task: float(task % 2) for task in range(20)}
    lucky, unlucky = beliefs([None, 0, 0], [root, {1: 1.0, 3: 1.0}, {0: 0.0, 2: 0.0}])[1:]
    assert abs(lucky.mean - unlucky.mean) < 0.15, "both did on their tasks as the first one"
    many = beliefs([None, 0], [root, dict.fromkeys(range(20), 1.0)])
    assert many[1].mean > 0.8 and many[1].variance < lucky.variance


def test_a_candidate_without_rewards_is_as_good_as_its_parent_and_the_edits_so_far() -> None:
    bad, good = dict.fromkeys(range(10), 0.0), dict.fromkeys(range(10), 1.0)
    found = beliefs([None, 0, 0, 0], [bad, good, good, {}])
    assert found[0].mean + 0.3 < found[3].mean < found[1].mean
    assert found[3].variance > found[1].variance


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.integers(0, 5), st.floats(-10, 10), max_size=6), min_size=1, max_size=6))
def test_beliefs_are_finite_and_never_far_outside_of_the_rewards(rewards: list[dict[int, float]]) -> None:
    seen = [reward for each in rewards for reward in each.values()]
    if not seen:
        return
    parents = [None if place == 0 else place // 2 for place in range(len(rewards))]
    margin = 2 * (max(seen) - min(seen)) + 1
    for found in beliefs(parents, rewards):
        assert min(seen) - margin <= found.mean <= max(seen) + margin
        assert found.variance > 0


def test_rewards_of_another_scale_give_the_same_order() -> None:
    parents, rewards, _ = drawn(1)
    plain = beliefs(parents, rewards)
    scaled = beliefs(parents, [{task: 100 * reward - 7 for task, reward in each.items()} for each in rewards])
    assert [each.mean for each in scaled] == pytest.approx([100 * each.mean - 7 for each in plain])
