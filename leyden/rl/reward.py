"""Rewards: a number for each state that a step leads to.

They know the simulator's state, nothing of policies. To add one, subclass `Reward`; to weigh several, `RewardCombination`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, final

from leyden.rl.component import EnvComponent
from leyden.rl.simulator import StateType

if TYPE_CHECKING:
    from leyden.rl.env.wrapper import EnvWrapper


class Reward(EnvComponent, ABC, Generic[StateType]):
    """What a state is worth."""

    @abstractmethod
    def reward(self, simulator_state: StateType) -> float:
        """The reward of the step that led to this state."""

    @final
    def __call__(self, simulator_state: StateType) -> float:
        return self.reward(simulator_state)


class RewardCombination(Reward[StateType]):
    """A weighted sum; each weighted part is logged under its name. The parts have the same `env` as the whole."""

    def __init__(self, rewards: Mapping[str, tuple[Reward[StateType], float]]) -> None:
        """rewards: name -> (reward, weight)."""
        self.rewards = dict(rewards)

    def reward(self, simulator_state: StateType) -> float:
        """The sum of the parts."""
        total = 0.0
        for name, (part, weight) in self.rewards.items():
            value = part(simulator_state) * weight
            total += value
            self.log(name, value)
        return total

    def _take_env(self, env: EnvWrapper[Any, Any, Any, Any, Any] | None) -> None:
        super()._take_env(env)
        for part, _ in self.rewards.values():
            part.env = env
