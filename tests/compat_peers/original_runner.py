"""A runner of the original Agent Lightning 0.3 on the store of a server: `original_runner.py URL N`."""

import asyncio
import sys

import agentlightning as agl


@agl.rollout
async def agent(task, llm: agl.LLM):
    assert llm.model == "tiny"
    if task["n"] == 1:
        raise ValueError("no")
    return task["n"] / 2


async def main(url, n_rollouts):
    store = agl.LightningStoreClient(url)
    runner = agl.LitAgentRunner(agl.OtelTracer(), max_rollouts=n_rollouts, poll_interval=0.05)
    with runner.run_context(agent=agent, store=store):
        await runner.iter()
    await store.close()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
