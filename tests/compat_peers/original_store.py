"""Serves a store of the original Agent Lightning 0.3 with some content, until its standard input is closed.

Run by the Python of an environment that has the original package. An argument is the address of a MongoDB, which
holds the store in a database that is deleted at the end. Prints the port.
"""

import asyncio
import socket
import sys
import time

from agentlightning import InMemoryLightningStore, LightningStoreServer, Span
from agentlightning.store.mongo import MongoLightningStore
from agentlightning.types import LLM, OtelResource, PromptTemplate, RolloutConfig, TraceStatus
from pymongo import AsyncMongoClient


def span(rollout_id, attempt_id, number):
    now = time.time()
    fields = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "sequence_id": number,
        "trace_id": "a" * 32,
        "span_id": f"{number:016x}",
        "parent_id": None,
        "name": f"step {number}",
        "status": TraceStatus(status_code="OK"),
        "attributes": {"reward": 0.5, "n": number},
        "events": [],
        "links": [],
        "start_time": now,
        "end_time": now + 0.1,
        "context": None,
        "parent": None,
        "resource": OtelResource(attributes={}, schema_url=""),
    }
    return Span(**fields)


DATABASE = "leyden_test"


async def main(mongo_uri=None):
    if mongo_uri is None:
        store = InMemoryLightningStore()
    else:
        store = MongoLightningStore(mongo_uri=mongo_uri, database_name=DATABASE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = LightningStoreServer(store, host="127.0.0.1", port=port)
    await server.start()
    resources = {
        "main": LLM(endpoint="http://localhost:1/v1", model="m", sampling_parameters={"temperature": 0.5}),
        "prompt": PromptTemplate(template="Say {word}", engine="f-string"),
    }
    update = await store.update_resources("res-1", resources)
    for number in range(3):
        begun = await store.start_rollout({"question": number}, mode="train", resources_id=update.resources_id)
        for each in range(number + 1):
            await store.add_span(span(begun.rollout_id, begun.attempt.attempt_id, each + 1))
        await store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="succeeded")
    again = await store.enqueue_rollout("fails twice", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    for _ in range(2):
        claimed = await store.dequeue_rollout()
        await store.add_span(span(again.rollout_id, claimed.attempt.attempt_id, 1))
        await store.update_attempt(again.rollout_id, claimed.attempt.attempt_id, status="failed")
    await store.start_rollout("still running")
    cancelled = await store.enqueue_rollout("never begun")
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    for number in range(120):
        await store.enqueue_rollout({"waits": number})
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
    if mongo_uri is not None:
        async with AsyncMongoClient(mongo_uri) as client:
            await client.drop_database(DATABASE)


asyncio.run(main(*sys.argv[1:]))
