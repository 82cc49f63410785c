"""Networks: the default perceptron, the actor-critic and the Q-network; observations as tensors.

Actor-critic and Q-network are heads on a body: a torch module from a batch of observations to features (n, d), which
may be a user's own. They scale images before any body sees them (`ScaledImages`). This module knows no algorithm.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from leyden.errors import ConfigError
from leyden.rl.batch import Array, Batch, is_space

Space = gymnasium.Space[Any]
Tensors: TypeAlias = "Tensor | dict[str, Tensors] | tuple[Tensors, ...]"
_Images: TypeAlias = "bool | dict[str, _Images] | tuple[_Images, ...]"
from_numpy: Callable[[Array], Tensor] = cast(Any, torch).from_numpy  # torch leaves it untyped


def to_tensors(batch: Batch, device: torch.device | None = None) -> Tensors:
    """Return a batch as tensors of the same structure, without a copy if none is needed.

    Floating-point numbers become float32; other numbers keep their type.
    device: None: the CPU.
    """
    if isinstance(batch, dict):
        return {name: to_tensors(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(to_tensors(part, device) for part in batch)
    tensor = from_numpy(batch)
    if tensor.dtype == torch.float64 or tensor.dtype == torch.float16:
        tensor = tensor.float()
    return tensor if device is None else tensor.to(device)


def is_image(space: Any) -> bool:
    """Return whether a space holds images of bytes: a uint8 Box of two or more dimensions, bounded by 0 and 255."""
    if not is_space(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) < 2:
        return False
    return bool(np.all(space.low == 0) and np.all(space.high == 255))


class ScaledImages(nn.Module):
    """Divides the images among the observations by 255, as Stable-Baselines3 does, because a network learns badly from
    inputs of that size.

    The space decides, not the values: see `is_image`. Other observations pass unchanged. The module is part of the
    policy's module, so a copied or saved policy scales as the trained one does. It has no parameters.
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._images = _images(space)

    def forward(self, obs: Tensors) -> Tensors:
        """Return the observations in their structure, the images as float32 from 0 to 1."""
        return _scaled(self._images, obs)


def _images(space: Any) -> _Images:
    """Return which parts of a space are images; False if none is."""
    if is_space(space, spaces.Dict):
        found = {name: _images(part) for name, part in space.spaces.items()}
        return found if any(found.values()) else False
    if is_space(space, spaces.Tuple):
        parts = tuple(_images(part) for part in space.spaces)
        return parts if any(parts) else False
    return is_image(space)


def _scaled(images: _Images, obs: Tensors) -> Tensors:
    if isinstance(images, dict):
        assert isinstance(obs, dict)
        return {name: _scaled(images[name], part) for name, part in obs.items()}
    if isinstance(images, tuple):
        assert isinstance(obs, tuple)
        return tuple(_scaled(part, given) for part, given in zip(images, obs, strict=True))
    if not images:
        return obs
    assert isinstance(obs, Tensor)
    return obs.float() / 255


class _Flatten(nn.Module):
    """Turns each observation into one float32 vector, in which discrete values are one-hot."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space = space
        self.output_dim = _width(space)

    def forward(self, obs: Tensors) -> Tensor:
        return _flattened(self._space, obs)


def _width(space: Any) -> int:
    """Return the length of an observation's vector. Raise ConfigError for an unknown kind of space."""
    if is_space(space, spaces.Dict):
        return sum(_width(part) for part in space.spaces.values())
    if is_space(space, spaces.Tuple):
        return sum(_width(part) for part in space.spaces)
    if is_space(space, spaces.Discrete):
        return int(space.n)
    if is_space(space, spaces.MultiDiscrete):
        return int(np.sum(space.nvec))
    if is_space(space, spaces.Box, spaces.MultiBinary):
        return math.prod(space.shape)
    raise ConfigError(f"the default network does not read observations of {space}; give a network of your own")


def _flattened(space: Any, obs: Tensors) -> Tensor:
    """Return observations as one float32 tensor (n, width), in which discrete values are one-hot."""
    if is_space(space, spaces.Dict):
        assert isinstance(obs, dict)
        return torch.cat([_flattened(part, obs[name]) for name, part in space.spaces.items()], dim=-1)
    if is_space(space, spaces.Tuple):
        assert isinstance(obs, tuple)
        return torch.cat([_flattened(part, given) for part, given in zip(space.spaces, obs, strict=True)], dim=-1)
    assert isinstance(obs, Tensor)
    if is_space(space, spaces.Discrete):
        return nn.functional.one_hot(obs.long() - int(space.start), int(space.n)).float()
    if is_space(space, spaces.MultiDiscrete):
        start, sizes = np.ravel(space.start).tolist(), np.ravel(space.nvec).tolist()
        columns = obs.long().reshape(len(obs), -1)
        return torch.cat(
            [
                nn.functional.one_hot(columns[:, at] - int(start[at]), int(size)).float()
                for at, size in enumerate(sizes)
            ],
            dim=-1,
        )
    return obs if obs.dim() == 2 and obs.dtype == torch.float32 else obs.reshape(len(obs), -1).float()


def default_body(
    space: Any, hidden: Sequence[int] = (64, 64), *, activation: type[nn.Module] = nn.Tanh, seed: int = 0
) -> nn.Module:
    """Return a perceptron over the flattened observation, with orthogonal weights of gain sqrt(2) and biases of 0.

    hidden: the widths of its layers; the last one is its `output_dim`.
    """
    flatten = _Flatten(space)
    plain = is_space(space, spaces.Box) and len(space.shape) == 1 and space.dtype in (np.float32, np.float64)
    layers: list[nn.Module] = [] if plain else [flatten]
    generator = torch.Generator().manual_seed(seed)
    width = flatten.output_dim
    for size in hidden:
        layers += [_linear(width, size, math.sqrt(2), generator), activation()]
        width = size
    body = nn.Sequential(*layers)
    cast(Any, body).output_dim = width  # read by `feature_size`
    return body


