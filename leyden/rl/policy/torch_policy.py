"""The base of policies with a torch module: module, optimizer, random generator, state, and weight files.

The base knows no algorithm. A subclass makes its module, passes it to `_set_module`, and takes optimizer steps with
`_step`. A subclass with more state overrides `_more_state` and `_load_more`.

Torch uses several threads for one operation, which costs more than it gains for the small networks that simulators need
(twice the CPU time for a small recurrent network). `act` and `update` therefore run on one thread unless `num_threads`
says otherwise, and restore torch's process-wide setting afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from leyden._lib.json import is_object
from leyden._lib.options import check_number
from leyden.errors import CheckpointError, ConfigError, EngineError
from leyden.rl.batch import Batch, leaves
from leyden.rl.policy.networks import FlatParameters, Tensors, to_tensors
from leyden.rl.policy.policies import Policy

Space = gymnasium.Space[Any]
_FORMAT = 1
"""The version of the format of `state_dict`."""

logger = logging.getLogger(__name__)


class TorchPolicy(Policy):
    """The base of policies with a torch module, one optimizer and a random generator."""

    module: Any
    """The torch module. Subclasses declare its class."""

    def __init__(self, obs_space: Space, action_space: Space, *, seed: int, num_threads: int | None) -> None:
        """Make the generator. The subclass then calls `_set_module`.

        seed: the seed of the generator that draws actions and minibatches.
        num_threads: torch's threads while the policy acts and learns, on the CPU; None: torch's own setting.
        """
        check_number("seed", seed, whole=True)
        check_number("num_threads", num_threads, at_least=1, whole=True, or_none="torch's own setting")
        self.observation_space = obs_space
        self.action_space = action_space
        self.generator = torch.Generator().manual_seed(seed)
        self._num_threads = num_threads
        self._network_name = "the default network"
        self.n_updates = 0
        """The number of optimizer steps so far."""

    def _set_module(self, module: nn.Module, *, lr: float, weight_decay: float, weight_file: Path | str | None) -> None:
        """Set the policy's module: load its weights, flatten its parameters, and make the optimizer. Raise
        CheckpointError or ConfigError for a weight file that cannot be read or does not fit.
        """
        if weight_file is not None:
            _set_weights(module, read_weights(weight_file), str(weight_file))
        self.module = module
        self.flat = FlatParameters(module)
        device = self.flat.vector.device
        self.device = device
        self._lr = lr
        self._device = None if device.type == "cpu" else device
        self.optimizer = torch.optim.Adam([self.flat.vector], lr=lr, weight_decay=weight_decay, fused=True)

    @property
    def lr(self) -> float:
        """The optimizer's learning rate."""
        return self.optimizer.param_groups[0]["lr"]

    @lr.setter
    def lr(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    # ---- steps -----------------------------------------------------------------------------------

    def _tensors(self, obs: Batch) -> Tensors:
        return to_tensors(obs, self._device)

    def _step(self, loss: Tensor, max_grad_norm: float | None) -> float:
        """Take one optimizer step. Return the gradient's norm before clipping.

        max_grad_norm: a longer gradient is scaled to this norm; None: never.
        Raise EngineError, without a step, if the norm is not finite.
        """
        gradient = self.flat.gradient
        gradient.zero_()
        cast(Any, loss).backward()
        norm = float(gradient.dot(gradient).sqrt())
        if not math.isfinite(norm):
            raise EngineError(
                f"{type(self).__name__}: the loss of {self._network_name} is {float(loss.detach()):g} and its gradient's norm {norm}; "
                "this step was not taken. Look for rewards or observations that are not finite, or a learning rate that is too high"
            )
        if max_grad_norm and norm > max_grad_norm:
            gradient.mul_(max_grad_norm / (norm + 1e-6))
        cast(Any, self.optimizer).step()
        self.n_updates += 1
        return norm

    @contextmanager
    def _threads(self) -> Generator[None]:
        """Let torch use `num_threads` threads inside the block."""
        before = torch.get_num_threads()
        if self._num_threads is None or self._num_threads == before:
            yield
            return
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _not_finite(self, obs: Batch) -> EngineError:
        """Return an error that names the cause of an output that is not finite: observations or weights."""
        for leaf in leaves(obs):
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                rows = np.flatnonzero(~np.isfinite(leaf.reshape(len(leaf), -1)).all(axis=1)).tolist()
                return EngineError(
                    f"{type(self).__name__}: {self._network_name} was given observations that are not finite (rows {rows} of the batch); "
                    "look at the simulator and its state interpreter"
                )
        bad = [name for name, tensor in self.module.state_dict().items() if not bool(torch.isfinite(tensor).all())]
        where = (
            f"its weights are not finite: {', '.join(bad)}" if bad else "its weights and the observations are finite"
        )
        return EngineError(f"{type(self).__name__}: {self._network_name} gave an output that is not finite; {where}")

    # ---- state -----------------------------------------------------------------------------------

    def _more_state(self) -> dict[str, Any]:
        return {}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        """Restore the entries of `_more_state`. Raise CheckpointError before any change."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the weights, the optimizer, the generator and the counters."""
        moments = cast(dict[str, Any], self.optimizer.state.get(self.flat.vector, {}))
        return {
            "policy": type(self).__name__,
            "format": _FORMAT,
            "model": {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()},
            "optimizer": {
                "lr": self.optimizer.param_groups[0]["lr"],
                "first_lr": self._lr,
                **{name: moments[name].detach().clone() for name in ("step", "exp_avg", "exp_avg_sq") if moments},
            },
            "generator": self.generator.get_state().clone(),
            "n_updates": self.n_updates,
            **self._more_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore weights, optimizer, generator and counters exactly.

        The learning rate is the constructor's, if it differs from the one that the saved run began with. Raise
        CheckpointError, and change nothing, for a state that does not fit.
        """
        name = type(self).__name__
        if state.get("policy") != name or state.get("format") != _FORMAT:
            raise CheckpointError(
                f"this is the state of {state.get('policy')!r}, format {state.get('format')!r}; {name} reads its own, format {_FORMAT}"
            )
        try:
            model = {key: torch.as_tensor(value) for key, value in state["model"].items()}
            optimizer = dict(state["optimizer"])
            _check_fits(model, self.module, name)
            moments = {key: torch.as_tensor(optimizer[key]) for key in ("exp_avg", "exp_avg_sq") if key in optimizer}
            if any(moment.shape != self.flat.vector.shape for moment in moments.values()):
                raise CheckpointError(
                    f"{name}: the saved optimizer is of another network; make it with the same network"
                )
            generator_state = torch.as_tensor(state["generator"]).cpu()
            torch.Generator().set_state(generator_state)  # raises for a damaged state, before any change
            n_updates, lr = int(state["n_updates"]), float(optimizer["lr"])
            first_lr = float(optimizer["first_lr"])
            step = torch.as_tensor(optimizer["step"]) if moments else None
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the saved state of {name} is damaged: {type(error).__name__}: {error}") from error
        self._load_more(state)
        self.module.load_state_dict(model)
        self.optimizer.state.clear()
        if step is not None:
            self.optimizer.state[self.flat.vector] = {
                "step": step.detach().clone().to(self.device),
                **{key: moment.detach().clone().to(self.device) for key, moment in moments.items()},
            }
        if first_lr != self._lr:  # arguments of the constructor are no part of the state
            logger.warning(
                "%s: the saved run began with lr=%g; this one continues with its own, lr=%g", name, first_lr, self._lr
            )
            lr = self._lr
        self.optimizer.param_groups[0]["lr"] = lr
        self.generator.set_state(generator_state)
        self.n_updates = n_updates


def _check_fits(model: Mapping[str, Tensor], module: nn.Module, name: str) -> None:
    have = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    given = {key: tuple(tensor.shape) for key, tensor in model.items()}
    if have != given:
        differ = sorted(key for key in have.keys() | given.keys() if have.get(key) != given.get(key))
        shown = ", ".join(f"{key}: saved {given.get(key)}, wanted {have.get(key)}" for key in differ[:4])
        raise CheckpointError(
            f"the saved weights do not fit the network of {name}: {shown}; make it with the same network and spaces"
        )


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the weights in a file that `torch.save` wrote, by name.

    The file may hold the state of a module, a policy or a trainer. No code in it is run. Raise CheckpointError if the
    file cannot be read or holds no weights.
    """
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"weight_file {path} cannot be read as plain weights: {type(error).__name__}: {error}"
        ) from error
    for key in ("vessel", "policy", "model"):  # a trainer's state holds a vessel's, that a policy's, that a model's
        if is_object(found) and is_object(found.get(key)):
            found = found[key]
    if not is_object(found) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"weight_file {path} holds no weights by name; save a state_dict() with torch.save")
    return found


def _set_weights(module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Load weights into a module. Raise ConfigError, which names the file, if they do not fit."""
    try:
        _check_fits(weights, module, where)
    except CheckpointError as error:
        raise ConfigError(f"weight_file {where}: {error}") from error
    module.load_state_dict(weights)
