"""An algorithm of the original Agent Lightning 0.3 on the store of a server: `original_algorithm.py URL`.

It publishes a prompt, enqueues two tasks, waits for them, and prints their rewards.
"""

import asyncio
import sys

import agentlightning as agl


async def main(url):
    store = agl.LightningStoreClient(url)
    await store.add_resources({"prompt": agl.PromptTemplate(template="Double {n}", engine="f-string")})
    rollouts = [await store.enqueue_rollout({"n": n}, mode="train") for n in (1, 2)]
    ids = [rollout.rollout_id for rollout in rollouts]
    while len(done := await store.wait_for_rollouts(rollout_ids=ids, timeout=0)) < len(ids):  # noqa: ASYNC110 -- its client waits 0.1 s at most
        await asyncio.sleep(0.1)
    spans = {rollout.rollout_id: await store.query_spans(rollout.rollout_id, "latest") for rollout in done}
    print([agl.find_final_reward(list(spans[rollout_id])) for rollout_id in ids], flush=True)
    await store.close()


asyncio.run(main(sys.argv[1]))
