"""Find out whether a task measures anything: the empty agent fails, the reference solution passes, the tests agree.

A task passes with a reward of 1 and fails with less, as in Harbor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from leyden.errors import LeydenError
from leyden.execution.task_folders.folder import TaskFolder, read_task
from leyden.execution.task_folders.harbor import attempt_folder, solved, tested
from leyden.types import semconv

REPEATS = 3
"""How often the tests run on the reference solution."""


@dataclass(slots=True)
class CheckedTask:
    """What the check of a task has found."""

    task: str
    causes: list[str] = field(default_factory=list[str])
    """Why the task is bad; empty if it is good."""
    empty_reward: float | None = None
    """The reward of an agent that does nothing; None if the tests did not run."""
    solution_rewards: list[float] = field(default_factory=list[float])
    """The rewards of the reference solution."""
    seconds: float = 0.0
    """How long one run of the tests took, on average."""


async def check_tasks(
    paths: list[Path], *, concurrency: int, report: Callable[[CheckedTask], None]
) -> list[CheckedTask]:
    """Check tasks, some at a time, and return the findings in the order of the paths.

    report: called for each task when it is checked.
    """
    room = asyncio.Semaphore(concurrency)

    async def one(path: Path) -> CheckedTask:
        async with room:
            found = await check_task(await asyncio.to_thread(read_task, path))
        report(found)
        return found

    return await asyncio.gather(*map(one, paths))


async def check_task(task: TaskFolder) -> CheckedTask:
    """Check one task. Nothing runs if its files are bad."""
    found = CheckedTask(task.name, list(task.faults))
    if not (task.path / "solution" / "solve.sh").is_file():
        found.causes.append("without a reference solution: there is no solution/solve.sh")
    if found.causes:
        return found
    began = time.monotonic()
    try:
        async with attempt_folder(task) as folder:
            found.empty_reward = (await tested(task, folder))[semconv.PRIMARY_REWARD]
        async with attempt_folder(task) as folder:
            output = await solved(task, folder)
            for _ in range(REPEATS):
                found.solution_rewards.append((await tested(task, folder))[semconv.PRIMARY_REWARD])
    except (LeydenError, OSError) as error:  # OSError: its files went away
        found.causes.append(str(error))
        return found
    found.seconds = (time.monotonic() - began) / (1 + REPEATS)
    rewards = found.solution_rewards
    if found.empty_reward >= 1:
        found.causes.append(f"the empty agent passes, with a reward of {found.empty_reward:g}")
    if len(set(rewards)) > 1:
        found.causes.append(
            f"flaky tests: {REPEATS} runs on one solution gave {', '.join(f'{each:g}' for each in rewards)}"
        )
    elif rewards[0] < 1:
        why = f"; solve.sh ended with {output.exit_code}" if output.exit_code else ""
        found.causes.append(f"the solution fails, with a reward of {rewards[0]:g}{why}")
    return found
