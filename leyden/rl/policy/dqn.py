"""Deep Q-learning in plain torch: double, n-step, with a target network and epsilon-greedy exploration.

It knows a replay buffer and a network, and no environment.

Shapes: n observations, B sampled transitions, A actions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from leyden._lib.options import check_number
from leyden.errors import CheckpointError, ConfigError
from leyden.objectives.returns import n_step
from leyden.rl.batch import Batch, select
from leyden.rl.buffer import ReplayBuffer
from leyden.rl.policy.networks import QNetwork, default_body, feature_size, from_numpy
from leyden.rl.policy.policies import PolicyOutput
from leyden.rl.policy.torch_policy import TorchPolicy

Space = gymnasium.Space[Any]


class DQN(TorchPolicy):
    """Q-learning with a network (arXiv:1312.5602; double: arXiv:1509.06461).

    Q(s, a) learns the target: the discounted sum of n rewards + discount^n * Q_target(s', argmax_a' Q(s', a')). The sum
    stops at the end of an episode. If a limit cut the episode off, the value of its last observation is still added; if
    it terminated, nothing is.

    The arguments have Qlib's names, but other defaults.
    """

    module: QNetwork

    changeable: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "lr": {"above": 0},
        "max_grad_norm": {"or_none": "no clipping"},
    }
    update_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "batch_size": {"at_least": 1, "whole": True},
        "repeat": {"above": 0},
    }

    def __init__(
        self,
        network: nn.Module | None,
        obs_space: Space,
        action_space: Space,
        lr: float,
        weight_decay: float = 0.0,
        discount_factor: float = 0.99,
        estimation_step: int = 1,
        target_update_freq: int = 500,
        reward_normalization: bool = False,
        is_double: bool = True,
        clip_loss_grad: bool = True,
        weight_file: Path | str | None = None,
        *,
        exploration: float | tuple[float, float, int] = (1.0, 0.05, 10_000),
        max_grad_norm: float | None = 10.0,
        seed: int = 0,
        num_threads: int | None = 1,
    ) -> None:
        """Make the Q-network, its target network and the optimizer.

        network: maps observations to features (n, d); None: a perceptron 64-64 with ReLU. Images (uint8 Boxes of 0 to
            255 with at least two dimensions) are divided by 255 before it.
        lr, weight_decay: of the optimizer, Adam.
        discount_factor: the discount of rewards per step.
        estimation_step: the n of n-step returns.
        target_update_freq: optimizer steps between copies to the target network. 0, Qlib's default: there is no target
            network, and Q is its own target.
        reward_normalization: must be False, because a bootstrapped target has no scale of its own.
        is_double: the network chooses the next action, and the target network values it. Without a target network this
            makes no difference.
        clip_loss_grad: use Huber's loss, whose gradient is at most 1, instead of the squared error.
        weight_file: a file of `torch.save` with the weights of a module, a policy or a trainer; None: fresh weights.
        exploration: the probability of a random action while exploring: a constant, or (first, last, number of actions
            over which it changes linearly from first to last).
        max_grad_norm: longer gradients are scaled to this norm; None: never.
        seed: the seed of the default network's weights and of all draws.
        num_threads: torch's threads in `act` and `update`; None: torch's own setting.
        Raise ConfigError for an action space that is not Discrete.
        """
        super().__init__(obs_space, action_space, seed=seed, num_threads=num_threads)
        if network is not None:
            self._network_name = f"network {type(network).__name__}"
        if not isinstance(action_space, spaces.Discrete):
            raise ConfigError(
                f"DQN acts in Discrete spaces, not {action_space}; let the action interpreter have one, or use PPO"
            )
        if reward_normalization:
            raise ConfigError(
                "DQN(reward_normalization=True): a bootstrapped target has no scale of its own; scale the reward instead"
            )
        check_number("lr", lr, **DQN.changeable["lr"])
        check_number("weight_decay", weight_decay, at_least=0)
        check_number("discount_factor", discount_factor, at_least=0, at_most=1)
        check_number("estimation_step", estimation_step, at_least=1, whole=True)
        check_number("target_update_freq", target_update_freq, at_least=0, whole=True)
        check_number("max_grad_norm", max_grad_norm, **DQN.changeable["max_grad_norm"])
        self._schedule = _checked_schedule(exploration)
        self.discount_factor = discount_factor
        self.estimation_step = estimation_step
        self.target_update_freq = target_update_freq
        self.is_double = is_double
        self.clip_loss_grad = clip_loss_grad
        self.max_grad_norm = max_grad_norm
        self.n_explored = 0
        """The number of actions taken while exploring."""
        self._n_actions = int(action_space.n)
        self._start = int(action_space.start)
        body = default_body(obs_space, activation=nn.ReLU, seed=seed) if network is None else network
        module = QNetwork(
            obs_space, body, n_features=feature_size(body, obs_space), n_actions=self._n_actions, seed=seed
        )
        device = next((p.device for p in body.parameters()), torch.device("cpu"))
        self._set_module(module.to(device), lr=lr, weight_decay=weight_decay, weight_file=weight_file)
        self.target: QNetwork | None = copy.deepcopy(module).requires_grad_(False) if target_update_freq else None

    @property
    def epsilon(self) -> float:
        """The current probability of a random action."""
        first, last, over = self._schedule
        return last if self.n_explored >= over else first + (last - first) * self.n_explored / over

    def make_buffer(self, size: int | None, num_envs: int) -> ReplayBuffer:
        return ReplayBuffer(size, num_envs)

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """Return the best actions, some random while exploring. Raise EngineError if the values are not finite."""
        with self._threads(), torch.inference_mode():
            values = self.module(self._tensors(obs)).cpu()
            best, actions = values.max(-1)
            if not math.isfinite(float(best.sum())):
                raise self._not_finite(obs)
            if explore:
                n = len(actions)
                draws = torch.rand((2, n), generator=self.generator)
                random = (draws[1] * self._n_actions).long().clamp_(max=self._n_actions - 1)
                actions = torch.where(draws[0] < self.epsilon, random, actions)
                self.n_explored += n
        return PolicyOutput(actions.numpy() + self._start)

    def update(self, buffer: Any, *, batch_size: int = 64, repeat: float = 8.0, **kwargs: Any) -> dict[str, float]:
        """Learn from sampled transitions. Return the means of the metrics over minibatches.

        batch_size: the transitions of a minibatch.
        repeat: how often each new transition is used on average (the replay ratio), which decides the number of
            minibatches.
        Raise ConfigError for an empty buffer or an unknown option. Raise EngineError, which names the network, if a
        loss or gradient is not finite.
        """
        if kwargs:
            raise ConfigError(f"DQN.update has no option {', '.join(kwargs)}; it takes batch_size and repeat")
        if not isinstance(buffer, ReplayBuffer) or not len(buffer):
            raise ConfigError("DQN.update needs a ReplayBuffer with at least one transition")
        check_number("batch_size", batch_size, **DQN.update_options["batch_size"])
        check_number("repeat", repeat, **DQN.update_options["repeat"])
        n_steps = max(1, math.ceil(repeat * buffer.n_new / batch_size))
        losses = norms = 0.0
        with self._threads():
            for _ in range(n_steps):
                at = torch.randint(len(buffer), (batch_size,), generator=self.generator).numpy()
                loss = self._loss(buffer, at)
                norms += self._step(loss, self.max_grad_norm)
                losses += float(loss.detach())
                if self.target is not None and self.n_updates % self.target_update_freq == 0:
                    self.target.load_state_dict(self.module.state_dict())
        return {
            "loss": losses / n_steps,
            "grad_norm": norms / n_steps,
            "epsilon": self.epsilon,
            "gradient_steps": float(n_steps),
        }

    def _loss(self, buffer: ReplayBuffer, at_B: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        targets = self.targets(buffer, at_B)
        values = self.module(self._tensors(select(buffer.obs, at_B)))
        taken = from_numpy(buffer.actions[at_B].astype(np.int64) - self._start)
        chosen = values.gather(-1, taken.to(self.device)[:, None])[:, 0]
        if self.clip_loss_grad:
            return nn.functional.smooth_l1_loss(chosen, targets)
        return (chosen - targets).square().mean()

    def targets(self, buffer: ReplayBuffer, at_B: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        """Return the regression targets of Q for the transitions at these indices, (B,)."""
        sums, last, factor = n_step(
            buffer.rewards, buffer.successor, at_B, n=self.estimation_step, discount=self.discount_factor
        )
        factor = np.where(buffer.terminated[last], 0.0, factor)
        obs = self._tensors(select(buffer.next_obs, last))
        with torch.no_grad():
            judge = self.module if self.target is None else self.target
            if self.is_double and self.target is not None:
                best = self.module(obs).argmax(-1)
                value = self.target(obs).gather(-1, best[:, None])[:, 0]
            else:
                value = judge(obs).max(-1).values
        numbers = torch.as_tensor(np.stack([sums, factor]), dtype=torch.float32, device=self.device)
        return numbers[0] + numbers[1] * value

    def train(self, mode: bool = True) -> None:
        """Put the network into training mode, or with False into evaluation mode.

        The target network is always in evaluation mode.
        """
        self.module.train(mode)
        if self.target is not None:
            self.target.eval()

    def _more_state(self) -> dict[str, Any]:
        more: dict[str, Any] = {"n_explored": self.n_explored}
        if self.target is not None:
            more["target"] = {name: tensor.detach().clone() for name, tensor in self.target.state_dict().items()}
        return more

    def _load_more(self, state: Mapping[str, Any]) -> None:
        if (self.target is not None) != ("target" in state):
            raise CheckpointError(
                "only one of this DQN and the saved one has a target network; make it with the same target_update_freq"
            )
        self.n_explored = int(state["n_explored"])
        if self.target is not None:
            self.target.load_state_dict(state["target"])


def _checked_schedule(exploration: float | tuple[float, float, int]) -> tuple[float, float, int]:
    """Return (first probability, last probability, number of actions between them). Raise ConfigError for anything else
    than a probability or three such numbers.
    """
    if not isinstance(exploration, tuple | list):
        check_number("exploration", exploration, at_least=0, at_most=1)
        return float(exploration), float(exploration), 0
    if len(exploration) != 3:
        raise ConfigError(f"exploration is {exploration!r}; give a probability, or (first, last, number of actions)")
    first, last, over = exploration
    for name, probability in (("first", first), ("last", last)):
        check_number(f"exploration's {name} probability", probability, at_least=0, at_most=1)
    check_number("exploration's number of actions", over, at_least=0, whole=True)
    return float(first), float(last), int(over)
