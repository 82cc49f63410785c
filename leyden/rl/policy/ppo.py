"""Proximal policy optimisation (arXiv:1707.06347) in plain torch, for Discrete and Box action spaces.

It knows a rollout buffer of whole episodes and a network, and no environment. The clipped objective is that of language
models (`leyden.objectives.losses`), advantages are computed in `leyden.objectives.returns`, and the distributions are
two small classes here.

Shapes: n observations, S samples of a collect, A actions or action components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from leyden._lib.options import check_number
from leyden.errors import CheckpointError, ConfigError
from leyden.objectives.losses import clipped_surrogate, clipped_value_loss
from leyden.objectives.returns import RunningMoments, gae
from leyden.rl.batch import Array, Batch, is_space
from leyden.rl.buffer import RolloutBuffer
from leyden.rl.policy.networks import ActorCritic, Tensors, default_body, feature_size, from_numpy
from leyden.rl.policy.policies import PolicyOutput
from leyden.rl.policy.torch_policy import TorchPolicy

Space = gymnasium.Space[Any]
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_METRICS = ("loss", "policy_loss", "value_loss", "entropy", "kl", "clip_fraction")


class PPO(TorchPolicy):
    """Proximal policy optimisation: clipped surrogate, clipped values, generalised advantages.

    For a bounded Box, the interval [-1, 1] of the Gaussian is scaled to the bounds. Actions beyond them are clipped for
    the environment only, so log-probabilities are those of the drawn actions. If a limit cut an episode off, the value
    of its last observation is added to the returns; if it terminated, nothing is.

    The arguments have Qlib's names and defaults.
    """

    module: ActorCritic

    changeable: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "lr": {"above": 0},
        "ent_coef": {},
        "vf_coef": {},
        "eps_clip": {"above": 0},
        "max_grad_norm": {"or_none": "no clipping"},
        "gae_lambda": {"at_least": 0, "at_most": 1},
    }
    update_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "batch_size": {"at_least": 1, "whole": True},
        "repeat": {"at_least": 1, "whole": True},
    }

    def __init__(
        self,
        network: nn.Module | None,
        obs_space: Space,
        action_space: Space,
        lr: float,
        weight_decay: float = 0.0,
        discount_factor: float = 1.0,
        max_grad_norm: float = 100.0,
        reward_normalization: bool = True,
        eps_clip: float = 0.3,
        value_clip: bool = True,
        vf_coef: float = 1.0,
        gae_lambda: float = 1.0,
        max_batch_size: int = 256,
        deterministic_eval: bool = True,
        weight_file: Path | str | None = None,
        *,
        ent_coef: float = 0.01,
        advantage_normalization: bool = True,
        seed: int = 0,
        num_threads: int | None = 1,
    ) -> None:
        """Make the actor-critic and the optimizer.

        network: maps observations, as tensors in their structure, to features (n, d) for actor and critic; None: two
            perceptrons 64-64. Images (uint8 Boxes of 0 to 255 with at least two dimensions) are divided by 255 before
            it.
        lr, weight_decay: of the optimizer, Adam.
        discount_factor: the discount of rewards per step.
        max_grad_norm: longer gradients are scaled to this norm.
        reward_normalization: let the critic learn returns divided by the running standard deviation of all returns.
        eps_clip: how far the probability ratio, and with `value_clip` a value, may move from where it was.
        vf_coef, ent_coef: the weights of the value loss and of the entropy in the loss.
        gae_lambda: lambda of the generalised advantage estimator.
        max_batch_size: the most observations whose values are computed at once.
        deterministic_eval: take the likeliest action when not exploring.
        weight_file: a file of `torch.save` with the weights of a module, a policy or a trainer; None: fresh weights.
        advantage_normalization: normalise the advantages of each minibatch.
        seed: the seed of the default network's weights and of all draws.
        num_threads: torch's threads in `act` and `update`; None: torch's own setting. More than 1 helps for large
            networks on the CPU.
        Raise ConfigError for an action space that is neither Discrete nor a floating Box.
        """
        super().__init__(obs_space, action_space, seed=seed, num_threads=num_threads)
        if network is not None:
            self._network_name = f"network {type(network).__name__}"
        given = {"lr": lr, "ent_coef": ent_coef, "vf_coef": vf_coef, "eps_clip": eps_clip}
        for name, value in {**given, "max_grad_norm": max_grad_norm, "gae_lambda": gae_lambda}.items():
            check_number(name, value, **PPO.changeable[name])
        check_number("weight_decay", weight_decay, at_least=0)
        check_number("discount_factor", discount_factor, at_least=0, at_most=1)
        check_number("max_batch_size", max_batch_size, at_least=1, whole=True)
        self.discount_factor = discount_factor
        self.gae_lambda = gae_lambda
        self.max_grad_norm = max_grad_norm
        self.eps_clip = eps_clip
        self.value_clip = value_clip
        self.vf_coef = vf_coef
        self.ent_coef = ent_coef
        self.max_batch_size = max_batch_size
        self.deterministic_eval = deterministic_eval
        self.advantage_normalization = advantage_normalization
        self._returns = RunningMoments() if reward_normalization else None
        self._actions = _distribution(action_space)
        actor = default_body(obs_space, seed=seed) if network is None else network
        critic = default_body(obs_space, seed=seed + 2) if network is None else network
        module = ActorCritic(
            obs_space,
            actor,
            critic,
            n_features=feature_size(actor, obs_space),
            n_outputs=self._actions.n_outputs,
            gaussian=isinstance(self._actions, _Gaussian),
            seed=seed,
        )
        device = next((p.device for p in actor.parameters()), torch.device("cpu"))
        self._set_module(module.to(device), lr=lr, weight_decay=weight_decay, weight_file=weight_file)

    def make_buffer(self, size: int | None, num_envs: int) -> RolloutBuffer:
        return RolloutBuffer(size, num_envs)

    def act(self, obs: Batch, *, explore: bool) -> PolicyOutput:
        """Return drawn actions, or the likeliest ones when not exploring.

        The extras are `logp`, (n,), and `sample`, the draw before it is mapped to the action space. Raise EngineError
        if a log-probability is not finite.
        """
        with self._threads(), torch.inference_mode():
            outputs = self.module.policy(self._tensors(obs))
            if self._device is not None:
                outputs = outputs.cpu()
            draw, log_std = explore or not self.deterministic_eval, self.module.log_std
            if log_std is not None and self._device is not None:
                log_std = log_std.cpu()
            sample, logp = self._actions.draw(outputs, log_std, self.generator if draw else None)
            extras = {"logp": logp.numpy(), "sample": sample.numpy()}
        if not math.isfinite(extras["logp"].sum()):
            raise self._not_finite(obs)
        return PolicyOutput(self._actions.to_env(extras["sample"]), extras)

    def update(self, buffer: Any, *, batch_size: int = 256, repeat: int = 4, **kwargs: Any) -> dict[str, float]:
        """Learn from a collect. Return the means of the metrics over minibatches.

        batch_size: the samples of a minibatch; a remainder joins the last one.
        repeat: the passes over the collect, each in its own order.
        Raise ConfigError for an empty buffer or an unknown option. Raise EngineError, which names the network, if a
        loss or gradient is not finite.
        """
        if kwargs:
            raise ConfigError(f"PPO.update has no option {', '.join(kwargs)}; it takes batch_size and repeat")
        if not isinstance(buffer, RolloutBuffer) or not len(buffer):
            raise ConfigError("PPO.update needs the RolloutBuffer of a collect with at least one transition")
        check_number("batch_size", batch_size, **PPO.update_options["batch_size"])
        check_number("repeat", repeat, **PPO.update_options["repeat"])
        with self._threads():
            obs = self._tensors(buffer.flat(buffer.obs))
            data, explained = self._targets(buffer, obs)
            n = len(data["logp"])
            parts = _minibatches(n, batch_size)
            totals = torch.zeros(len(_METRICS), device=self.device)  # read once, because each read waits for the device
            norms = 0.0
            for _ in range(repeat):
                order = torch.randperm(n, generator=self.generator).to(self.device)
                shuffled, columns = _rows(obs, order), {name: tensor[order] for name, tensor in data.items()}
                for start, stop in parts:
                    part = {name: tensor[start:stop] for name, tensor in columns.items()}
                    loss, metrics = self._loss(_rows(shuffled, slice(start, stop)), part)
                    norms += self._step(loss, self.max_grad_norm)
                    totals += metrics
            n_batches = repeat * len(parts)
            means = cast("list[float]", cast(Any, totals / n_batches).tolist())
        return {
            **dict(zip(_METRICS, means, strict=True)),
            "grad_norm": norms / n_batches,
            "explained_variance": explained,
        }

    def _loss(self, obs: Tensors, part: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of one minibatch, and the values of `_METRICS`."""
        outputs, values = self.module(obs)
        logp, entropy = self._actions.evaluate(outputs, self.module.log_std, part["sample"])
        advantages = part["advantages"]
        if self.advantage_normalization and len(advantages) > 1:
            # Equal advantages become exactly 0. The float32 mean of other equal numbers is off by rounding, which the
            # division by 0 + 1e-8 would make as large as a true advantage.
            advantages = advantages - advantages[0]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        terms = clipped_surrogate(logp, part["logp"], advantages, clip_low=self.eps_clip, clip_high=self.eps_clip)
        policy_loss = -terms.objective_N.mean()
        if self.value_clip:
            value_loss = clipped_value_loss(values, part["returns"], part["values"], clip=self.eps_clip).mean()
        else:
            value_loss = (values - part["returns"]).square().mean()
        entropy = entropy.mean()
        loss = policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy
        with torch.no_grad():
            n = len(advantages)
            metrics = torch.stack([loss, policy_loss, value_loss, entropy, terms.kl_sum() / n, terms.n_clipped() / n])
        return loss, metrics

    def _targets(self, buffer: RolloutBuffer, obs: Tensors) -> tuple[dict[str, Tensor], float]:
        """Return the samples that losses are computed from, each (S, ...), and the explained variance.

        They are sample, logp, advantages, returns and values. The running scale of the returns is updated for the next
        collect; this one uses the scale before it.
        """
        rows, mask = buffer.n_rows, buffer.mask[: buffer.n_rows]
        scale = self._returns.scale if self._returns is not None else 1.0
        predicted_S = self._values(obs)
        values_TN = np.zeros(mask.shape)
        values_TN[mask] = predicted_S.double().cpu().numpy() * scale
        bootstrap_TN = np.zeros(mask.shape)
        final = buffer.final_observations()
        if final is not None:
            bootstrap_TN[final.rows, final.envs] = self._values(self._tensors(final.obs)).double().cpu().numpy() * scale
        advantages_TN = gae(
            buffer.rewards[:rows],
            values_TN,
            buffer.terminated[:rows] | buffer.truncated[:rows],
            bootstrap_TN,
            mask,
            discount=self.discount_factor,
            gae_lambda=self.gae_lambda,
        )
        values_S, advantages_S = values_TN[mask], advantages_TN[mask]
        returns_S = values_S + advantages_S
        if self._returns is not None:
            self._returns.update(returns_S)
        variance = float(returns_S.var())
        explained = 1 - float((returns_S - values_S).var()) / variance if variance > 0 else 0.0

        def tensor(array: Array) -> Tensor:
            return torch.as_tensor(array, dtype=torch.float32, device=self.device)

        samples = cast(Array, buffer.flat(buffer.extras["sample"]))
        return {
            "sample": from_numpy(samples).to(self.device),
            "logp": tensor(cast(Array, buffer.flat(buffer.extras["logp"]))),
            "advantages": tensor(advantages_S),
            "returns": tensor(returns_S / scale),
            "values": predicted_S,
        }, explained

    def _values(self, obs: Tensors) -> Tensor:
        """Return the critic's values (n,), computed at most `max_batch_size` at once."""
        n = _length(obs)
        with torch.no_grad():
            return torch.cat(
                [
                    self.module.value(_rows(obs, slice(at, at + self.max_batch_size)))
                    for at in range(0, n, self.max_batch_size)
                ]
            )

    def _more_state(self) -> dict[str, Any]:
        return {} if self._returns is None else {"returns": self._returns.state_dict()}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        if (self._returns is not None) != ("returns" in state):
            raise CheckpointError(
                "only one of this PPO and the saved one normalises rewards; make it with the same reward_normalization"
            )
        if self._returns is not None:
            self._returns.load_state_dict(state["returns"])


