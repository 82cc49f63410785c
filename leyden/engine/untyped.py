"""Typed wrappers of functions that torch and safetensors leave partly untyped.

Each one only forwards its arguments, so that the modules of the engine need no type ignores. Add a function here if the
type checker cannot read one of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch import Tensor

_safetensors: Any = safetensors.torch
_checkpoint: Any = torch.utils.checkpoint
_graph: Any = torch.autograd.graph


def listed(tensor: Tensor) -> list[Any]:
    """Return the values of a tensor as a list, nested like its shape."""
    return cast(Any, tensor).tolist()


def backward(loss: Tensor, inputs: list[Tensor] | None) -> None:
    """Add the gradient of a scalar to `inputs`; to all leaves that require one if None."""
    cast(Any, loss).backward(inputs=inputs)


def after_gradient(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the parameter each time a gradient has been added to it."""
    cast(Any, parameter).register_post_accumulate_grad_hook(hook)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Take one step of the optimizer.

    Count it as a change of each parameter, as `changes` returns it; a fused step does not.
    """
    cast(Any, optimizer).step()
    _graph.increment_version([each for group in optimizer.param_groups for each in group["params"]])


def changes(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's memory is and how often it was written to, as torch counts it."""
    return tensor.data_ptr(), cast(Any, tensor)._version


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return the outputs of an autograd function."""
    return cast(Any, function).apply(*arguments)


def checkpointed(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return `function(*arguments, **named)`, which is run again for its gradient.

    Random state is not restored, because dropout is off.
    """
    return _checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


def load_tensors(path: Path) -> dict[str, Tensor]:
    return _safetensors.load_file(path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    _safetensors.save_file(tensors, path)
