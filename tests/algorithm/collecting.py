"""A search over thirty tasks, to be killed: `python collecting.py DIRECTORY`. It prints each task whose result it has."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import leyden as ly
from leyden._lib.aio import Latch
from leyden.store import SqliteLightningStore


async def main(directory: Path) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        with (directory / "ran").open("a") as file:
            file.write(f"{task}\n")
        await asyncio.sleep(0.02)
        return float(task)

    async with SqliteLightningStore(directory / "store.sqlite") as store:
        await store.release_claims()
        runner, stop = ly.LitAgentRunner[int](concurrency=4), Latch()
        with runner.run_context(agent=agent, store=store):
            work = asyncio.create_task(runner.iter(stop))
            collector = ly.RolloutCollector(store, pin="search")
            requests = [
                ly.EnqueueRolloutRequest(rollout_id=ly.rollout_id_of("search", task), input=task) for task in range(30)
            ]
            async for result in collector.collect(requests, keep_until=1):
                assert result.reward == result.request.input
                print(result.request.input, flush=True)
            stop.set()
            await work


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
