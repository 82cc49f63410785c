"""One environment: the order of calls, what it keeps, and what `check_simulator` finds."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from leyden.errors import ConfigError, SeedsExhausted
from leyden.rl.env import EnvWrapper, check_simulator
from leyden.rl.parts import (
    ActionInterpreter,
    AuxiliaryInfoCollector,
    Reward,
    RewardCombination,
    Simulator,
    StateInterpreter,
)
from leyden.rl.spaces import GymSpaceValidationError
from leyden.training import LogCollector
from tests.rl.env.worlds import Position, Push, Sight, Unlucky, Walk

ACT = np.array([0.5], np.float32)


def test_it_is_an_environment_by_gymnasiums_own_checker() -> None:
    class Bounded(Sight):
        observation_space = spaces.Box(-1000, 1000, (4,), np.float32)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(spec|render|no render).*")
        check_env(EnvWrapper(Walk, Bounded(), Push(), reward_fn=Position()), skip_render_check=True)


def test_calls_come_in_the_documented_order() -> None:
    calls: list[str] = []

    class Sim(Simulator[int, int, int]):
        def __init__(self, initial: int) -> None:
            calls.append(f"simulator({initial})")
            self.at = initial

        def step(self, action: int) -> None:
            calls.append(f"step({action})")
            self.at += action

        def get_state(self) -> int:
            return self.at

        def done(self) -> bool:
            calls.append("done")
            return self.at > 2

    class See(StateInterpreter[int, int]):
        observation_space = spaces.Discrete(10)

        def interpret(self, simulator_state: int) -> int:
            calls.append(f"see({simulator_state})")
            return simulator_state

        def validate(self, obs: int) -> None:
            calls.append("validate obs")

    class Act(ActionInterpreter[int, int, int]):
        action_space = spaces.Discrete(3)

        def interpret(self, simulator_state: int, action: int) -> int:
            calls.append(f"act({simulator_state}, {action})")
            return action + 1

        def validate(self, action: int) -> None:
            calls.append("validate action")

    class Worth(Reward[int]):
        def reward(self, simulator_state: int) -> float:
            calls.append(f"reward({simulator_state})")
            return 2.0

    class Aux(AuxiliaryInfoCollector[int, str]):
        def collect(self, simulator_state: int) -> str:
            calls.append("aux")
            return f"at {simulator_state}"

    env = EnvWrapper(Sim, See(), Act(), [1], Worth(), Aux(), LogCollector(10))
    obs, info = env.reset()
    assert (obs, info["log"]) == (1, {})
    obs, reward, terminated, truncated, info = env.step(2)
    assert calls == [
        "simulator(1)", "see(1)", "validate obs",
        "validate action", "act(1, 2)", "step(3)", "done", "see(4)", "validate obs", "reward(4)", "aux",
    ]  # fmt: skip
    assert (obs, reward, terminated, truncated, info["aux_info"]) == (4, 2.0, True, False, "at 4")
    assert {name: value for name, (_, value) in info["log"].items()} == {
        "steps_per_episode": 1.0, "reward": 2.0, "obs": 4, "policy_act": 2,
    }  # fmt: skip
    assert env.status == {
        "cur_step": 1,
        "done": True,
        "initial_state": 1,
        "obs_history": [1, 4],
        "action_history": [2],
        "reward_history": [2.0],
    }
    with pytest.raises(ResetNeeded):
        env.step(0)
    with pytest.raises(SeedsExhausted, match="last seed"):
        env.reset()


def test_the_caller_may_name_the_seed() -> None:
    env = EnvWrapper(Walk, Sight(), Push())
    obs, _ = env.reset(seed=3, options={"seed_item": 5, "seed_index": 2})
    assert obs[0] == 5.0 and env.status["initial_state"] == 5
    assert env.step(ACT)[1] == 0.0  # no reward function
    assert env.reset()[0][0] == 0.0  # no item


def test_parts_of_a_combination_have_the_environment_too() -> None:
    class Noted(Reward[np.ndarray]):
        def reward(self, simulator_state: np.ndarray) -> float:
            assert self.env is not None
            self.log("part/steps", self.env.status["cur_step"])
            return 1.0

    reward = RewardCombination({"part": (Position(), 0.5), "noted": (Noted(), 3.0)})
    env = EnvWrapper(Walk, Sight(), Push(), reward_fn=reward)
    env.reset(options={"seed_item": 4})
    _, value, *_, info = env.step(ACT)
    assert value == 0.5 * 4.5 + 3.0
    logged = {name: number for name, (_, number) in info["log"].items()}
    assert logged == {"position": 4.5, "part": 2.25, "noted": 3.0, "part/steps": 1.0, "reward": 5.25}


def test_a_reward_that_logs_outside_an_environment_says_so() -> None:
    with pytest.raises(ConfigError, match="called outside an environment"):
        RewardCombination({"position": (Position(), 1.0)})(np.zeros(4))


def test_components_do_not_keep_their_environment_alive_and_travel_without_it() -> None:
    sight, push = Sight(), Push()
    env: Any = EnvWrapper(Walk, sight, push)
    env.reset()
    assert sight.env is env and env.simulator.env is env
    alone = copy.deepcopy(sight)
    assert alone.env is None and alone(np.zeros(4, np.float32)).shape == (4,)
    del env
    gc.collect()
    assert sight.env is None


def test_a_reward_that_is_no_number_is_refused() -> None:
    class Nothing(Reward[np.ndarray]):
        def reward(self, simulator_state: np.ndarray) -> float:
            return float("nan")

    env = EnvWrapper(Walk, Sight(), Push(), reward_fn=Nothing())
    env.reset()
    with pytest.raises(ValueError, match="Nothing at step 1 is nan, which is no finite number"):
        env.step(ACT)


def test_a_stop_iteration_is_no_end() -> None:
    env = EnvWrapper(Unlucky, Sight(), Push(), [("stop", "construct", 0)])
    with pytest.raises(RuntimeError, match="StopIteration in a simulator"):
        env.reset()


def test_an_action_outside_its_space_moves_nothing() -> None:
    env = EnvWrapper(Walk, Sight(), Push())
    env.reset()
    with pytest.raises(GymSpaceValidationError, match="out of bounds"):
        env.step(np.array([2.0], np.float32))
    assert env.status["cur_step"] == 0


def test_a_good_simulator_has_no_problems() -> None:
    report = check_simulator(Walk, Sight(), Push(), 3, Position())
    assert (report.problems, report.notes, report.steps) == ([], [], 6)


class Endless(Walk):
    def done(self) -> bool:
        return False


class Shared(Walk):
    def step(self, action: float) -> None:
        self.x += np.float32(action)
        self.steps += 1


class Raw(Sight):
    def interpret(self, simulator_state: np.ndarray) -> np.ndarray:
        return simulator_state


class Fickle(Walk):
    def get_state(self) -> np.ndarray:
        self.x = self.x + np.float32(1)
        return self.x


class Over(Walk):
    def done(self) -> bool:
        return True


class Vague(Walk):
    def done(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("simulator", "sight", "item", "says"),
    [
        (Shared, Raw, 3, "return a copy"),
        (Fickle, Sight, 3, "returns another state"),
        (Over, Sight, 3, "before the first step"),
        (Vague, Sight, 3, "True or False"),
        (Unlucky, Sight, ("raise", "construct", 3), "a first reset: OSError: the quarry is closed"),
        (Unlucky, Sight, ("nan", "step", 3), "4 NaN"),
    ],
)
def test_the_check_says_what_is_wrong(simulator: Any, sight: Any, item: Any, says: str) -> None:
    report = check_simulator(simulator, sight(), Push(), item, Position())
    assert says in " ".join(report.problems)


def test_what_is_allowed_but_odd_is_noted() -> None:
    report = check_simulator(Endless, Sight(), Push(), 3, max_steps=5)
    assert report.problems == [] and "not ended after 5" in report.notes[0]
