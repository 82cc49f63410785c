"""Environments that are made, wrapped or returned otherwise than Gymnasium wants say what was meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from leyden.errors import ConfigError, SimulatorError
from leyden.rl.env import EnvWrapper, vectorize_env
from leyden.rl.env.factory import ENV_KINDS
from leyden.rl.parts import Simulator
from tests.rl.env.worlds import Push, Sight, Walk, factory


class Bell(gymnasium.Env[Any, Any]):
    """Episodes of three steps. `says` overrides what step and reset return."""

    observation_space: Any = spaces.Box(0, 9, (2,), np.float32)
    action_space: Any = spaces.Discrete(3)

    def __init__(self, says: Callable[[Any], Any] | None = None, starts: Callable[[Any], Any] | None = None) -> None:
        self.says, self.starts, self.at = says, starts, 0
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        obs = np.zeros(2, np.float32)
        return (obs, {}) if self.starts is None else self.starts(obs)

    def step(self, action: Any) -> Any:
        self.at += 1
        self.taken.append(action)
        obs = np.full(2, self.at, np.float32)
        return (obs, 1.0, self.at >= 3, False, {}) if self.says is None else self.says(obs)


class Around(gymnasium.Env[Any, Any]):
    """A wrapper that does not inherit from Gymnasium's."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env, self.observation_space, self.action_space = env, env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


class OfTheOldGym:
    def reset(self) -> Any: ...
    def step(self, action: Any) -> Any: ...


class Seedless(Bell):
    def reset(self) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


SHARED = Bell()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SHARED,
        lambda: gymnasium.wrappers.TimeLimit(SHARED, 10),
        lambda: Around(SHARED),
        lambda: Around(gymnasium.wrappers.TimeLimit(SHARED, 10)),
    ],
)
@pytest.mark.parametrize("kind", list(ENV_KINDS))
def test_a_factory_that_returns_one_environment_twice_is_refused(kind: str, make: Any) -> None:
    options = {} if kind == "dummy" else {"workers": 1}
    with pytest.raises(ConfigError, match="the same environment twice: the Bell of environments 0 and 1 is one object"):
        vectorize_env(make, kind, concurrency=2, **options)
    if kind == "thread":
        with pytest.raises(ConfigError, match="the same environment twice"):
            vectorize_env(make, kind, concurrency=2)


def test_a_list_of_factories_of_one_environment_is_refused() -> None:
    env, other = Bell(), Bell()
    with pytest.raises(ConfigError, match="of environments 0 and 2 is one object"):
        vectorize_env([lambda: env, lambda: other, lambda: gymnasium.wrappers.TimeLimit(env, 10)])
    with vectorize_env([lambda: env, lambda: other]) as venv:
        venv.reset()
        for _ in range(3):
            ended = venv.step(np.zeros(2, np.int64)).terminated
        assert ended.all()


def test_one_simulator_for_two_environments_or_two_episodes_is_refused() -> None:
    simulator = Walk(0)
    with pytest.raises(SimulatorError, match="returned the same Walk twice, to two environments"):
        vectorize_env(lambda: EnvWrapper(lambda item: simulator, Sight(), Push()), concurrency=2, seeds=[1, 2]).reset()
    simulator = Walk(0)
    env = EnvWrapper(lambda: simulator, Sight(), Push())
    env.reset()
    while not env.status["done"]:
        env.step(np.array([1.0], np.float32))
    with pytest.raises(ConfigError, match="the Walk of the episode before, which is done"):
        env.reset()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Bell(), r"env_factory is the environment .*`lambda: Bell\(...\)`"),
        ([Bell(), Bell()], "env_factory is the environment"),
        (gymnasium.wrappers.TimeLimit(Bell(), 3), "env_factory is the environment"),
        (OfTheOldGym(), r"env_factory is the environment .*OfTheOldGym"),
        (None, "env_factory is None"),
        ({"env": Bell}, "env_factory is .*a dict"),
        (lambda: None, "returned None; .*is its `return` missing"),
        (lambda: Bell, "returned the class Bell; .*: call the class"),
        (lambda: OfTheOldGym(), "has step and reset and is no gymnasium.Env; .*shimmy"),
        (lambda: 7, "returned 7"),
        (Seedless, "Seedless.reset takes no seed"),
        ("NoSuchGame-v0", "Gymnasium cannot make the environment 'NoSuchGame-v0'"),
    ],
)
def test_what_makes_no_environment_says_what_is_wanted(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vectorize_env(given)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_an_environment_without_a_space_is_named(name: str) -> None:
    for space in (None, "Box(2,)"):
        with pytest.raises(ConfigError, match=rf"Bare.{name} is .*; set it to a space of gymnasium.spaces in __init__"):
            vectorize_env(type("Bare", (Bell,), {name: space}))


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            lambda obs: (obs, 1.0, False, {}),
            r"Bell.step returned 4 values \(ndarray, float, bool, dict\); .*old gym's `done`",
        ),
        (lambda obs: (obs, 1.0, False, False, {}, 0), "Bell.step returned 6 values"),
        (lambda obs: None, r"Bell.step returned a NoneType; return \(observation, reward, terminated"),
        (lambda obs: np.zeros(5), "Bell.step returned a ndarray; return"),
        (lambda obs: (obs, 1.0, {}, False, False), r"terminated of Bell.step is \{\}"),
        (lambda obs: (obs, 1.0, 2, False, {}), "terminated of Bell.step is 2, neither True nor False"),
        (lambda obs: (obs, 1.0, False, False, "x"), "the info of Bell.step is 'x'"),
        (lambda obs: (obs, np.ones(2), False, False, {}), "the reward of step 1 has 2 elements"),
        (lambda obs: (obs, None, False, False, {}), "the reward of step 1 is None"),
        (lambda obs: (obs, np.inf, False, False, {}), "the reward of step 1 is inf, which is no finite number"),
    ],
)
def test_a_step_that_returns_something_else_says_what_is_wanted(says: Any, message: str) -> None:
    with vectorize_env(partial(Bell, says)) as venv:
        venv.reset()
        with pytest.raises(SimulatorError, match=message):
            venv.step(np.zeros(1, np.int64))


