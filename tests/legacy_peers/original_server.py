"""An algorithm written for Agent Lightning 0.1, with the package's own server: `original_server.py PORT TIMEOUT`.

It prints `ready`, queues the tasks 0, 1, 2 in three modes, and prints each report as a line of JSON.
"""

import asyncio
import sys

from agentlightning import LLM, AgentLightningServer, PromptTemplate


async def main(port, timeout):
    server = AgentLightningServer(host="127.0.0.1", port=port, task_timeout_seconds=timeout)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # until the test has seen a server without resources
    await server.update_resources(
        {
            "main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="tiny", sampling_parameters={"temperature": 0.5}),
            "prompt": PromptTemplate(template="{task}", engine="f-string"),
        }
    )
    resources_id = await server.update_resources({"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="newer")})
    ids = [
        await server.queue_task({"n": 0}, mode="train", resources_id=resources_id, metadata={"first": True}),
        await server.queue_task({"n": 1}, mode="val"),
        await server.queue_task({"n": 2}),
    ]
    for rollout_id in ids:
        print((await server.poll_completed_rollout(rollout_id, timeout=40)).model_dump_json(), flush=True)
    await server.stop()


asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
