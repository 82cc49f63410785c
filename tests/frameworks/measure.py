"""Run an example agent many times at once, and say on standard output what was recorded: one line of JSON for each way.

    python tests/frameworks/measure.py openai_agent 256 loop threads processes

A process of its own, in which nothing reaches another machine: `guard/sitecustomize.py` must be on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.adapter import ModelCallView, ToolCallView, model_calls, read_agent, read_tool_call
from leyden.testing import FakeUpstream
from leyden.tracing.instrumentation import instrumentation_class, names
from leyden.types import semconv

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "loop": ("agent", {}),
    "threads": ("sync_agent", {}),
    "processes": ("agent", {"strategy": "ipc", "n_runners": 2}),
}


def main() -> None:
    """See the module."""
    name, count, *ways = sys.argv[1:]
    module = importlib.import_module(name)
    for way in ways:
        print(json.dumps({"way": way, **asyncio.run(measured(module, int(count), way))}), flush=True)


async def measured(module: Any, count: int, way: str) -> dict[str, Any]:
    """What became of `count` rollouts."""
    from run import pretend, record

    agent, options = WAYS[way]
    tasks = [{"city": f"city-{number}-end"} for number in range(count)]
    async with (
        FakeUpstream(model=module.MODEL, reply=pretend, delay_seconds=0.5) as upstream,
        ly.InMemoryLightningStore() as store,
    ):
        started = time.monotonic()
        concurrency = -(-count // options.get("n_runners", 1))
        chosen = getattr(module, agent, None) or blocking(module.agent)
        await record(chosen, tasks, upstream, store, **{"concurrency": concurrency, **options})
        return {
            "seconds": round(time.monotonic() - started, 1),
            "asked": len(upstream.requests),
            "together": at_once(await attempts_of(store)),
            "left": [name for name in names() if instrumentation_class(name).installed()],
            "rollouts": [rollout_report(rollout, spans, upstream) for rollout, spans in await recorded(store)],
        }


def blocking(agent: Any) -> Any:
    """An agent of a framework that is asynchronous only, as a program without an event loop runs it: one loop for each call."""

    @ly.rollout
    def sync_agent(task: dict[str, Any]) -> float:
        return asyncio.run(agent(task))

    return sync_agent


async def recorded(store: ly.LightningStore) -> list[tuple[ly.Rollout, list[ly.Span]]]:
    """Each rollout with its spans."""
    rollouts = list(await store.query_rollouts())
    spans_of = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    return [(rollout, list(spans_of[rollout.rollout_id])) for rollout in rollouts]


async def attempts_of(store: ly.LightningStore) -> list[tuple[float, float]]:
    """When each attempt was under way."""
    rollouts = await store.query_rollouts()
    return [
        (attempt.start_time, attempt.end_time or 0.0)
        for rollout in rollouts
        for attempt in await store.query_attempts(rollout.rollout_id)
    ]


def at_once(spells: list[tuple[float, float]]) -> int:
    """The most that were under way at a time."""
    moments = sorted([(start, 1) for start, _ in spells] + [(end, -1) for _, end in spells])
    under_way = most = 0
    for _, change in moments:
        under_way += change
        most = max(most, under_way)
    return most


def rollout_report(rollout: ly.Rollout, spans: list[ly.Span], upstream: FakeUpstream) -> dict[str, Any]:
    """What the record of one rollout says, and whether its tokens are those that the server knows to be true."""
    calls = model_calls(spans)
    tools = tool_calls(spans)
    return {
        "city": rollout.input["city"],
        "status": rollout.status,
        "reward": ly.find_final_reward(spans),
        "calls": [json.dumps([call.input_messages, call.output_messages]) for call in calls],
        "recorded": sum(span.name == semconv.MODEL_CALL for span in spans),
        "sightings": [sorted(span.name for span in call.spans) for call in calls],
        "exact": [is_exact(call, upstream) for call in calls],
        "tools": [[tool.name, json.dumps(tool.arguments), json.dumps(tool.result)] for tool in tools],
        "agents": sorted({agent.name for span in spans if (agent := read_agent(span)) is not None}),
        "spans": sorted(span.name for span in spans),
        "errors": [span.attributes.get("exception.message") for span in spans if span.status.status_code == "ERROR"],
    }


def tool_calls(spans: list[ly.Span]) -> list[ToolCallView]:
    """Each once: where a framework and its instrumentation both record a tool, one lies below the other."""
    found = {span.span_id: tool for span in spans if (tool := read_tool_call(span)) is not None}
    return [tool for tool in found.values() if tool.span.parent_id not in found]


def is_exact(call: ModelCallView, upstream: FakeUpstream) -> bool:
    """Whether the tokens of a call are those of the server's answer of that id."""
    if call.tokens is None or call.response_id is None:
        return False
    truth = upstream.truth(call.response_id)
    found = (call.tokens.prompt_ids, call.tokens.response_ids, call.tokens.logprobs)
    return found == (truth.prompt_ids, truth.response_ids, truth.logprobs)


if __name__ == "__main__":
    main()
