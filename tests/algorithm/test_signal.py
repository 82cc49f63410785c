"""Warnings about runs that cannot learn: one for each symptom that lasts, none for a run that learns."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import leyden as ly
from leyden.algorithm import Run
from leyden.algorithm.policy_gradient.signal import Answers, Example, SignalWatch, learning_rate_hint
from leyden.cli.demo import WEIGHTS


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


@pytest.mark.parametrize(
    ("n_weights", "n_trained", "learning_rate", "value"),
    [
        (117_000, 117_000, 1e-4, "1e-3"),
        (117_000, 117_000, 5e-4, None),
        (10_000_000, 10_000_000, 1e-4, None),
        (500_000_000, 500_000_000, 1e-4, "1e-6"),
        (500_000_000, 500_000_000, 1e-5, None),
        (500_000_000, 2_000_000, 1e-4, None),
    ],
)
def test_a_learning_rate_that_seldom_fits_the_models_size_is_answered_with_one_to_try(
    n_weights: int, n_trained: int, learning_rate: float, value: str | None
) -> None:
    hint = learning_rate_hint(learning_rate, n_trained=n_trained, n_weights=n_weights)
    if value is None:
        assert hint is None
    else:
        assert hint is not None
        assert f"the learning rate is {learning_rate:g}" in hint
        assert f"({n_weights:,} weights) usually needs {float(value):g}" in hint
        assert f"OptimParams(learning_rate={float(value):g})" in hint


@pytest.mark.parametrize(("optim", "lines"), [(None, 1), (ly.OptimParams(learning_rate=1e-4), 0)])
def test_a_learning_rate_that_the_user_did_not_choose_is_hinted_at_when_a_run_begins(
    optim: ly.OptimParams | None, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Stopped(Exception):
        pass

    class Backend(ly.EmbeddedBackend):
        async def start(self) -> None:
            raise Stopped

    algorithm = ly.PolicyGradient(Backend(WEIGHTS), optim=optim)
    algorithm.set_llm_proxy(ly.LLMProxy())
    algorithm.set_run(Run("dev"))
    with pytest.raises(Stopped):
        asyncio.run(algorithm.setup([1], None))
    hints = [record.getMessage() for record in caplog.records if "usually needs 0.001" in record.getMessage()]
    assert len(hints) == lines


def rewarded(
    watch: SignalWatch, rewards: list[float], *, flat_from: int | None = None, kl: float | None = None
) -> dict[int, str]:
    """Return the warnings of steps with these mean rewards, by step, those of the end as step 0."""
    found: dict[int, str] = {}
    for step, reward in enumerate(rewards, start=1):
        flat = flat_from is not None and step >= flat_from
        for warning in watch.look(step, rewards=[reward], flat=flat, n_groups=8, answers=GOOD, kl=kl):
            found[step] = warning
    return found | dict(zip([0], watch.end(len(rewards)), strict=False))


UP_AND_DOWN = [0.1, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0, 1.0, 1.0, 1.0, 0.9, 0.6, 0.3, 0.2, 0.16, 0.16, 0.16, 0.16, 0.16]


def test_a_reward_that_rose_and_fell_is_said_to_have_fallen_and_since_when() -> None:
    found = rewarded(SignalWatch(1e-2, 64), UP_AND_DOWN, kl=2.5)
    first = found[min(step for step in found if step)]
    for part in (
        "the reward rose to ",
        "and has fallen to ",
        "since step 1",
        "a learning rate that is too large (it is 0.01)",
        "kl was 2.5 in the last training",
    ):
        assert part in first
    assert all("has not moved" not in warning and "too hard" not in warning for warning in found.values())


def test_flat_groups_after_a_fall_are_said_to_come_from_the_fall() -> None:
    found = rewarded(SignalWatch(1e-2, 64), UP_AND_DOWN, flat_from=16)
    assert "all rewards are equal (0.16 in every rollout); the reward rose to 1 and has fallen to" in found[18]
    assert "too hard or too easy" not in found[18]


def test_flat_groups_at_the_best_reward_are_said_to_be_learned() -> None:
    found = rewarded(SignalWatch(1e-3, 64), [0.1, 0.3, 0.5, 0.8, *[1.0] * 6], flat_from=5)
    assert "nothing is left to learn, because the reward has risen" in found[7]
    assert "stop here, or give harder ones" in found[7]


def test_a_short_run_that_fell_is_warned_about_at_its_end_if_at_all() -> None:
    rising = [step / 10 for step in range(11)]
    assert rewarded(SignalWatch(1e-3, 64), rising) == {}
    found = rewarded(SignalWatch(1e-3, 64), [*rising, 0.2, 0.1, 0.1])
    assert "has fallen to" in list(found.values())[-1]


@given(st.integers(0, 10_000))
def test_a_noisy_plateau_is_no_fall(seed: int) -> None:
    chance = random.Random(seed)
    rewards = [min(1.0, step / 20) * 0.8 + chance.gauss(0, 0.05) for step in range(100)]
    assert all("has fallen" not in warning for warning in rewarded(SignalWatch(1e-3, 64), rewards).values())
