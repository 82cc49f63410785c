"""A vessel that is nothing but numbers: a random walk whose every step depends on the one before and on two random generators."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

MEMORY_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where tests that sync many files put them: a kill loses no page cache, so fsync only costs time there. None: the usual place."""


class ToyVessel:
    """Step k moves `weight`; from step 3 on there is one metric more, so that a column appears late."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.weight = 0.0
        self.steps: list[int] = []

    def step(self, iteration: int) -> dict[str, Any]:
        self.weight = 0.9 * self.weight + self.random.gauss(0, 1) + 0.1 * random.random()
        self.steps.append(iteration)
        metrics: dict[str, Any] = {"reward": self.weight, "note": 'a "b", c\nd'}
        if iteration >= 3:
            metrics["late"] = iteration / 3
        return metrics

    def validate(self, iteration: int) -> dict[str, Any]:
        return {"reward": -self.weight, "after": iteration}

    def save(self, path: Path) -> None:
        version, internal, gauss = self.random.getstate()
        state = {"weight": self.weight, "steps": self.steps, "random": [version, list(internal), gauss]}
        (path / "toy.json").write_text(json.dumps(state))

    def load(self, path: Path) -> None:
        state = json.loads((path / "toy.json").read_text())
        self.weight, self.steps = state["weight"], state["steps"]
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))


class AsyncToyVessel:
    """The same, as coroutines."""

    def __init__(self, seed: int = 0) -> None:
        self.toy = ToyVessel(seed)

    async def step(self, iteration: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.toy.step(iteration)

    async def validate(self, iteration: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.toy.validate(iteration)

    async def save(self, path: Path) -> None:
        await asyncio.sleep(0)
        self.toy.save(path)

    async def load(self, path: Path) -> None:
        await asyncio.sleep(0)
        self.toy.load(path)
