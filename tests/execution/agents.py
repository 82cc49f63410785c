"""Agents for the strategies, at the top of a module: they travel by name."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import leyden as ly


@ly.rollout
async def double(task: int) -> float:
    """An async agent."""
    return 2.0 * task


@ly.rollout
def triple(task: int) -> float:
    """A sync agent."""
    return 3.0 * task


@ly.rollout
async def picky(task: int) -> float:
    """It raises on odd tasks."""
    if task % 2:
        raise ValueError(f"task {task} is odd")
    return float(task)


@ly.rollout
def die_once(task: str) -> float:
    """It ends its process unless the file that the task names is there."""
    marker = Path(task)
    if not marker.exists():
        marker.touch()
        os._exit(3)
    return 1.0


@ly.rollout
async def nap(task: int) -> float:
    """It takes a moment."""
    await asyncio.sleep(0.1)
    return float(task)


@ly.rollout
async def wait_a_second(task: int) -> float:
    """It waits, as agents do."""
    await asyncio.sleep(1.0)
    return float(task)


@ly.rollout
async def where(task: float) -> float:
    """It takes as many seconds as the task says; its reward is the process that it ran in."""
    await asyncio.sleep(task)
    return float(os.getpid())


@ly.rollout
async def die(task: int) -> float:
    """It ends its process, always."""
    os._exit(3)


class Method(ly.LitAgent[int]):
    """An agent as a class."""

    def rollout(self, task: int, resources: ly.NamedResources, rollout: ly.AttemptedRollout) -> float:
        return 4.0 * task


class Noting(ly.Hook):
    """Notes each attempt in a file, with the process it ran in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def on_rollout_end(
        self, *, agent: object, runner: object, rollout: ly.AttemptedRollout, spans: object
    ) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Broken(ly.Hook):
    """It cannot be made anew in another process."""

    def __init__(self) -> None:
        self.name = "broken"

    def __setstate__(self, state: object) -> None:
        raise ZeroDivisionError("made anew")
