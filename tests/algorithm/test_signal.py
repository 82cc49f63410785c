"""Warnings about runs that cannot learn: one for each symptom that lasts, none for a run that learns."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.algorithm.policy_gradient.signal import Answers, Example, SignalWatch


def answers(*token_ids: list[int], cut: int = 0, reward: float = 0.0) -> Answers:
    found = Answers(example=Example({"secret": 3}, [{"role": "assistant", "content": "three\n"}], reward))
    for index, ids in enumerate(token_ids):
        found.add(ids, cut=index < cut)
    return found


GOOD = answers([1, 2], [1, 3], [4])


def run(watch: SignalWatch, n_steps: int, seen: Answers = GOOD, *, flat: bool = True, first: int = 1) -> dict[int, str]:
    """Return the warnings of `n_steps` equal steps, by step."""
    found: dict[int, str] = {}
    for step in range(first, first + n_steps):
        warnings = watch.look(step, rewards=[0.0, 0.0] if flat else [0.0, 1.0], flat=flat, n_groups=8, answers=seen)
        assert len(warnings) <= 1
        found.update(dict.fromkeys([step], warnings[0]) if warnings else {})
    return found


def test_flat_groups_are_a_warning_after_three_steps_and_then_ever_more_rarely() -> None:
    found = run(SignalWatch(1e-4, 64), 30)
    assert list(found) == [3, 6, 12, 24]
    assert found[3] == (
        "steps 1 to 3: nothing to learn, because in each of the 8 groups all rewards are equal (0 in every rollout). "
        "Usual causes: tasks that are too hard or too easy for the model, a reward that ignores the answer. "
        "Example: task {'secret': 3}, answer 'three\\n', reward 0"
    )
    assert (
        "answers that were cut by max_tokens (2 of 3)"
        in run(SignalWatch(1e-4, 64), 3, answers([1], [2], [3, 4], cut=2))[3]
    )


@pytest.mark.parametrize(
    ("seen", "said", "cause"),
    [
        (answers([], []), "all answers are empty", "too large (it is 1e-04)"),
        (answers([5, 6], [5, 6]), "all 2 answers are identical", "temperature"),
        (answers([5], [6]), "no answer has more than one token", "too large (it is 1e-04)"),
        (answers([5, 6], [6, 7], cut=2), "all 2 answers were cut by max_tokens=64", "max_tokens that is too small"),
    ],
)
def test_collapsed_answers_are_named_instead_of_the_flat_groups_that_they_cause(
    seen: Answers, said: str, cause: str
) -> None:
    found = run(SignalWatch(1e-4, 64), 7, seen)
    assert list(found) == [3, 6]
    assert said in found[3] and cause in found[3] and "Example: task {'secret': 3}" in found[3]
    assert "groups" not in found[3]


def test_a_step_with_signal_ends_a_row_of_steps_without() -> None:
    watch = SignalWatch(1e-4, 64)
    assert run(watch, 2) == {}
    assert run(watch, 1, flat=False, first=3) == {}
    assert run(watch, 2, first=4) == {}
    assert list(run(watch, 1, first=6)) == [6]


def test_answers_of_one_token_are_fine_where_they_were_asked_for_or_have_different_rewards() -> None:
    assert run(SignalWatch(1e-4, 1), 9, answers([5], [6], cut=2), flat=False) == {}
    assert run(SignalWatch(1e-4, 64), 9, answers([5], [6]), flat=False) == {}


def test_a_run_too_short_for_a_warning_is_warned_about_at_its_end() -> None:
    watch = SignalWatch(1e-4, 64)
    assert run(watch, 2) == {}
    assert "steps 1 to 2: nothing to learn" in watch.end(2)[0]
    watch = SignalWatch(1e-4, 64)
    assert run(watch, 1, flat=False) == run(watch, 1, first=2) == {}
    assert watch.end(2) == []
    watch = SignalWatch(1e-4, 64)
    assert list(run(watch, 3)) == [3]
    assert watch.end(3) == [], "it was said already"


def rewards_of(watch: SignalWatch, rewards: list[float]) -> list[int]:
    return [
        step
        for step, reward in enumerate(rewards, 1)
        if watch.look(step, rewards=[reward - 0.1, reward + 0.1], flat=False, n_groups=8, answers=GOOD)
    ]


def test_a_reward_that_never_moves_is_a_warning_after_twenty_steps() -> None:
    noise = random.Random(1)
    assert rewards_of(SignalWatch(1e-4, 64), [0.12 + noise.gauss(0, 0.02) for _ in range(90)]) == [20, 40, 80]
    assert rewards_of(SignalWatch(1e-4, 64), [0.5] * 20) == [20]
    watch = SignalWatch(1e-4, 64)
    rewards_of(watch, [0.12] * 19)
    (warning,) = watch.look(20, rewards=[0.0, 0.24], flat=False, n_groups=8, answers=GOOD)
    assert warning.startswith("the reward has not moved in 20 steps: 0.12 in the first half, 0.12 in the second.")
    assert "learning rate that is too small or too large (it is 1e-04)" in warning


@given(st.integers(0, 10**6), st.integers(4, 40), st.sampled_from([20, 40, 80]))
def test_a_run_that_learns_is_never_warned_about_its_reward(seed: int, rise: int, n_steps: int) -> None:
    noise = random.Random(seed)
    rewards = [min(0.9, 0.1 + 0.8 * step / rise) + noise.uniform(-0.03, 0.03) for step in range(n_steps)]
    assert rewards_of(SignalWatch(1e-4, 64), rewards) == []


def rewarded(watch: SignalWatch, rewards: list[float], *, flat_from: int) -> dict[int, str]:
    """Return the warnings of steps with these mean rewards, by step. In the last ones, the policy has fallen."""
    found: dict[int, str] = {}
    for step, reward in enumerate(rewards, start=1):
        fall = "the reward has fallen from 1 to 0.16" if reward < 0.2 and step > 5 else ""
        flat = step >= flat_from
        for warning in watch.look(step, rewards=[reward], flat=flat, n_groups=8, answers=GOOD, fall=fall):
            found[step] = warning
    return found


def test_flat_groups_after_a_fall_are_said_to_come_from_the_fall() -> None:
    found = rewarded(SignalWatch(1e-2, 64), [0.1, 0.2, 0.5, 0.9, 1.0, 1.0, 0.3, *[0.16] * 5], flat_from=8)
    assert "all rewards are equal (0.16 in every rollout); the reward has fallen from 1 to 0.16." in found[10]
    assert "too hard or too easy" not in found[10]


def test_flat_groups_at_the_best_reward_are_said_to_be_learned() -> None:
    found = rewarded(SignalWatch(1e-3, 64), [0.1, 0.3, 0.5, 0.8, *[1.0] * 6], flat_from=5)
    assert "nothing is left to learn, because the reward has risen" in found[7]
    assert "stop here, or give harder ones" in found[7]
