"""Read load, memory and temperature of NVIDIA GPUs from the driver's library, NVML.

The library is called by ctypes, so neither a package nor `nvidia-smi` is needed. Without a driver there are no metrics,
and no error is raised.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

_CHIP_SENSOR = 0
"""NVML_TEMPERATURE_GPU, the sensor on the chip."""


class _Utilization(ctypes.Structure):
    """NVML's nvmlUtilization_t: percentages."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_metrics() -> Mapping[str, float]:
    """Return the metrics of the GPUs that CUDA_VISIBLE_DEVICES shows to this process; empty without a GPU.

    `gpu_percent` and `gpu_memory_percent` are maxima over the GPUs. Metrics of one GPU carry its index in the machine:
    `gpu_device_percent:0`. Values that a GPU does not report are left out.
    """
    metrics: dict[str, float] = {}
    for position, device in enumerate(_visible()):
        number = ctypes.c_uint()
        index = number.value if _call("nvmlDeviceGetIndex", device, ctypes.byref(number)) else position
        own = dict(_device_metrics(device))
        metrics |= {f"gpu_device_{name}:{index}": value for name, value in own.items()}
        if total := own.get("memory_total_bytes"):
            own["memory_percent"] = 100.0 * own["memory_used_bytes"] / total
        for name in own.keys() & {"percent", "memory_percent"}:  # the fullest and the busiest GPU so far
            metrics[f"gpu_{name}"] = max(own[name], metrics.get(f"gpu_{name}", 0.0))
    return metrics


def _device_metrics(device: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
    """Yield name and value of each metric that a GPU reports."""
    utilization, memory, celsius = _Utilization(), _Memory(), ctypes.c_uint()
    if _call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilization)):
        yield "percent", float(utilization.gpu)
    if _call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
        yield "memory_used_bytes", float(memory.used)
        yield "memory_total_bytes", float(memory.total)
    if _call("nvmlDeviceGetTemperature", device, ctypes.c_uint(_CHIP_SENSOR), ctypes.byref(celsius)):
        yield "temperature_celsius", float(celsius.value)


def _visible() -> Iterator[ctypes.c_void_p]:
    """Yield the NVML handles of the GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES."""
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
    return getattr(_library(), function)(*arguments) == 0


@cache
def _library() -> Any:
    """Load and initialise NVML. Return None without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
