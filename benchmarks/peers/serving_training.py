"""Training beside serving, in the serving benchmark: gradient steps on all cores, started as `ContinualLearning` starts it.

    python serving_training.py

Commands come as lines of JSON on the standard input, each is answered by one line on the standard output:

    {"do": "start"}    a process of its own with the default `Limits`: the answer comes when it trains
    {"do": "stop"}     ends it: the number of steps
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WIDTH, ROWS = 512, 256
EVERY_SECONDS = 0.05


@dataclass
class Steps:
    """Gradient steps of a small network without an end; a file gets a byte for each."""

    path: str

    async def run(self):
        import torch

        network = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        optimiser, rows = torch.optim.Adam(network.parameters()), torch.randn(ROWS, WIDTH)
        with Path(self.path).open("ab", buffering=0) as steps:  # noqa: ASYNC230 -- nothing else runs in this loop
            while True:
                optimiser.zero_grad()
                (network(rows) - rows).square().mean().backward()
                optimiser.step()
                steps.write(b".")
                await asyncio.sleep(0)

    async def cost(self):
        return 0.0


class Training:
    """At most one training."""

    def __init__(self, folder):
        self._steps = Path(folder) / "steps"
        self._running = None
        self._number = 0
        self._goes_on = True

    async def start(self):
        from leyden.serving.continual.isolation import Limits, run_isolated

        self._goes_on, self._number = True, self._number + 1
        self._steps.write_bytes(b"")
        job, folder = Steps(str(self._steps)), self._steps.parent
        name = f"training-{self._number}"
        work = run_isolated(job, folder, name=name, limits=Limits(), cost_left=None, go_on=self._go_on)
        self._running = asyncio.create_task(work)
        while not self._steps.stat().st_size:
            await asyncio.sleep(EVERY_SECONDS)
            if self._running.done():
                raise SystemExit(f"the training has ended: {self._running.exception()}")
        return {}

    async def stop(self):
        self._goes_on = False
        await self._running
        return {"steps": self._steps.stat().st_size}

    async def _go_on(self):
        await asyncio.sleep(EVERY_SECONDS)
        return self._goes_on


async def main():
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="leyden-bench-") as folder:
        training = Training(folder)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            print(json.dumps(await getattr(training, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
