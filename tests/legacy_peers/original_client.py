"""A worker written for Agent Lightning 0.1, with the package's own client: `original_client.py URL N`.

It prints a line of JSON for each of N tasks, and last what the client returns for what is not there.
"""

import asyncio
import json
import sys

from agentlightning import AgentLightningClient
from agentlightning.types import Rollout, Triplet


def report(task, resources):
    n = task.input["n"]
    return Rollout(
        rollout_id=task.rollout_id,
        final_reward=n / 10,
        triplets=[Triplet(prompt={"token_ids": [n]}, response={"token_ids": [n + 1]}, reward=n / 10)],
        trace=[{"name": "step", "attributes": {"model": resources.resources["main_llm"].model}}],
        logs=["a line"],
        metadata={"mode": task.mode},
    )


def said(task, resources, reply):
    print(json.dumps([task.model_dump(), resources.model_dump(), reply]), flush=True)


def sync(client):
    task = client.poll_next_task()
    resources = client.get_resources_by_id(task.resources_id) if task.resources_id else client.get_latest_resources()
    said(task, resources, client.post_rollout(report(task, resources)))


async def awaiting(client):
    task = await client.poll_next_task_async()
    resources = await client.get_resources_by_id_async(task.resources_id)
    assert await client.get_latest_resources_async() == resources
    said(task, resources, await client.post_rollout_async(report(task, resources)))


if __name__ == "__main__":
    client = AgentLightningClient(sys.argv[1], poll_interval=0.05)
    for number in range(int(sys.argv[2])):
        sync(client) if number % 2 == 0 else asyncio.run(awaiting(client))
    nothing = [
        client.get_resources_by_id("res-none"),
        asyncio.run(client.get_resources_by_id_async("res-none")),
        client._post_json(f"{sys.argv[1]}/rollout", {"final_reward": "much"}),
    ]
    print(json.dumps(nothing), flush=True)
