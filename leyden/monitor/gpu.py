"""How busy and how full this machine's NVIDIA GPUs are, asked of the driver's own library: no package, no process for each question.

It knows the few calls of NVML that this takes. Without a driver there are no figures, and that is no error.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

__all__ = ["gpu_figures"]


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_figures() -> Mapping[str, float]:
    """`gpu_percent` and `gpu_memory_percent`, each of the GPU where it is highest; nothing where there is none, or it does not say.

    Of several GPUs only those that CUDA_VISIBLE_DEVICES lets this process see.
    """
    highest: dict[str, float] = {}
    for device in _visible():
        for name, value in _figures_of(device):
            highest[name] = max(value, highest.get(name, 0.0))
    return highest


def _figures_of(device: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
    utilization, memory = _Utilization(), _Memory()
    if _call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilization)):
        yield "gpu_percent", float(utilization.gpu)
    if _call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)) and memory.total:
        yield "gpu_memory_percent", 100.0 * memory.used / memory.total


def _visible() -> Iterator[ctypes.c_void_p]:
    if _library() is None:
        return
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        count = ctypes.c_uint()
        names = (
            [str(index) for index in range(count.value)] if _call("nvmlDeviceGetCount_v2", ctypes.byref(count)) else []
        )
    else:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        device = ctypes.c_void_p()
        if name.isdigit():
            found = _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(device))
        else:
            found = _call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(device))
        if found:
            yield device


def _call(function: str, *arguments: Any) -> bool:
    """Whether it could be done; a device may not support a question (MIG)."""
    return getattr(_library(), function)(*arguments) == 0


@cache
def _library() -> Any:
    """NVML, ready to be asked; None without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
