"""Save the accelerator's memory in training: recognise errors that mean that memory ran out, and
keep optimizer state in the CPU's memory.

The module knows exceptions, tensors and optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")
"""Parts of the messages of a RuntimeError, in lower case, by which torch reports a failed
allocation."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that an allocation failed, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)


def free_cached_memory() -> None:
    """Free the accelerator's memory that torch caches for later allocations."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class OffloadedOptimizer:
    """Keeps an optimizer's moments, and tensors that only the optimizer reads, in the CPU's memory
    between two steps.

    Call `load` before a step and `store` after it. On the CPU both do nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], device: torch.device) -> None:
        """masters: tensors that only the optimizer reads, such as float32 copies of weights.
        device: the accelerator on which steps are taken.
        """
        self._optimizer, self._masters, self._device = optimizer, masters, device

    def load(self) -> None:
        """Move the moments and masters to the accelerator, before a step."""
        self._move(self._device)

    def store(self) -> None:
        """Move the moments and masters to the CPU, and free the accelerator's memory."""
        self._move(torch.device("cpu"))
        if self._device.type != "cpu":
            free_cached_memory()

    def _move(self, device: torch.device) -> None:
        """Move the master weights and the optimizer's moments to a device."""
        for master in self._masters:
            master.data = master.data.to(device)
        for state in cast("list[dict[str, Any]]", list(self._optimizer.state.values())):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
