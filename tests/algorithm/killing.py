"""A search for a prompt in a process that is killed and resumed, against an upstream that counts in the test's process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from leyden.testing import FakeUpstream

ROOT = Path(__file__).parents[2]
SECONDS = 100_000.0
"""The time budget of the programs: it is counted, and not reached."""


@dataclass
class Asked:
    """What the upstream was asked."""

    reply: Callable[[dict[str, Any]], Any]
    tasks: int = 0
    moments: list[float] = field(default_factory=list[float])
    """When each request came."""
    reflections: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """Time and text of each request for a critique or a prompt."""

    def __call__(self, body: dict[str, Any]) -> Any:
        self.moments.append(time.monotonic())
        conversation = "\n".join(str(message["content"]) for message in body["messages"])
        if "<prompt>" in conversation or "new instruction" in conversation:
            self.reflections.append((time.monotonic(), conversation))
        else:
            self.tasks += 1
        return self.reply(body)

    @property
    def total(self) -> int:
        return self.tasks + len(self.reflections)


@dataclass
class Search:
    """A run in a folder. program: a module that takes RUN_DIR PORT BUDGET [resume]."""

    directory: Path
    program: ModuleType
    upstream: FakeUpstream
    asked: Asked
    budget: int
    kills: list[float] = field(default_factory=list[float])
    """When it was killed."""
    worked_seconds: float = 0.0
    """How long the killed processes worked, from their first request to their last one."""
    last_seconds: float = 0.0
    """How long the process worked that was not killed."""

    async def start(self) -> asyncio.subprocess.Process:
        """Start the program, or continue it."""
        port = self.upstream.endpoint.rpartition(":")[2].removesuffix("/v1")
        again = ["resume"] if (self.directory / "run.json").exists() else []
        program = str(Path(str(self.program.__file__)))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, program, str(self.directory), port, str(self.budget), *again),
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def finish(self) -> str:
        """Run it to its end, and return the template that it prints."""
        before = len(self.asked.moments)
        process = await self.start()
        printed, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, errors.decode()
        own = self.asked.moments[before:]
        self.last_seconds = own[-1] - own[0]
        return json.loads(printed)["template"]

    async def kill_at(self, *, requests: int | None = None, seconds: float | None = None) -> None:
        """Start it, and kill it when the upstream was asked so often in all, or after some seconds."""
        before, began = self.asked.total, time.monotonic()
        process = await self.start()
        ended = asyncio.ensure_future(process.communicate())
        async with asyncio.timeout(120):
            while not ended.done():
                if requests is not None and self.asked.total > max(before, requests - 1):
                    break
                if seconds is not None and time.monotonic() - began >= seconds:
                    break
                await asyncio.sleep(0.002)
        if ended.done():
            raise AssertionError(f"it ended before the kill, with {process.returncode}: {(await ended)[1].decode()}")
        os.killpg(process.pid, signal.SIGKILL)
        self.kills.append(time.monotonic())
        own = self.asked.moments[before:]
        self.worked_seconds += own[-1] - own[0] if own else 0.0
        await ended

    # ---- what it left --------------------------------------------------------------------------------------------------

    def read(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query of its store."""
        with sqlite3.connect(self.directory / "store.sqlite") as database:
            return database.execute(query).fetchall()

    def rollouts(self) -> set[str]:
        """Return the rollouts that it has requested."""
        return {rollout for (rollout,) in self.read("SELECT rollout_id FROM rollouts WHERE run IS NOT NULL")}

    def reflections(self) -> list[str]:
        """Return the places of the answers that it has kept."""
        lines = (self.directory / "reflections.jsonl").read_text().splitlines()
        return [json.loads(line)["place"] for line in lines]

    def metrics(self, *, budget: bool = True) -> list[dict[str, Any]]:
        """Return the rows of its metrics, without times. budget: with what was left of it.

        `rollouts` counts scores: once or twice if two branches write the same prompt, whichever is measured first.
        """
        left_out = ("seconds", "rollouts") if budget else ("seconds", "rollouts", "budget")
        return [
            {
                name: value
                for name, value in row.items()
                if (name == "budget_rollouts_left" and budget) or not any(each in name for each in left_out)
            }
            for row in self._rows()
        ]

    def used_seconds(self) -> float:
        """Return what it has used of its time budget."""
        return SECONDS - [row["budget_seconds_left"] for row in self._rows() if "budget_seconds_left" in row][-1]

    def _rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


async def kill_at_random(search: Search, kills: int, total: int, seed: int) -> None:
    """Kill a search so often, at random points of its first four fifths and some of them while it starts.

    total: the requests of the whole search.
    """
    chance = random.Random(seed)
    points: list[int | None] = sorted(chance.randint(1, 4 * total // 5) for _ in range(kills - kills // 4))
    for _ in range(kills // 4):
        points.insert(chance.randint(0, len(points)), None)
    for point in points:
        if point is None:
            await search.kill_at(seconds=chance.uniform(0.0, 1.5))
        else:
            await search.kill_at(requests=point)
