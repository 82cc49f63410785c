"""The process of a training: its priority and its CPUs, also of what it starts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leyden.serving.continual.isolation import Limits, run_isolated

SAY = """
import json, os, pathlib
group = pathlib.Path("/proc/self/autogroup")
print(json.dumps([os.nice(0), group.read_text().split()[-1] if group.exists() else None, len(os.sched_getaffinity(0))]))
"""


@dataclass
class Priority:
    """Reports nice, nice of the session and number of CPUs of a process that it starts."""

    async def run(self) -> Any:
        return json.loads(subprocess.check_output([sys.executable, "-c", SAY]))  # noqa: ASYNC221 -- nothing else runs here

    async def cost(self) -> float:
        return 0.0


def autogroup() -> str | None:
    """Return name and priority of this process's session, if the system shares out CPU time among sessions."""
    file = Path("/proc/self/autogroup")
    return file.read_text() if file.exists() else None


async def go_on() -> bool:
    await asyncio.sleep(0.05)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="sessions with a priority and CPU sets are Linux's")
@pytest.mark.parametrize("limits", [Limits(), Limits(nice=7, cpus=1)])
async def test_a_training_and_what_it_starts_have_the_priority_and_the_cpus_of_its_limits(
    tmp_path: Path, limits: Limits
) -> None:
    before = autogroup()
    found = await run_isolated(Priority(), tmp_path, name="job", limits=limits, cost_left=None, go_on=go_on)
    assert [each for each in os.scandir(tmp_path) if each.is_file() and each.stat().st_mode & 0o077] == []
    n_cpus = len(os.sched_getaffinity(0))
    nice, group_nice, cpus = found
    assert nice == min(19, os.nice(0) + limits.nice)
    assert cpus == (max(1, n_cpus - 1) if limits.cpus is None else limits.cpus)
    if before is not None:
        assert group_nice == str(limits.nice)
        assert autogroup() == before, "the session of this process keeps its priority"