def feature_size(network: nn.Module, space: Space) -> int:
    """Return the number of a network's features.

    It is `network.output_dim`, or is found by a call with one observation of zeros. Raise ConfigError if that call does
    not return a tensor (1, d).
    """
    declared = getattr(network, "output_dim", None)
    if isinstance(declared, int):
        return declared
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    with torch.no_grad():
        features = network(ScaledImages(space)(_one_sample(space, device)))
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != 1:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"network {type(network).__name__} gives {shape} for one observation; its features must be a tensor (n, d)"
        )
    return int(features.shape[1])


def _one_sample(space: Any, device: torch.device) -> Tensors:
    """Return a batch of one observation of zeros. Raise ConfigError if observations are no arrays."""
    if is_space(space, spaces.Dict):
        return {name: _one_sample(part, device) for name, part in space.spaces.items()}
    if is_space(space, spaces.Tuple):
        return tuple(_one_sample(part, device) for part in space.spaces)
    if space.shape is None or space.dtype is None:
        raise ConfigError(f"observations of {space} are no arrays; a policy cannot read them")
    return to_tensors(np.zeros((1, *space.shape), space.dtype), device)


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    # skip_init, because the usual initialisation draws from torch's process-wide generator
    layer = cast(nn.Linear, cast(Any, nn.utils).skip_init(nn.Linear, inputs, outputs))
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """A network with two outputs: the parameters of the actions' distribution, and values.

    The two heads have a body each, or share one.
    """

    def __init__(
        self,
        obs_space: Space,
        actor: nn.Module,
        critic: nn.Module,
        *,
        n_features: int,
        n_outputs: int,
        gaussian: bool,
        seed: int,
    ) -> None:
        """Make the heads.

        obs_space: decides which observations are images, which the bodies get scaled.
        actor, critic: bodies, which may be the same module.
        n_features: the width of the bodies' output.
        n_outputs: the number of logits of a categorical distribution, or of means of a Gaussian.
        gaussian: learn a log standard deviation for each output, which begins at 0.
        seed: the seed that the default body was made with; the heads are drawn from `seed + 1`.
        """
        super().__init__()
        generator = torch.Generator().manual_seed(seed + 1)  # the default body is drawn from `seed`
        self.scale = ScaledImages(obs_space)
        self.actor = actor
        self.critic = critic
        self.shared = actor is critic
        self.actor_head = _linear(n_features, n_outputs, 0.01, generator)
        self.critic_head = _linear(n_features, 1, 1.0, generator)
        self.log_std: nn.Parameter | None = nn.Parameter(torch.zeros(n_outputs)) if gaussian else None

    def forward(self, obs: Tensors) -> tuple[Tensor, Tensor]:
        """Return distribution parameters (n, n_outputs) and values (n,)."""
        obs = self.scale(obs)
        features = self.actor(obs)
        others = features if self.shared else self.critic(obs)
        return self.actor_head(features), self.critic_head(others)[:, 0]

    def policy(self, obs: Tensors) -> Tensor:
        """Return distribution parameters (n, n_outputs), without computing values."""
        return self.actor_head(self.actor(self.scale(obs)))

    def value(self, obs: Tensors) -> Tensor:
        """Return values (n,), without computing distribution parameters."""
        return self.critic_head(self.critic(self.scale(obs)))[:, 0]


class QNetwork(nn.Module):
    """A network with one value for each action."""

    def __init__(self, obs_space: Space, body: nn.Module, *, n_features: int, n_actions: int, seed: int) -> None:
        """Make the head.

        obs_space: decides which observations are images, which the body gets scaled.
        n_features: the width of the body's output.
        """
        super().__init__()
        self.scale = ScaledImages(obs_space)
        self.body = body
        # not `seed`, from which the default body is drawn
        self.head = _linear(n_features, n_actions, 1.0, torch.Generator().manual_seed(seed + 1))

    def forward(self, obs: Tensors) -> Tensor:
        """Return the values of all actions, (n, n_actions)."""
        return self.head(self.body(self.scale(obs)))


class FlatParameters:
    """Makes all trained parameters of a module views of one vector, and their gradients of another.

    An optimizer step and the gradient's norm then take one kernel each, which is faster for a small network of many
    tensors. An elementwise optimizer, such as Adam, computes the same numbers. Do not move the module to another device
    or type afterwards.
    Raise ConfigError if nothing is to be trained, or if devices or types differ.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ConfigError(f"{type(module).__name__} has no parameter with requires_grad; there is nothing to train")
        kinds = {(p.device, p.dtype) for p in parameters.values()}
        if len(kinds) > 1:
            raise ConfigError(
                f"the parameters of {type(module).__name__} lie on several devices or have several types: {kinds}; "
                "move the module to one device and type first"
            )
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        with torch.no_grad():
            self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters.values()]))
            self.vector.grad = torch.zeros_like(self.vector)
        self.gradient = self.vector.grad
        for p, data, grad in zip(
            parameters.values(), self.split(self.vector.data).values(), self.split(self.gradient).values(), strict=True
        ):
            p.data = data
            p.grad = grad
        if any(isinstance(each, nn.RNNBase) for each in module.modules()):
            # cuDNN warns that it copies weights at each call if they share memory with others.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector as views in the parameters' shapes, by parameter name.

        vector: has one element for each trained parameter, in their order.
        """
        views: dict[str, Tensor] = {}
        at = 0
        for name, shape in self.shapes.items():
            n = math.prod(shape)
            views[name] = vector[at : at + n].view(shape)
            at += n
        return views
