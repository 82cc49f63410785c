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


def move_optimizer(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], device: torch.device) -> None:
    """Move an optimizer's moments, and tensors that only the optimizer reads (`masters`, such as float32 copies of
    weights), to a device.
    """
    for master in masters:
        master.data = master.data.to(device)
    for state in cast("list[dict[str, Any]]", list(optimizer.state.values())):
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device)
