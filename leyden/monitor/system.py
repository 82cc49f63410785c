"""Measure a machine and a process: CPU, memory, disk, I/O, network, GPU.

It knows psutil and the GPU driver, and neither store nor rules. Reading all metrics takes a fraction of a millisecond.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from leyden.monitor.gpu import gpu_metrics


class SystemProbe:
    """Reads the metrics of this machine and this process. Rates are averages since the last `read`.

    directory: a place on the disk whose free space is measured; None: the working directory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = str(directory or Path.cwd())
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call returns 0 and begins the measurement
        self._identity = {"host": host_name(), "pid": os.getpid(), "process_start_time": self._process.create_time()}
        self._before = _read_counters()

    def read(self) -> dict[str, float | int | str]:
        """Return the metrics of SYSTEM_METRICS by name, as far as the system reports them.

        `host`, `pid` and `process_start_time` (Unix seconds) are added, because they identify the process.
        """
        metrics: dict[str, float | int | str] = dict(self._identity)
        metrics["memory_percent"] = psutil.virtual_memory().percent
        metrics["process_cpu_percent"] = self._process.cpu_percent()
        metrics["process_rss_bytes"] = self._process.memory_info().rss
        try:
            metrics["disk_free_percent"] = 100.0 - psutil.disk_usage(self._directory).percent
        except OSError:
            pass  # the directory was removed
        return {**metrics, **self._rates(), **gpu_metrics()}

    def _rates(self) -> dict[str, float]:
        """Return the averages since the last call, without those over no time or no operations."""
        before, now = self._before, _read_counters()
        self._before = now
        rates: dict[str, float] = {}
        if (total := now.cpu_total - before.cpu_total) > 0:
            rates["cpu_percent"] = min(100.0, max(0.0, 100.0 * (now.cpu_busy - before.cpu_busy) / total))
        if (operations := now.disk_operations - before.disk_operations) > 0:
            rates["io_seconds"] = max(0.0, (now.disk_milliseconds - before.disk_milliseconds) / 1000 / operations)
        if (seconds := now.seconds - before.seconds) > 0:
            rates["network_bytes_per_second"] = max(0.0, (now.network_bytes - before.network_bytes) / seconds)
        return rates


class _Counters(NamedTuple):
    """Counters of the machine at one moment, from which rates are computed."""

    seconds: float
    cpu_busy: float
    cpu_total: float
    disk_milliseconds: int
    disk_operations: int
    network_bytes: int


def _read_counters() -> _Counters:
    """Read the machine's running totals, whose differences give the load between two reads."""
    # Not `psutil.cpu_percent()`, which measures since any caller's last call in this process.
    cpu, disk, network = psutil.cpu_times(), psutil.disk_io_counters(), psutil.net_io_counters()
    total = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)  # `user` includes them
    return _Counters(
        seconds=time.monotonic(),
        cpu_busy=total - cpu.idle - getattr(cpu, "iowait", 0.0),
        cpu_total=total,
        disk_milliseconds=0 if disk is None else disk.read_time + disk.write_time,
        disk_operations=0 if disk is None else disk.read_count + disk.write_count,
        network_bytes=network.bytes_sent + network.bytes_recv,
    )


def host_name() -> str:
    return socket.gethostname()
