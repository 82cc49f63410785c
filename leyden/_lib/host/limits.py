"""Limits of child processes: CPUs, GPUs, memory, CPU time and priority.

The parent checks and shares out what there is. The child applies a `ResourceLimits` to itself, before its work, and the
processes that it starts inherit them.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from leyden._lib.options import check_number
from leyden.errors import ConfigError

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that a process sees."""
_RESERVE_BYTES = 16 * 2**20
_HARD_SECONDS = 10
"""Seconds of CPU time that a process beyond its limit gets to exit, before the kernel kills it."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits that a child process sets for itself and for the processes that it starts. None: no limit."""

    cpus: Sequence[int] | None = None
    """The CPUs to bind the process to."""
    memory_bytes: int | None = None
    """The memory that each process may allocate (RLIMIT_DATA)."""
    cpu_seconds: float | None = None
    """The CPU time that each process may use (RLIMIT_CPU)."""
    nice: int | None = None
    """How much lower the priority is, from 0 to 19."""

    def apply(self, on_cpu_limit: Callable[[int], object] = lambda seconds: None) -> bytearray:
        """Apply the limits to this process.

        on_cpu_limit: called, with the limit, when this process has used `cpu_seconds`, which then exits with code 1.
        Return memory that was allocated before there was a limit. Delete it to have room for a report on a MemoryError.
        It is not resident, because nothing is written to it.
        """
        reserve = bytearray(0 if self.memory_bytes is None else _RESERVE_BYTES)
        if self.nice is not None:
            # Linux may divide the CPU time among sessions first (autogroups), and `nice` then counts only within a
            # session. So this process begins a session, which gets the same priority.
            os.nice(self.nice)
            with contextlib.suppress(OSError):  # no autogroups, or it leads a session already
                os.setsid()
                Path(f"/proc/{os.getpid()}/autogroup").write_text(str(self.nice))
        if self.cpus is not None:
            os.sched_setaffinity(0, self.cpus)
        if self.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))
        if self.cpu_seconds is not None:
            seconds = max(1, round(self.cpu_seconds))

            def end(number: int, frame: FrameType | None) -> None:
                on_cpu_limit(seconds)
                os._exit(1)

            signal.signal(signal.SIGXCPU, end)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + _HARD_SECONDS))
        return reserve


def memory_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the memory that this process can ever have, and how much of it is free now, in bytes: of the machine, or
    of the narrowest control group (version 1 or 2) around the process.
    """
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    with contextlib.suppress(OSError):  # no control groups
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = groups / controllers
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            group = root / path.lstrip("/")
            for each in (group, *group.parents):
                if not each.is_relative_to(root):
                    break
                with contextlib.suppress(
                    OSError, ValueError
                ):  # a group without a limit, or out of sight in a container
                    limit, used = (int((each / name).read_text()) for name in names)
                    cache = re.search(r"^(?:total_)?inactive_file (\d+)", (each / "memory.stat").read_text(), re.M)
                    total = min(total, limit)
                    free = min(free, limit - used + (int(cache[1]) if cache else 0))
    return total, max(0, free)


def check_cpus(cpu_affinity: Sequence[Sequence[int]] | None, n_runners: int) -> None:
    """Raise ConfigError unless `cpu_affinity` is None, or has a list of usable CPUs for each runner."""
    if cpu_affinity is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cpu_affinity is set, but this system binds no process to a CPU; leave it out")
    if not isinstance(cpu_affinity, Sequence) or not all(isinstance(cpus, Sequence) for cpus in cpu_affinity):
        raise ConfigError(
            f"cpu_affinity is {cpu_affinity!r}; give a list of CPUs for each runner, as in [[0, 1], [2, 3]]"
        )
    if len(cpu_affinity) != n_runners:
        raise ConfigError(
            f"cpu_affinity has {len(cpu_affinity)} lists of CPUs for {n_runners} runners; give one for each"
        )
    allowed = os.sched_getaffinity(0)
    for worker_id, cpus in enumerate(cpu_affinity):
        if not cpus or not allowed.issuperset(cpus):
            raise ConfigError(f"cpu_affinity[{worker_id}] is {list(cpus)}; possible: one or more of {sorted(allowed)}")


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees: those of CUDA_VISIBLE_DEVICES if it is set, else all of /dev."""
    chosen = os.environ.get(CUDA_DEVICES)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    devices = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((name for name in devices if name.isdigit()), key=int)


def share_out_gpus(gpus_per_runner: int | None, n_runners: int) -> list[str] | None:
    """Return the value of CUDA_VISIBLE_DEVICES for each runner, or None to leave it unchanged. The GPUs are those that
    this process sees: those of the variable if it is set, else all of /dev.

    Raise ConfigError if there are too few GPUs.
    """
    check_number("gpus_per_runner", gpus_per_runner, at_least=1, whole=True, or_none="all of them")
    if gpus_per_runner is None:
        return None
    visible = visible_gpus()
    if len(visible) < n_runners * gpus_per_runner:
        raise ConfigError(
            f"gpus_per_runner={gpus_per_runner} for {n_runners} runners needs {n_runners * gpus_per_runner} GPUs, and there are "
            f"{len(visible)}; ask for fewer"
        )
    return [
        ",".join(visible[worker_id * gpus_per_runner : (worker_id + 1) * gpus_per_runner])
        for worker_id in range(n_runners)
    ]
