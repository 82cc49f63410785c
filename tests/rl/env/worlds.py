"""Small simulators that the tests of environments share. Workers import this by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from leyden.rl.env import EnvWrapper
from leyden.rl.parts import ActionInterpreter, Reward, Simulator, StateInterpreter
from leyden.training import LogCollector

SIZE = 4


class Walk(Simulator[int, np.ndarray, float]):
    """Adds the action to its position. An item is a number: it decides where the walk begins and how long it is (3 to 9 steps)."""

    def __init__(self, initial: int = 0) -> None:
        self.initial = initial
        self.x = np.arange(SIZE, dtype=np.float32) + initial
        self.steps = 0
        self.length = 3 + initial % 7

    def step(self, action: float) -> None:
        self.x = self.x + np.float32(action)
        self.steps += 1
        if self.env is not None:
            self.env.logger.add_scalar("position", float(self.x[0]))

    def get_state(self) -> np.ndarray:
        return self.x

    def done(self) -> bool:
        return self.steps >= self.length


class LimitedWalk(Walk):
    """Ended by a limit where its item is odd."""

    def truncated(self) -> bool:
        return self.initial % 2 == 1 and self.done()


class Sight(StateInterpreter[np.ndarray, np.ndarray]):
    observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)

    def interpret(self, simulator_state: np.ndarray) -> np.ndarray:
        return simulator_state.copy()


class Push(ActionInterpreter[np.ndarray, np.ndarray, float]):
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def interpret(self, simulator_state: np.ndarray, action: np.ndarray) -> float:
        return float(action[0])


class Position(Reward[np.ndarray]):
    def reward(self, simulator_state: np.ndarray) -> float:
        return float(simulator_state[0])


class DictSight(StateInterpreter[np.ndarray, dict[str, Any]]):
    observation_space = spaces.Dict(
        {
            "x": spaces.Box(-np.inf, np.inf, (SIZE,), np.float32),
            "far": spaces.Discrete(2),
            "both": spaces.Tuple([spaces.MultiBinary(3), spaces.MultiDiscrete([3, 4])]),
        }
    )

    def interpret(self, simulator_state: np.ndarray) -> dict[str, Any]:
        far = int(simulator_state[0] > 2)
        both = (np.array([far, 0, 1], np.int8), np.array([far, 3], np.int64))
        return {"x": simulator_state.copy(), "far": far, "both": both}


class TextSight(StateInterpreter[np.ndarray, str]):
    observation_space = spaces.Text(20, charset="0123456789.-")

    def interpret(self, simulator_state: np.ndarray) -> str:
        return f"{float(simulator_state[0]):.2f}"


class Unlucky(Walk):
    """Fails in the way, and at the place, that its item says: (kind, place, number)."""

    def __init__(self, initial: tuple[str, str, int]) -> None:
        self.kind, self.place, number = initial
        super().__init__(number)
        self.fail("construct")

    def fail(self, place: str) -> None:
        if place != self.place or (place != "construct" and self.steps < 2):
            return
        match self.kind:
            case "raise":
                raise OSError(f"the quarry is closed: {place}")
            case "stop":
                raise StopIteration
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "nan":
                self.x = self.x * np.float32("nan")
            case "shape":
                self.x = np.zeros(SIZE + 1, np.float32)
            case "dtype":
                self.x = self.x.astype(np.float64)

    def step(self, action: float) -> None:
        super().step(action)
        self.fail("step")

    def get_state(self) -> np.ndarray:
        self.fail("get_state")
        return super().get_state()

    def done(self) -> bool:
        self.fail("done")
        return super().done()


class OnceUnlucky(Walk):
    """Raises at its second step the first time that its item is taken: a file in `folder` remembers."""

    def __init__(self, initial: tuple[str, int]) -> None:
        folder, number = initial
        super().__init__(number)
        self.mark = Path(folder) / str(number)

    def step(self, action: float) -> None:
        super().step(action)
        if self.steps == 2 and not self.mark.exists():
            self.mark.touch()
            raise OSError("only this once")


def factory(
    simulator: Callable[..., Any] = Walk, sight: Callable[[], Any] = Sight, loglevel: int = 20
) -> Callable[[], EnvWrapper[Any, Any, Any, Any, Any]]:
    def make() -> EnvWrapper[Any, Any, Any, Any, Any]:
        return EnvWrapper(simulator, sight(), Push(), reward_fn=Position(), logger=LogCollector(loglevel))

    return make


def actions(n: int, value: float = 0.25) -> np.ndarray:
    return np.full((n, 1), value, np.float32)


def play(venv: Any, *, limit: int = 10_000) -> list[Any]:
    """All episodes until the seeds are exhausted, in the order in which they ended."""
    ended: list[Any] = []
    venv.reset()
    for _ in range(limit):
        if not venv.alive.any():
            return ended
        step = venv.step(actions(venv.num_envs))
        ended += [info["episode"] for _, info in sorted(step.infos.items()) if "episode" in info]
        if not venv.alive.all() and not venv.exhausted:
            venv.reset()
    raise AssertionError(f"no end after {limit} steps")
