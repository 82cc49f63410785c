"""Policies of Stable-Baselines3 and tianshou 2 that act under Leyden's collector.

The policies learn in their own library; an adapter uses their current weights at each call. Nothing is imported here
that the given policy has not imported already. To adapt another library, subclass `NonLearnablePolicy` and let `act`
call the library with a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from leyden.errors import ConfigError
from leyden.rl.batch import Batch, copied, leaves
from leyden.rl.policy.policies import NonLearnablePolicy, PolicyOutput


class Sb3Policy(NonLearnablePolicy):
    """Acts by `predict` of a Stable-Baselines3 model or policy, stochastically while exploring."""

    def __init__(self, model: Any) -> None:
        """Wrap a model (`BaseAlgorithm`) or policy. Raise ConfigError for any other object."""
        if not hasattr(model, "predict") or not hasattr(model, "observation_space"):
            raise ConfigError(f"Sb3Policy needs a Stable-Baselines3 model or policy, not {type(model).__name__}")
        super().__init__(model.observation_space, model.action_space)
        self.model = model

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        actions, _ = self.model.predict(obs, deterministic=not explore)
        return PolicyOutput(np.asarray(actions))

    def state_dict(self) -> dict[str, Any]:
        """Return the network's weights. Stable-Baselines3 saves the rest itself (`model.save`)."""
        return {"model": {name: t.detach().clone() for name, t in _module(self.model).state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _module(self.model).load_state_dict(state["model"])


def _module(model: Any) -> Any:
    return getattr(model, "policy", model)


class TianshouPolicy(NonLearnablePolicy):
    """Acts by `forward` and `map_action` of a tianshou 2 policy.

    A tianshou policy explores only within a training step, so an exploring `act` is marked as one.
    """

    def __init__(self, policy: Any) -> None:
        """Wrap a policy, or the `policy` of an algorithm. Raise ConfigError for any other object."""
        policy = getattr(policy, "policy", policy)
        if not hasattr(policy, "map_action") or not hasattr(policy, "observation_space"):
            raise ConfigError(f"TianshouPolicy needs a policy of tianshou 2, not {type(policy).__name__}")
        if policy.observation_space is None:
            raise ConfigError("the tianshou policy has no observation_space; give it one when it is made")
        super().__init__(policy.observation_space, policy.action_space)
        self.policy = policy
        self._data = sys.modules["tianshou.data"]  # the policy has loaded it

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """Return the policy's actions, noisy if exploring. Raise ConfigError unless each observation has one."""
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
                f"{type(self.policy).__name__} returned {len(mapped_actions)} actions for {len(given)} observations; its "
                "forward and map_action must return one for each"
            )
        return PolicyOutput(mapped_actions)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's weights. Its algorithm saves the optimizers itself."""
        return {"model": {name: t.detach().clone() for name, t in self.policy.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["model"])
