"""Environments that their users did not write: they leave their spaces, use other dtypes, and say things in `info`."""

from __future__ import annotations

import logging
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from leyden.errors import SimulatorError
from leyden.rl.collector import Collector
from leyden.rl.env import EnvWrapper, vectorize_env
from leyden.rl.parts import StateInterpreter
from leyden.rl.policy import RandomPolicy
from leyden.rl.spaces import GymSpaceValidationError
from tests.rl.env.test_kinds import KINDS, Witness
from tests.rl.env.worlds import Position, Push, Sight, Walk, actions, factory, play


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Straying(gymnasium.Env[Any, Any]):
    """Five steps, in float64, of which the last four are out of the declared bounds; its info has a log of its own."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    wrong: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        obs = np.full(2, float(self.steps)) if self.wrong is None or self.steps < 3 else self.wrong
        info = {"log": {"x": float(self.steps)}, "lives": 3, "episode": "mine"}
        return obs, 1.0, self.steps == 5, False, info


class Nan(Straying):
    wrong = np.array([0.0, np.nan])


class Shape(Straying):
    wrong = np.zeros(3)


class Text(Straying):
    wrong = np.array(["a", "b"])


class Counts(Straying):
    """Counts in int64, out of its bounds and then out of what its dtype holds."""

    observation_space = spaces.Box(0, 3, (2,), np.uint8)
    wrong = np.array([-1, 256])

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.int64), *rest


class Nested(Straying):
    observation_space = spaces.Dict(
        {"far": spaces.Box(-1, 1, (2,), np.float32), "both": spaces.Tuple([spaces.Discrete(9), spaces.MultiBinary(2)])}
    )

    def _nest(self, obs: Any) -> Any:
        return {"far": obs, "both": [np.int32(self.steps), np.ones(2, bool)]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset()
        return self._nest(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return self._nest(obs), *rest


def test_an_environment_that_leaves_its_space_is_collected_from_and_said_once(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        vectorize_env(Straying, kind, 3, seeds=range(5)) as venv,
    ):
        result = Collector(RandomPolicy(venv.observation_space, venv.action_space), venv).collect()
        assert venv.reset().dtype == np.float32
    assert result.lengths.tolist() == [5] * 5
    (said,) = [record.message for record in caplog.records if "out of the bounds" in record.message]
    assert "environment 0" in said and "element [0] is 2, not in -1 to 1" in said


@pytest.mark.parametrize(
    ("env", "says"), [(Nan, "1 NaN"), (Shape, r"shape is \(3,\)"), (Text, "dtype is <U1"), (Counts, "256")]
)
def test_what_no_cast_can_mend_is_refused(env: Any, says: str) -> None:
    with vectorize_env(env, seeds=range(2)) as venv, pytest.raises(SimulatorError, match=says) as caught:
        Collector(RandomPolicy(venv.observation_space, venv.action_space), venv).collect()
    assert caught.value.step == 2
    assert isinstance(caught.value.__cause__, GymSpaceValidationError)


def test_parts_of_nested_spaces_are_cast_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), vectorize_env(Nested, seeds=range(2)) as venv:
        venv.reset()
        venv.step(np.zeros(1, np.int64))
        obs = venv.step(np.zeros(1, np.int64)).obs
    assert obs["far"].tolist() == [[2.0, 2.0]] and obs["far"].dtype == np.float32
    number, bits = obs["both"]
    assert number.tolist() == [2] and bits.dtype == np.int8
    assert "key 'far': an observation is out of the bounds" in caplog.text


class Lenient(Sight):
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    strict = False

    def interpret(self, simulator_state: np.ndarray) -> np.ndarray:
        return simulator_state.astype(np.float64)


def test_an_interpreter_may_choose_the_lenient_check(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), vectorize_env(factory(sight=Lenient), kind, 2, seeds=range(3)) as venv:
        assert len(play(venv)) == 3
    assert caplog.text.count("out of the bounds") == 1
    alone: StateInterpreter[Any, Any] = Lenient()
    with pytest.raises(GymSpaceValidationError, match="4 NaN"):
        alone(np.full(4, np.nan))


def test_info_of_an_environment_reaches_steps_writers_and_metrics(kind: Any) -> None:
    curious = Witness(wants_steps=True)
    with vectorize_env(Straying, kind, 1, curious, seeds=range(1)) as venv:
        venv.reset()
        steps = [venv.step(np.zeros(1, np.int64)) for _ in range(5)]
    assert [step.infos[0]["lives"] for step in steps] == [3] * 5
    assert "episode" not in steps[0].infos[0]  # that name is Leyden's
    assert steps[4].infos[0]["episode"].logs == {"x": 3.0}
    assert [what[5] for what in curious.heard if what[0] == "step"] == [
        {"x": (20, float(step)), "reward": (20, 1.0)} for step in range(1, 6)
    ]
    with vectorize_env(Straying, kind, 1, seeds=range(1)) as venv:
        venv.reset()
        assert venv.step(np.zeros(1, np.int64)).infos[0]["log"] == {"x": (20, 1.0)}


class Rich(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Qlib's form of a log, a value with a level, and a value that no process can send."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        pair = np.empty(2, object)
        pair[:] = 10, 4.0
        info["log"] = {"qlib": pair, "leveled": (30, "up")}
        info["lock"] = threading.Lock()
        info["gate"] = threading.Event()
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize("kind", ["dummy", "shmem"])
def test_logs_may_have_levels_and_what_cannot_travel_is_left_out_with_a_word(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        vectorize_env(lambda: Rich(gymnasium.make("CartPole-v1")), kind, 1, seeds=range(1)) as venv,
    ):
        venv.reset()
        info = venv.step(np.zeros(1, np.int64)).infos[0]
    assert info["log"] == {"qlib": (10, 4.0), "leveled": (30, "up")}
    assert ("lock" in info) == (kind == "dummy")
    for name in ("lock", "gate"):
        assert (f"info[{name!r}] cannot be sent" in caplog.text) == (kind == "shmem")


def test_an_environment_without_integers_as_seeds_is_repeatable_too() -> None:
    def begun() -> Any:
        with vectorize_env(lambda: gymnasium.make("CartPole-v1"), concurrency=2) as venv:
            return venv.reset().copy()

    assert np.array_equal(begun(), begun())
    assert len(np.unique(begun())) == 8


class Saying(Walk):
    def step(self, action: float) -> None:
        super().step(action)
        self.log("twice", 2 * self.x[0])


def test_simulators_log_as_rewards_do() -> None:
    with vectorize_env(lambda: EnvWrapper(Saying, Sight(), Push(), reward_fn=Position()), seeds=[0]) as venv:
        venv.reset()
        for _ in range(3):
            step = venv.step(actions(1))
    assert step.infos[0]["episode"].logs == {"position": 0.5, "twice": 1.0}