class _Distribution(Protocol):
    """The distribution of actions, with parameters that the network outputs, (n, n_outputs)."""

    n_outputs: int

    def draw(self, outputs: Tensor, log_std: Tensor | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return samples (n, ...) and their log-probabilities (n,).

        generator: draws the samples; None takes the likeliest ones.
        """
        ...

    def evaluate(self, outputs: Tensor, log_std: Tensor | None, sample: Tensor) -> tuple[Tensor, Tensor]: ...

    def to_env(self, sample: Array) -> Array: ...


class _Categorical:
    """The distribution over the actions of a Discrete space. The network outputs logits."""

    def __init__(self, space: Any) -> None:
        self.n_outputs = int(space.n)
        self._start = int(space.start)

    def draw(self, outputs: Tensor, log_std: Tensor | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        logp = outputs.log_softmax(-1)
        if generator is None:
            sample = logp.argmax(-1)
        else:
            # the smallest of exponential draws with these rates is distributed like the softmax
            waits = torch.empty_like(logp).exponential_(generator=generator)
            sample = (logp.exp() / waits).argmax(-1)
        return sample, logp.gather(-1, sample[:, None])[:, 0]

    def evaluate(self, outputs: Tensor, log_std: Tensor | None, sample: Tensor) -> tuple[Tensor, Tensor]:
        logp = outputs.log_softmax(-1)
        return logp.gather(-1, sample[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def to_env(self, sample: Array) -> Array:
        return sample + self._start if self._start else sample


class _Gaussian:
    """Independent Gaussians, one for each component of a Box. The network outputs their means."""

    def __init__(self, space: Any) -> None:
        self.n_outputs = math.prod(space.shape)
        self._shape = space.shape
        self._dtype = space.dtype
        low, high = np.ravel(space.low).astype(np.float64), np.ravel(space.high).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        self._centre = np.where(bounded, (low + high) / 2, 0.0)
        self._half = np.where(bounded, (high - low) / 2, 1.0)
        self._low, self._high = low, high

    def draw(self, outputs: Tensor, log_std: Tensor | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        assert log_std is not None
        if generator is None:
            sample = outputs
        else:
            noise = torch.empty_like(outputs).normal_(generator=generator)
            sample = outputs + noise * log_std.exp()
        return sample, self._logp(outputs, log_std, sample)

    def evaluate(self, outputs: Tensor, log_std: Tensor | None, sample: Tensor) -> tuple[Tensor, Tensor]:
        assert log_std is not None
        entropy = (log_std + 0.5 + _HALF_LOG_TWO_PI).sum().expand(len(outputs))
        return self._logp(outputs, log_std, sample), entropy

    @staticmethod
    def _logp(means: Tensor, log_std: Tensor, sample: Tensor) -> Tensor:
        z = (sample - means) * (-log_std).exp()
        return (-0.5 * z.square() - log_std - _HALF_LOG_TWO_PI).sum(-1)

    def to_env(self, sample: Array) -> Array:
        scaled = np.clip(self._centre + self._half * sample, self._low, self._high)
        return scaled.astype(self._dtype).reshape(len(sample), *self._shape)


def _distribution(space: Any) -> _Distribution:
    if is_space(space, spaces.Discrete):
        return _Categorical(space)
    if is_space(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return _Gaussian(space)
    raise ConfigError(
        f"PPO acts in Discrete and floating Box spaces, not {space}; let the action interpreter have one of those"
    )


def _minibatches(n: int, batch_size: int) -> list[tuple[int, int]]:
    starts = list(range(0, max(1, n - n % batch_size), batch_size))
    return [(start, start + batch_size if start != starts[-1] else n) for start in starts]


def _rows(tensors: Tensors, at: Any) -> Tensors:
    if isinstance(tensors, dict):
        return {name: _rows(part, at) for name, part in tensors.items()}
    if isinstance(tensors, tuple):
        return tuple(_rows(part, at) for part in tensors)
    return tensors[at]


def _length(tensors: Tensors) -> int:
    if isinstance(tensors, dict):
        return _length(next(iter(tensors.values())))
    return _length(tensors[0]) if isinstance(tensors, tuple) else len(tensors)
