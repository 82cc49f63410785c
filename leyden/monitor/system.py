"""What a machine and a process are doing, as figures: CPU, memory, disk, I/O, network, GPU.

It knows psutil and the GPU driver, no store and no rule. A figure is in `FIGURES`, with what it means; to add one, add it there and to
`SystemProbe.read`. Reading all of them takes a fraction of a millisecond.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from leyden.monitor.gpu import gpu_figures

FIGURES: Final[Mapping[str, str]] = {
    "cpu_percent": "How busy the machine's CPUs are, all cores together.",
    "memory_percent": "How much of the machine's memory is in use.",
    "disk_free_percent": "How much of the disk is free on which the process works.",
    "io_seconds": "How long a read or a write of the machine's disks took on average.",
    "network_bytes_per_second": "What the machine sent and received.",
    "gpu_percent": "How busy the busiest GPU is that the process sees.",
    "gpu_memory_percent": "How full the fullest GPU is that the process sees.",
    "gpu_device_percent": "How busy one GPU is.",
    "gpu_device_memory_used_bytes": "How much of its memory is in use.",
    "gpu_device_memory_total_bytes": "How much memory it has.",
    "gpu_device_temperature_celsius": "How warm its chip is.",
    "process_cpu_percent": "CPU time of the process; 100 is one core.",
    "process_rss_bytes": "Resident memory of the process.",
}
"""The numbers that `SystemProbe.read` returns. `gpu_device_*` end with a colon and the GPU's index.
"""

MACHINE_FIGURES: Final = frozenset(
    {"cpu_percent", "memory_percent", "disk_free_percent", "io_seconds", "network_bytes_per_second"}
)
"""Those that are the same for every process of a machine."""


class SystemProbe:
    """Reads the figures of this machine and this process; those that are rates are of the time since the last `read`.

    directory: on the disk whose room is of interest.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = str(directory or Path.cwd())
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._before: tuple[float, tuple[float, float], tuple[int, int], int] | None = None
        self._who = {"host": host_name(), "pid": os.getpid(), "process_start_time": self._process.create_time()}
        self._note()

    def read(self) -> dict[str, float | int | str]:
        """The figures by name (see FIGURES), with `host`, `pid` and `process_start_time` (Unix seconds). What the system does not
        tell is left out.
        """
        figures: dict[str, float | int | str] = dict(self._who)
        figures["memory_percent"] = psutil.virtual_memory().percent
        figures["process_cpu_percent"] = self._process.cpu_percent()
        figures["process_rss_bytes"] = self._process.memory_info().rss
        try:
            figures["disk_free_percent"] = 100.0 - psutil.disk_usage(self._directory).percent
        except OSError:
            pass  # it was removed
        return {**figures, **self._rates(), **gpu_figures()}

    def _rates(self) -> dict[str, float]:
        before, now = self._before, self._note()
        assert before is not None
        rates: dict[str, float] = {}
        seconds, total = now[0] - before[0], now[1][1] - before[1][1]
        if total > 0:
            rates["cpu_percent"] = min(100.0, max(0.0, 100.0 * (now[1][0] - before[1][0]) / total))
        if (operations := now[2][1] - before[2][1]) > 0:
            rates["io_seconds"] = max(0.0, (now[2][0] - before[2][0]) / 1000 / operations)
        if seconds > 0:
            rates["network_bytes_per_second"] = max(0.0, (now[3] - before[3]) / seconds)
        return rates

    def _note(self) -> tuple[float, tuple[float, float], tuple[int, int], int]:
        """The moment; CPU seconds, busy and in all; milliseconds and number of disk operations; bytes over the network.

        Not `psutil.cpu_percent()`: it counts from whoever asked last in this process.
        """
        cpu, disk, network = psutil.cpu_times(), psutil.disk_io_counters(), psutil.net_io_counters()
        total = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)  # they are in `user` too
        busy = total - cpu.idle - getattr(cpu, "iowait", 0.0)
        spent = (0, 0) if disk is None else (disk.read_time + disk.write_time, disk.read_count + disk.write_count)
        moved = network.bytes_sent + network.bytes_recv
        self._before = time.monotonic(), (busy, total), spent, moved
        return self._before


def host_name() -> str:
    """How this machine is called in heartbeats."""
    return socket.gethostname()
