"""APO and GEPA refuse the same impossible options, before anything is started."""

from __future__ import annotations

import math
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm.prompts.candidate import name_to_improve
from leyden.errors import ConfigError

COUNTS = {
    ly.APO: ["gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds", "stages_per_round"],
    ly.GEPA: ["max_steps", "proposals_per_step", "minibatch_size"],
}
OR_NONE = {ly.APO: ["critic_runs", "candidates_per_stage"], ly.GEPA: list[str]()}
NUMBERS = {ly.APO: ["diversity_temperature"], ly.GEPA: ["reflection_temperature"]}
NAMES = {ly.APO: ["gradient_model", "apply_edit_model"], ly.GEPA: ["reflection_model"]}
WRONG = [math.nan, math.inf, True, "4", [4]]

REFUSED = [
    (optimiser, name, value)
    for optimiser in (ly.APO, ly.GEPA)
    for names, values in (
        ([*COUNTS[optimiser], "max_prompt_characters"], [*WRONG, 0, -1, 1.5, None]),
        (OR_NONE[optimiser], [*WRONG, 0, 1.5]),
        ([*NUMBERS[optimiser]], [*WRONG, -0.1, None]),
        (["rollout_batch_timeout"], [*WRONG, 0, None]),
        (["failed_reward"], [*WRONG, None]),
        (["seed"], [*WRONG, 1.5, None]),
        ([*NAMES[optimiser], "agent_model", "resource_name", "agent_version"], [1, True, "", " ", ["x"]]),
        (["budget"], [100, True, "100", {"rollouts": 100}]),
        (["test_dataset"], [3, True, "tasks", iter([1])]),
    )
    for name in names
    for value in values
]


@pytest.mark.parametrize(("optimiser", "name", "value"), REFUSED)
def test_an_impossible_option_is_refused_by_its_name(optimiser: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is "):
        optimiser(**{name: value})


@pytest.mark.parametrize("optimiser", [ly.APO, ly.GEPA])
def test_a_client_that_is_none_is_refused(optimiser: Any) -> None:
    with pytest.raises(ConfigError, match="async_openai_client is a str; give"):
        optimiser("https://api.openai.com/v1")


@pytest.mark.parametrize(
    "value", [(1, 0), (0.0, math.nan), (0, math.inf), (False, True), ("0", "1"), (0, 1, 2), "01", 1.0, None]
)
def test_a_range_of_rewards_is_two_numbers_in_order(value: Any) -> None:
    with pytest.raises(ConfigError, match="reward_range is"):
        ly.GEPA(reward_range=value)
    if value is not None:
        with pytest.raises(ConfigError, match="reward_range is"):
            ly.APO(reward_range=value)


def test_the_defaults_and_numbers_of_numpys_kind_are_possible() -> None:
    numpy = pytest.importorskip("numpy")
    for optimiser in (ly.APO, ly.GEPA):
        optimiser(seed=numpy.int64(3), failed_reward=numpy.float32(0.5), test_dataset=[1], budget=ly.Budget(rollouts=3))
    assert ly.GEPA(reward_range=(-1, 2)).reward_range == (-1.0, 2.0)


def test_the_prompt_that_helps_is_rewritten_more_often() -> None:
    names = ["plan", "search", "write"]
    assert [name_to_improve(names, {}, turn, "s") for turn in range(4)] == ["plan", "search", "write", "plan"]
    edits = {"plan": (10, 0), "search": (10, 4), "write": (10, 1)}
    chosen = [name_to_improve(names, edits, turn, f"s/{turn}") for turn in range(300)]
    assert chosen.count("search") > 200
    assert chosen.count("plan") > 0
