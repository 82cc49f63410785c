"""A small simulator with its interpreters and reward, which tests of trainers share. It can be imported by worker processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from leyden.rl import ActionInterpreter, Reward, Simulator, StateInterpreter, TrainingVessel

__all__ = ["Direction", "NearZero", "Position", "Walk", "vessel_of"]


class Walk(Simulator[int, int, int]):
    """Steps left or right, ten of them, or fewer where it starts far away."""

    def __init__(self, initial: int) -> None:
        self.position, self.left = initial, 10 - abs(initial) % 3

    def step(self, action: int) -> None:
        self.position += action
        self.left -= 1

    def get_state(self) -> int:
        return self.position

    def done(self) -> bool:
        return self.left == 0


class Position(StateInterpreter[int, np.ndarray]):
    observation_space = spaces.Box(-30, 30, (1,), np.float32)  # pyright: ignore[reportAssignmentType]

    def interpret(self, simulator_state: int) -> np.ndarray:
        return np.array([simulator_state], np.float32)


class Direction(ActionInterpreter[int, Any, int]):
    action_space = spaces.Discrete(2)  # pyright: ignore[reportAssignmentType]

    def interpret(self, simulator_state: int, action: Any) -> int:
        return 1 if action else -1


class NearZero(Reward[int]):
    def reward(self, simulator_state: int) -> float:
        self.log("distance", abs(simulator_state))
        return -abs(simulator_state) / 10


def vessel_of(policy: str = "ppo", *, simulator: type[Walk] = Walk, **options: Any) -> TrainingVessel[int]:
    """A vessel with a small policy that learns."""
    from leyden.rl import DQN, PPO  # here, so that workers, which need the simulator alone, do not load torch

    made: Any
    if policy == "ppo":
        made = PPO(None, Position.observation_space, Direction.action_space, lr=3e-3)
    else:
        made = DQN(None, Position.observation_space, Direction.action_space, lr=3e-3, target_update_freq=5)
    given: dict[str, Any] = {
        "train_initial_states": list(range(-8, 9)),
        "val_initial_states": [-4, -1, 3],
        "test_initial_states": [-2, 5],
        "episode_per_iter": 6,
        "update_kwargs": {"batch_size": 32, "repeat": 2} if policy == "ppo" else {"batch_size": 32},
    }
    return TrainingVessel(
        simulator_fn=simulator,
        state_interpreter=Position(),
        action_interpreter=Direction(),
        policy=made,
        reward=NearZero(),
        **(given | options),
    )
