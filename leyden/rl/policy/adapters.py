"""Policies of Stable-Baselines3 and tianshou 2, acting under our collector.

They act; they learn in their own library, whose weights these read at each call. Nothing is imported here but what the policy given has
loaded already. To adapt another library: a subclass of `NonLearnablePolicy` whose `act` calls it with a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from leyden.errors import ConfigError
from leyden.rl.batch import Batch, copied, leaves
from leyden.rl.policy.base import NonLearnablePolicy, PolicyOutput


class Sb3Policy(NonLearnablePolicy):
    """A Stable-Baselines3 model (`BaseAlgorithm`) or its policy: acts by `predict`, stochastically while exploring."""

    def __init__(self, model: Any) -> None:
        """Raises ConfigError if it is neither."""
        if not hasattr(model, "predict") or not hasattr(model, "observation_space"):
            raise ConfigError(f"Sb3Policy needs a Stable-Baselines3 model or policy, not {type(model).__name__}")
        super().__init__(model.observation_space, model.action_space)
        self.model = model

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """`predict(obs, deterministic=not explore)`."""
        actions, _ = self.model.predict(obs, deterministic=not explore)
        return PolicyOutput(np.asarray(actions))

    def state_dict(self) -> dict[str, Any]:
        """The network's weights; Stable-Baselines3 saves the rest itself (`model.save`)."""
        return {"model": {name: t.detach().clone() for name, t in _module(self.model).state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the weights."""
        _module(self.model).load_state_dict(state["model"])


def _module(model: Any) -> Any:
    return getattr(model, "policy", model)


class TianshouPolicy(NonLearnablePolicy):
    """A policy of tianshou 2, or an algorithm's `policy`: acts by its `forward` on a Batch, mapped to the action space.

    A tianshou policy explores when it is told that it is within a training step and not otherwise; so is this one.
    """

    def __init__(self, policy: Any) -> None:
        """Raises ConfigError if it is none."""
        policy = getattr(policy, "policy", policy)
        if not hasattr(policy, "map_action") or not hasattr(policy, "observation_space"):
            raise ConfigError(f"TianshouPolicy needs a policy of tianshou 2, not {type(policy).__name__}")
        if policy.observation_space is None:
            raise ConfigError("the tianshou policy has no observation_space; give it one when it is made")
        super().__init__(policy.observation_space, policy.action_space)
        self.policy = policy
        self._data = sys.modules["tianshou.data"]  # loaded by whoever made the policy

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """`forward`, then exploration noise if exploring, then `map_action`."""
        import torch

        given = self._data.Batch(obs=copied(obs), info=self._data.Batch())
        before = self.policy.is_within_training_step
        self.policy.is_within_training_step = explore
        try:
            with torch.no_grad():
                acted: Any = self.policy(given).act
                actions = acted.detach().cpu().numpy() if isinstance(acted, torch.Tensor) else np.asarray(acted)
                if explore:
                    actions = self.policy.add_exploration_noise(actions, given)
        finally:
            self.policy.is_within_training_step = before
        mapped_actions = np.asarray(self.policy.map_action(actions))
        if len(mapped_actions) != len(next(leaves(obs))):
            raise ConfigError(
                f"{type(self.policy).__name__} gave {len(mapped_actions)} actions for {len(given)} observations"
            )
        return PolicyOutput(mapped_actions)

    def state_dict(self) -> dict[str, Any]:
        """The policy's weights; its algorithm saves its optimizers itself."""
        return {"model": {name: t.detach().clone() for name, t in self.policy.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the weights."""
        self.policy.load_state_dict(state["model"])