def test_rewards_and_flags_of_other_libraries_count() -> None:
    def says(obs: Any) -> Any:
        return [obs, np.array([0.5], np.float32), np.bool_(True), np.array(0), {}]

    with vectorize_env(partial(Bell, says)) as venv:
        venv.reset()
        step = venv.step(np.zeros(1, np.int64))
        assert (step.rewards[0], step.terminated[0], step.truncated[0]) == (0.5, True, False)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (lambda obs: obs, "Bell.reset returned a ndarray alone"),
        (lambda obs: None, "Bell.reset returned a NoneType alone"),
        (lambda obs: (obs, {}, 0), "Bell.reset returned a tuple of 3: ndarray, dict, int"),
        (lambda obs: (0.0, 1.0), "Bell.reset returned a tuple of 2: float, float"),
    ],
)
def test_a_reset_that_returns_something_else_says_what_is_wanted(starts: Any, message: str) -> None:
    with (
        vectorize_env(partial(Bell, None, starts)) as venv,
        pytest.raises(SimulatorError, match=rf"{message}; return \(observation, info\)"),
    ):
        venv.reset()


def test_an_environment_of_ones_own_inside_a_simulator_needs_another_name() -> None:
    class Game(Walk):
        def __init__(self, initial: Any = 0) -> None:
            super().__init__(initial)
            self.env = Bell()  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(ConfigError, match=r"Game.env is the EnvWrapper that runs it, and was set to .*Bell.*self.game"):
        Game()
    assert issubclass(Game, Simulator)
    assert callable(factory)


@pytest.mark.parametrize("kind", list(ENV_KINDS))
@pytest.mark.parametrize(
    ("space", "batch", "row"),
    [
        (spaces.Discrete(3, dtype=np.int32), np.array([2]), 2),
        (spaces.Discrete(3, dtype=np.int8, start=-1), np.array([-1]), -1),
        (spaces.Discrete(3, dtype=np.uint8, start=5), np.array([7]), 7),
        (spaces.MultiDiscrete([3, 2], dtype=np.int16), np.array([[2, 1]]), [2, 1]),
        (spaces.MultiBinary(2), np.array([[1, 0]]), [1, 0]),
    ],
)
def test_actions_that_are_whole_numbers_are_cast_by_their_value(kind: str, space: Any, batch: Any, row: Any) -> None:
    def make() -> Bell:
        env = Bell()
        env.action_space = space
        return env

    with vectorize_env(make, kind) as venv:
        venv.reset()
        venv.step(batch.astype(np.int64))
        if kind == "dummy":
            (taken,) = venv._group.envs[0].taken  # pyright: ignore[reportAttributeAccessIssue]
            assert taken.dtype == space.dtype
            assert taken.tolist() == row
        if space.dtype.kind in "iu":
            with pytest.raises(ConfigError, match="without loss"):
                venv.step(batch + 2**40)
        with pytest.raises(ConfigError, match="without loss"):
            venv.step(batch + 0.5)
