"""Memory of training: errors that mean it ran out, and optimizer state kept out of the
accelerator's.

It knows exceptions, tensors and optimizers; not what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in _MESSAGES)


def free_cached_memory() -> None:
    """Return what torch holds back for later allocations to the accelerator."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class OffloadedOptimizer:
    """Keeps an optimizer's moments, and tensors that only it reads, in the CPU's memory
    between two steps.

    `load` before a step, `store` after it. Weights that sampling reads are not moved. On the
    CPU both do nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], device: torch.device) -> None:
        """
        masters: tensors that nothing but the optimizer reads, such as float32 copies of weights.
        device: the accelerator that steps are taken on.
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
        for master in self._masters:
            master.data = master.data.to(device)
        for state in cast("list[dict[str, Any]]", list(self._optimizer.state.values())):
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
