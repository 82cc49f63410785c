"""Read load, memory and temperature of NVIDIA GPUs from the driver's library, NVML, with the extra `gpu`.

Without that extra or without a driver there are no metrics, and no error is raised.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any


def gpu_metrics() -> Mapping[str, float]:
    """Return the metrics of the GPUs that CUDA_VISIBLE_DEVICES shows to this process; empty without a GPU.

    `gpu_percent` and `gpu_memory_percent` are maxima over the GPUs. Metrics of one GPU carry its index in the machine:
    `gpu_device_percent:0`. Values that a GPU does not report are left out.
    """
    metrics: dict[str, float] = {}
    for position, device in enumerate(_visible()):
        index = _read("nvmlDeviceGetIndex", device)
        own: dict[str, float] = {}
        if (utilization := _read("nvmlDeviceGetUtilizationRates", device)) is not None:
            own["percent"] = float(utilization.gpu)
        if (memory := _read("nvmlDeviceGetMemoryInfo", device)) is not None:
            own |= {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}
        if (celsius := _read("nvmlDeviceGetTemperature", device, 0)) is not None:  # 0: the sensor on the chip
            own["temperature_celsius"] = float(celsius)
        for name, value in own.items():
            metrics[f"gpu_device_{name}:{position if index is None else index}"] = value
        if total := own.get("memory_total_bytes"):
            own["memory_percent"] = 100.0 * own["memory_used_bytes"] / total
        for name in own.keys() & {"percent", "memory_percent"}:  # the fullest and the busiest GPU so far
            metrics[f"gpu_{name}"] = max(own[name], metrics.get(f"gpu_{name}", 0.0))
    return metrics


def _visible() -> Iterator[Any]:
    """Yield the NVML handles of the GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES."""
    if _nvml() is None:
        return
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(_read("nvmlDeviceGetCount") or 0)) if wanted is None else map(str.strip, wanted.split(","))
    for name in filter(None, names):
        if name.isdigit():
            device = _read("nvmlDeviceGetHandleByIndex", int(name))
        else:
            device = _read("nvmlDeviceGetHandleByUUID", name)
        if device is not None:
            yield device


def _read(function: str, *arguments: Any) -> Any:
    """Return what an NVML function returns; None if the driver or the GPU does not support it."""
    nvml = _nvml()
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    """Load and initialise NVML. Return None without the package or a driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
