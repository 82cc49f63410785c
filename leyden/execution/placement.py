"""Check and share out the CPUs and GPUs that each runner's process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from leyden._lib.options import check_number
from leyden.errors import ConfigError

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that a process sees."""


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


def share_out_gpus(gpus_per_runner: int | None, n_runners: int) -> list[str] | None:
    """Return the value of CUDA_VISIBLE_DEVICES for each runner, or None to leave it unchanged.

    Raise ConfigError if there are too few GPUs.
    """
    check_number("gpus_per_runner", gpus_per_runner, at_least=1, whole=True, or_none="all of them")
    if gpus_per_runner is None:
        return None
    visible = _visible_gpus()
    if len(visible) < n_runners * gpus_per_runner:
        raise ConfigError(
            f"gpus_per_runner={gpus_per_runner} for {n_runners} runners needs {n_runners * gpus_per_runner} GPUs, and there are "
            f"{len(visible)}; ask for fewer"
        )
    return [
        ",".join(visible[worker_id * gpus_per_runner : (worker_id + 1) * gpus_per_runner])
        for worker_id in range(n_runners)
    ]


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them: from the variable if it is set, else
    all of /dev.
    """
    chosen = os.environ.get(CUDA_DEVICES)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    devices = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((name for name in devices if name.isdigit()), key=int)
