"""A runner on one machine: claims rollouts from the shared store and runs the agent, until Ctrl-C.

python examples/shared_store/runner.py --store http://localhost:4747
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from agent import read_aloud

import leyden as ly
from leyden.execution.execution_strategy import ThreadingEvent


async def main(url: str, concurrency: int) -> None:
    stop = ThreadingEvent()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = ly.LitAgentRunner(concurrency=concurrency)
    async with ly.open_store(url) as store, runner.run_context(agent=read_aloud, store=store):
        print(f"{runner.worker_name} works for {store.url}; Ctrl-C ends it after what is under way", flush=True)
        await runner.iter(event=stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a store server's address")
    parser.add_argument("--concurrency", type=int, default=4, help="rollouts in flight at a time")
    options = parser.parse_args()
    asyncio.run(main(options.store, options.concurrency))
