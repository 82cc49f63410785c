"""`Policy`, the contract of policies with collectors and trainers, and policies that learn nothing.

A policy maps batches of observations to actions, and may learn from the transitions of a collector. It knows no
environment. To add one, subclass `Policy`, or `TorchPolicy`, which has the state, the weights and the optimizer step of
a torch module.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np

from leyden._lib.components import KeepsArguments
from leyden._lib.options import NamedOptions, check_number
from leyden.errors import ConfigError
from leyden.rl.batch import Array, Batch, leaves
from leyden.rl.buffer import ReplayBuffer, RolloutBuffer

Space = gymnasium.Space[Any]
_NOTHING: Mapping[str, Array] = MappingProxyType({})


class PolicyOutput(NamedTuple):
    """The actions of a policy for a batch of n observations."""

    actions: Array
    """(n, ...), in the action space."""
    extras: Mapping[str, Array] = _NOTHING
    """Further values that learning needs, each (n, ...); for example `logp`, the log-probability of the action."""


class Policy(NamedOptions, KeepsArguments, ABC):
    """Maps batches of observations to actions, and learns from transitions."""

    observation_space: Space
    """The observation space of one environment."""
    action_space: Space

    changeable: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Attributes that may change between two updates (`leyden set RUN policy.lr=1e-4`), each with its range as options
    of `check_number`."""
    update_options: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Options of `update`, each with its range, which may change too."""

    @abstractmethod
    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """Return the actions for a batch (n, ...).

        explore: try other actions than the best, to learn; False: act as in an evaluation.
        """

    @abstractmethod
    def update(self, buffer: Any, **kwargs: Any) -> Mapping[str, float]:
        """Learn from the buffer of a collect. Return metrics, such as loss and grad_norm.

        buffer: made by `make_buffer`.
        kwargs: options of the policy, such as batch_size.
        """

    @abstractmethod
    def make_buffer(self, size: int | None, num_envs: int) -> RolloutBuffer | ReplayBuffer | None:
        """Return a new buffer for this policy to learn from; None if it needs no transitions.

        size: the transitions that it holds, over all environments; None: the buffer's default.
        """

    def train(self, mode: bool = True) -> None:
        """Put modules into training mode, as for dropout, or with False into evaluation mode."""

    def eval(self) -> None:
        """Put modules into evaluation mode."""
        self.train(False)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next `act` and `update` depend on, but no constructor arguments.

        It consists of dicts and lists of plain values, tensors and arrays.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict` exactly. Raise CheckpointError, and change nothing, for the state of another
        kind of policy.
        """


class NonLearnablePolicy(Policy):
    """A rule that acts and does not learn. Subclasses implement `act`."""

    def __init__(self, obs_space: Space, action_space: Space) -> None:
        self.observation_space = obs_space
        self.action_space = action_space

    def update(self, buffer: Any, **kwargs: Any) -> Mapping[str, float]:
        return {}

    def make_buffer(self, size: int | None, num_envs: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class AllOne(NonLearnablePolicy):
    """Always takes the same action, with `fill_value` in every component.

    With 1, it is the baseline of Qlib's order execution, which trades everything at once.
    """

    def __init__(self, obs_space: Space, action_space: Space, fill_value: float = 1.0) -> None:
        """Make the action. Raise ConfigError if it is not in the action space, or if that has no arrays."""
        super().__init__(obs_space, action_space)
        if action_space.dtype is None or action_space.shape is None:
            raise ConfigError(f"AllOne needs actions that are one array, not {action_space}")
        self.fill_value = fill_value
        self._action = np.full(action_space.shape, fill_value, action_space.dtype)
        if not action_space.contains(
            self._action[()] if isinstance(action_space, gymnasium.spaces.Discrete) else self._action
        ):
            raise ConfigError(
                f"AllOne: fill_value={fill_value} is no action of {action_space}; give one that it contains"
            )

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        n = len(next(leaves(obs)))
        return PolicyOutput(np.broadcast_to(self._action, (n, *self._action.shape)).copy())


class RandomPolicy(NonLearnablePolicy):
    """Draws random actions with the action space's own `sample`.

    Each call is seeded by the policy's seed and the number of the call, so the state is two numbers.
    """

    def __init__(self, obs_space: Space, action_space: Space, seed: int = 0) -> None:
        super().__init__(obs_space, action_space)
        check_number("seed", seed, at_least=0, whole=True)
        self._draws = copy.deepcopy(action_space)  # seeding it must not change the caller's space
        self._seed = seed
        self._n_calls = 0

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        self._draws.seed(int(np.random.SeedSequence([self._seed, self._n_calls]).generate_state(1)[0]))
        self._n_calls += 1
        return PolicyOutput(np.stack([self._draws.sample() for _ in range(len(next(leaves(obs))))]))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "n_calls": self._n_calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed, self._n_calls = int(state["seed"]), int(state["n_calls"])
