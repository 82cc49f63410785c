"""What Leyden's own gateway, tracer and emitters record of a real client's calls: the right agent, the true tokens, each call once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from opentelemetry import trace as otel_trace
from opentelemetry.propagate import inject

import leyden as ly
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream


async def ask(client: AsyncOpenAI, text: str, *, instrumented: bool) -> str:
    """A call; instrumented, there is an SDK's span around it, and its traceparent is sent."""
    messages: Any = [{"role": "user", "content": text}]
    if not instrumented:
        return (await client.chat.completions.create(model="fake", messages=messages, max_tokens=5)).id
    parts = [{"role": "user", "parts": [{"type": "text", "content": text}]}]
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(parts)}
    with otel_trace.get_tracer("sdk").start_as_current_span("chat fake", attributes=attributes):
        headers: dict[str, str] = {}
        inject(headers)
        answer = await client.chat.completions.create(
            model="fake", messages=messages, max_tokens=5, extra_headers=headers
        )
    return answer.id


@pytest.mark.parametrize("instrumented", [True, False])
async def test_each_agents_calls_are_its_own_with_true_tokens_and_its_reward(instrumented: bool):
    """The two agents work one after the other; with an SDK's spans they may as well work at the same time, and do."""
    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        rollout = await store.start_rollout({"task": 1})
        ids = (rollout.rollout_id, rollout.attempt.attempt_id)
        llm = proxy.as_resource(*ids)
        made: dict[str, list[str]] = {}

        async def work(client: AsyncOpenAI, name: str) -> None:
            with ly.operation(name=name, attributes={"gen_ai.agent.name": name}):
                made[name] = [await ask(client, f"{name} {n}", instrumented=instrumented) for n in range(3)]

        tracer = ly.OtelTracer()
        async with (
            tracer.trace_context("run", store=store, rollout_id=ids[0], attempt_id=ids[1]),
            AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client,
        ):
            if instrumented:
                await asyncio.gather(work(client, "planner"), work(client, "writer"))
            else:
                await work(client, "planner")
                await work(client, "writer")
            ly.emit_reward(0.5)
        await proxy.flush(*ids)
        spans = await store.query_spans(*ids)

        for name in ("planner", "writer"):
            triplets = ly.TracerTraceToTriplet(agent_match=f"^{name}$").adapt(spans)
            assert sorted(triplet.metadata["response_id"] for triplet in triplets) == sorted(made[name])
            for triplet in triplets:
                truth = upstream.truth(triplet.metadata["response_id"])
                assert triplet.prompt.token_ids == truth.prompt_ids
                assert triplet.response.token_ids == truth.response_ids
                assert triplet.response.logprobs == truth.logprobs
        everything = ly.TracerTraceToTriplet().adapt(spans)
        assert len(everything) == 6
        assert [triplet.reward for triplet in everything].count(0.5) == 1
