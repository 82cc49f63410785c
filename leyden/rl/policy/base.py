"""What a policy is to a collector and a trainer; policies that learn nothing.

A policy maps batches of observations to actions and may learn from what a collector brought. It knows no environment. To add one: subclass
`Policy` (or `TorchPolicy`, which has the state, the weights and the optimizer step of a torch module).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from leyden.errors import ConfigError
from leyden.options import NamedOptions
from leyden.rl.batch import Array, Batch, leaves
from leyden.rl.buffer import ReplayBuffer, RolloutBuffer

Space = gymnasium.Space[Any]
_NOTHING: Mapping[str, Array] = MappingProxyType({})


class PolicyOutput(NamedTuple):
    """What a policy decided for a batch of n observations."""

    actions: Array
    """(n, ...), in the action space."""
    extras: Mapping[str, Array] = _NOTHING
    """What learning needs besides, each (n, ...): the behaviour's log-probability `logp`, for example."""


class Policy(NamedOptions, ABC):
    """Maps observations to actions, and learns."""

    observation_space: Space
    """Of one environment."""
    action_space: Space

    @abstractmethod
    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """The actions for a batch (n, ...). explore: False is the policy's behaviour when it is evaluated."""

    @abstractmethod
    def update(self, buffer: Any, **kwargs: Any) -> Mapping[str, float]:
        """One update from what was collected into a buffer of `make_buffer`; its metrics, such as loss and grad_norm."""

    @abstractmethod
    def make_buffer(self, size: int | None, num_envs: int) -> RolloutBuffer | ReplayBuffer | None:
        """Make the buffer that this policy learns from; None: nothing has to be remembered.

        size: transitions, all environments together; None: the buffer's own choice.
        """

    def train(self, mode: bool = True) -> None:
        """Modules behave as in training (dropout)."""

    def eval(self) -> None:
        """Modules behave as in evaluation."""
        self.train(False)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """ALL that the next act and update depend on but the constructor's arguments: dicts and lists of plain values, tensors, arrays."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s answer, to the bit. Raises CheckpointError, and changes nothing, for another policy's state."""


class NonLearnablePolicy(Policy):
    """A rule: it acts, and an update changes nothing. Subclasses implement `act`."""

    def __init__(self, obs_space: Space, action_space: Space) -> None:
        self.observation_space = obs_space
        self.action_space = action_space

    def update(self, buffer: Any, **kwargs: Any) -> Mapping[str, float]:
        """Nothing to learn."""
        return {}

    def make_buffer(self, size: int | None, num_envs: int) -> None:
        """Nothing to remember."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


class AllOne(NonLearnablePolicy):
    """The same action always, `fill_value` in every component (Qlib's baseline: 1 trades all there is)."""

    def __init__(self, obs_space: Space, action_space: Space, fill_value: float = 1.0) -> None:
        """Raises ConfigError if the action space does not contain that action, or has no array as an action."""
        super().__init__(obs_space, action_space)
        if action_space.dtype is None or action_space.shape is None:
            raise ConfigError(f"AllOne needs actions that are one array, not {action_space}")
        self.fill_value = fill_value
        self._action = np.full(action_space.shape, fill_value, action_space.dtype)
        if not action_space.contains(
            self._action[()] if isinstance(action_space, gymnasium.spaces.Discrete) else self._action
        ):
            raise ConfigError(f"AllOne: fill_value={fill_value} is no action of {action_space}")

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """(n, ...) times the fill value."""
        n = len(next(leaves(obs)))
        return PolicyOutput(np.broadcast_to(self._action, (n, *self._action.shape)).copy())


class RandomPolicy(NonLearnablePolicy):
    """Actions drawn by the action space's own `sample`; each call is seeded by (seed, its number), so its state is two numbers."""

    def __init__(self, obs_space: Space, action_space: Space, seed: int = 0) -> None:
        super().__init__(obs_space, action_space)
        self._draws = copy.deepcopy(action_space)  # a space's generator belongs to whoever made it
        self._seed = seed
        self._n_calls = 0

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """One draw for each observation, exploring or not."""
        self._draws.seed(int(np.random.SeedSequence([self._seed, self._n_calls]).generate_state(1)[0]))
        self._n_calls += 1
        return PolicyOutput(np.stack([self._draws.sample() for _ in range(len(next(leaves(obs))))]))

    def state_dict(self) -> dict[str, Any]:
        """The seed and how often it has acted."""
        return {"seed": self._seed, "n_calls": self._n_calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from there."""
        self._seed, self._n_calls = int(state["seed"]), int(state["n_calls"])
