"""Calls every method of the original Agent Lightning 0.3 store client on a server: `original_client.py URL`.

Run by the Python of an environment that has the original package. Prints a line of JSON with what the
calls returned, by name.
"""

import asyncio
import json
import sys
import time

from agentlightning import LightningStoreClient, Span
from agentlightning.types import (
    LLM,
    EnqueueRolloutRequest,
    Event,
    Link,
    OtelResource,
    PromptTemplate,
    RolloutConfig,
    SpanContext,
    TraceStatus,
)


def span(rollout_id, attempt_id, number):
    now = time.time()
    context = SpanContext(trace_id="a" * 32, span_id=f"{number:016x}", is_remote=False, trace_state={})
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=number,
        trace_id="a" * 32,
        span_id=f"{number:016x}",
        parent_id="b" * 16,
        name="step",
        status=TraceStatus(status_code="ERROR", description="too late"),
        attributes={"number": number, "words": ["a", "b"]},
        events=[Event(name="began", attributes={"k": "v"}, timestamp=now)],
        links=[Link(context=context, attributes={"why": "test"})],
        start_time=now,
        end_time=now + 0.5,
        context=context,
        parent=SpanContext(trace_id="a" * 32, span_id="b" * 16, is_remote=False, trace_state={}),
        resource=OtelResource(attributes={"service.name": "s"}, schema_url="https://schema"),
    )


def plain(value):
    """Pydantic objects, pages and lists of them as JSON values."""
    if hasattr(value, "items") and hasattr(value, "total"):
        return {"total": value.total, "items": [plain(item) for item in value.items]}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


async def main(url):
    store = LightningStoreClient(url, retry_delays=())
    said = {}

    async def call(name, awaitable):
        result = await awaitable
        said[name] = plain(result)
        return result

    resources = {
        "main": LLM(endpoint="http://h:1/v1", model="m", sampling_parameters={"temperature": 0.5}),
        "prompt": PromptTemplate(template="Say {word}", engine="f-string"),
        "other": PromptTemplate(template="<p>{{word}}</p>", engine="poml"),
    }
    added = await call("add_resources", store.add_resources(resources))
    await call("update_resources", store.update_resources("chosen", {"prompt": resources["prompt"]}))
    await call("update_resources again", store.update_resources("chosen", {"prompt": resources["other"]}))
    await call("get_resources_by_id", store.get_resources_by_id(added.resources_id))
    await call("get_latest_resources", store.get_latest_resources())
    await call("query_resources", store.query_resources(resources_id_contains="chos", sort_by="create_time"))

    config = RolloutConfig(timeout_seconds=60, max_attempts=2, retry_condition=["failed"])
    await call("enqueue_rollout", store.enqueue_rollout({"n": 1}, "train", added.resources_id, config, {"k": 1}))
    await call("enqueue_rollout, input alone", store.enqueue_rollout("a text"))
    many = [EnqueueRolloutRequest(input=n, mode="val") for n in (3, 4)]
    await call("enqueue_many_rollouts", store.enqueue_many_rollouts(many))
    first = await call("dequeue_rollout", store.dequeue_rollout("w-1"))
    await call("dequeue_many_rollouts", store.dequeue_many_rollouts(limit=10))
    await call("dequeue_rollout, nothing", store.dequeue_rollout())
    begun = await call("start_rollout", store.start_rollout("begun", worker_id="w-2"))
    ids = begun.rollout_id, begun.attempt.attempt_id

    await call("get_next_span_sequence_id", store.get_next_span_sequence_id(*ids))
    await call("get_many_span_sequence_ids", store.get_many_span_sequence_ids([ids, ids]))
    await call("add_span", store.add_span(span(*ids, 7)))
    await call("add_many_spans", store.add_many_spans([span(*ids, 8), span(*ids, 9)]))
    await call("query_spans", store.query_spans(begun.rollout_id, "latest", name="step", limit=2))
    await call("query_spans, unknown", store.query_spans("ro-none"))

    await call("start_attempt", store.start_attempt(begun.rollout_id))
    await call("start_attempt by a worker", store.start_attempt(begun.rollout_id, "w-3"))
    await call("update_attempt latest", store.update_attempt(begun.rollout_id, "latest", status="succeeded"))
    await call("update_attempt, late", store.update_attempt(begun.rollout_id, "latest", status="failed"))
    claimed = first.rollout_id, first.attempt.attempt_id
    await call("update_attempt", store.update_attempt(*claimed, status="failed", worker_id="w-1", metadata={"m": 1}))
    await call("query_attempts", store.query_attempts(begun.rollout_id))
    await call("get_latest_attempt", store.get_latest_attempt(begun.rollout_id))
    await call("get_latest_attempt, unknown", store.get_latest_attempt("ro-none"))

    queued = await store.enqueue_rollout("set by hand")
    await call("update_rollout", store.update_rollout(queued.rollout_id, status="succeeded", metadata={"a": 1}))
    await call(
        "wait_for_rollouts", store.wait_for_rollouts(rollout_ids=[queued.rollout_id, first.rollout_id], timeout=0)
    )
    await call("get_rollout_by_id", store.get_rollout_by_id(first.rollout_id))
    await call("get_rollout_by_id, unknown", store.get_rollout_by_id("ro-none"))
    await call("get_resources_by_id, unknown", store.get_resources_by_id("res-none"))
    await call("query_rollouts", store.query_rollouts(status_in=["succeeded", "failed"], sort_by="start_time", limit=5))
    await call("query_rollouts, all", store.query_rollouts())

    await call("update_worker", store.update_worker("w-1", {"cpu": 0.5}))
    await call("update_worker, alone", store.update_worker("w-9"))
    await call("get_worker_by_id", store.get_worker_by_id("w-1"))
    await call("get_worker_by_id, unknown", store.get_worker_by_id("w-none"))
    await call("query_workers", store.query_workers(status_in=["busy"], sort_by="worker_id"))
    await call("statistics", store.statistics())
    await store.close()
    print(json.dumps(said), flush=True)


asyncio.run(main(sys.argv[1]))
