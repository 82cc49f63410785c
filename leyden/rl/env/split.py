"""How environments are divided among workers."""

from __future__ import annotations

import os

from leyden.errors import ConfigError


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(wanted: int | None, n_envs: int, default: int) -> int:
    """Workers for so many environments; never more than there are of these. Raises ConfigError below 1."""
    if wanted is not None and wanted < 1:
        raise ConfigError(f"workers={wanted}; at least one is needed")
    return min(default if wanted is None else wanted, n_envs)


def split(n_envs: int, n_workers: int) -> list[range]:
    """Consecutive numbers of environments for each worker, as even as can be."""
    sizes = [n_envs // n_workers + (worker < n_envs % n_workers) for worker in range(n_workers)]
    starts = [sum(sizes[:worker]) for worker in range(n_workers)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
