"""Training beside serving, in the serving benchmark: gradient steps on all cores, started as `ContinualLearning` starts it.

    python serving_training.py

Commands come as lines of JSON on the standard input, each is answered by one line on the standard output:

    {"do": "start", "name": NAME, "limits": {...}}    a process of its own with these `Limits`, which is halted at its first step
    {"do": "resume", "name": NAME}    lets it go on
    {"do": "halt", "name": NAME}    halts it: the number of steps since
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WIDTH, ROWS = 512, 256
EVERY_SECONDS = 0.05


@dataclass
class Steps:
    """Gradient steps of a small network without an end; a file begins with the process's number and gets a byte for each."""

    path: str

    async def run(self):
        import torch

        network = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        optimiser, rows = torch.optim.Adam(network.parameters()), torch.randn(ROWS, WIDTH)
        with Path(self.path).open("ab", buffering=0) as steps:  # noqa: ASYNC230 -- nothing else runs in this loop
            steps.write(f"{os.getpid()}\n".encode())
            while True:
                optimiser.zero_grad()
                (network(rows) - rows).square().mean().backward()
                optimiser.step()
                steps.write(b".")
                await asyncio.sleep(0)

    async def cost(self):
        return 0.0


class Trainings:
    """Trainings by name, of which those that were not resumed are halted."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._running = {}
        self._steps = {}

    async def start(self, *, name, limits):
        from leyden.serving.continual.isolation import Limits, run_isolated

        steps = self._folder / f"{name}-steps"
        steps.touch()
        job = Steps(str(steps))
        work = run_isolated(job, self._folder, name=name, limits=Limits(**limits), cost_left=None, go_on=self._go_on)
        self._running[name] = asyncio.create_task(work)
        while b"." not in steps.read_bytes():
            await asyncio.sleep(EVERY_SECONDS)
            if self._running[name].done():
                raise SystemExit(f"the training has ended: {self._running[name].exception()}")
        return await self.halt(name=name)

    async def resume(self, *, name):
        os.kill(self._pid(name), signal.SIGCONT)
        return {}

    async def halt(self, *, name):
        os.kill(self._pid(name), signal.SIGSTOP)
        before, now = self._steps.get(name, 0), (self._folder / f"{name}-steps").stat().st_size
        self._steps[name] = now
        return {"steps": now - before}

    async def close(self):
        for running in self._running.values():
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _pid(self, name):
        return int((self._folder / f"{name}-steps").read_bytes().partition(b"\n")[0])

    async def _go_on(self):
        await asyncio.sleep(EVERY_SECONDS)
        return True


async def main():
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="leyden-bench-") as folder:
        training = Trainings(folder)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            print(json.dumps(await getattr(training, command.pop("do"))(**command)), flush=True)
        await training.close()


if __name__ == "__main__":
    asyncio.run(main())
