"""The machine that asks: which of three prompts is the best? The others do the work.

python examples/shared_store/algorithm.py --store http://localhost:4747
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter

import leyden as ly
from leyden.types import EnqueueRolloutRequest

PROMPTS = ("What is {a} + {b}?", "{a} and {b}, please add them.", "{a} is a number.")


async def main(url: str, tasks: int, timeout_seconds: float) -> None:
    config = ly.RolloutConfig(timeout_seconds=timeout_seconds, max_attempts=5, retry_condition=["timeout"])
    data = [{"a": 10 + n, "b": 50} for n in range(tasks)]
    workers: Counter[str | None] = Counter()
    async with ly.open_store(url) as store:
        for prompt in PROMPTS:
            resources = await store.add_resources({"prompt": ly.PromptTemplate(template=prompt)})
            rollouts = await store.enqueue_many_rollouts(
                [EnqueueRolloutRequest(input=task, resources_id=resources.resources_id, config=config) for task in data]
            )
            ids = [rollout.rollout_id for rollout in rollouts]
            finished = await store.wait_for_rollouts(rollout_ids=ids)
            spans = await store.query_spans_of(ids)
            rewards = [ly.find_final_reward(spans[rollout_id]) or 0.0 for rollout_id in ids]
            print(f"{sum(rewards) / len(rewards):.2f}  {prompt}", flush=True)
            workers.update(
                rollout.attempt.worker_id for rollout in finished if isinstance(rollout, ly.AttemptedRollout)
            )
    for worker, count in sorted(workers.items(), key=str):
        print(f"{worker}: {count} rollouts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a store server's address")
    parser.add_argument("--tasks", type=int, default=40, help="how many tasks each prompt is tried on")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds after which another worker takes a rollout over"
    )
    options = parser.parse_args()
    asyncio.run(main(options.store, options.tasks, options.timeout))
