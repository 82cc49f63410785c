"""Save the accelerator's memory in training: recognise errors that mean that memory ran out, and move optimizer state.

The module knows exceptions, tensors and optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")
"""Parts of the messages of a RuntimeError, in lower case, by which torch reports a failed allocation."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that an allocation failed, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)


def free_cached_memory() -> None:
    """Free the accelerator's memory that torch caches for later allocations."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def move_optimizer(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[Tensor],
    device: torch.device,
    pinned: dict[tuple[Tensor, str], Tensor],
) -> None:
    """Move an optimizer's moments, and tensors that only the optimizer reads (`masters`, such as float32 copies of
    weights), to a device.

    pinned: the memory of the CPU for each of them, by parameter and name. The first move to the CPU fills it and later
        ones use it again: an accelerator copies ten times faster to memory that is pinned and not allocated anew.
    """
    for master in masters:
        master.data = _moved(master.data, device, pinned, (master, ""))
    for parameter, state in cast("dict[Tensor, dict[str, Any]]", optimizer.state).items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = _moved(value, device, pinned, (parameter, name))
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()  # the host may read them now


def _moved(
    tensor: Tensor, device: torch.device, pinned: dict[tuple[Tensor, str], Tensor], key: tuple[Tensor, str]
) -> Tensor:
    if tensor.device == device or device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    held = pinned.get(key)
    if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
        try:
            held = torch.empty_like(tensor, device=device, pin_memory=tensor.device.type == "cuda")
        except RuntimeError:  # the system pins no more
            held = torch.empty_like(tensor, device=device)
        pinned[key] = held
    return held.copy_(tensor, non_blocking=True)
