"""Two machines, two clocks: what belongs to which call does not depend on how far they are apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

import leyden as ly
from leyden.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages, TraceToTrajectory, TraceTree
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.tracing import OtelTracer
from leyden.tracing.instrumentation import current_route
from leyden.types import Span, semconv
from tests.adapter.traces import agent, gateway_call, reward, sdk_call

NOW = 1_790_000_000.0
SHIFTS = [-3600.0, -5.0, -0.7, 0.7, 5.0, 3600.0]


def shifted(spans: Sequence[Span], seconds: float) -> list[Span]:
    """Return the spans as a gateway records them whose clock is `seconds` ahead of the agent's."""
    return [
        span.model_copy(update={"start_time": span.start_time + seconds, "end_time": span.end_time + seconds})
        if span.name == semconv.MODEL_CALL and span.start_time is not None and span.end_time is not None
        else span
        for span in spans
    ]


def learned(spans: Sequence[Span]) -> dict[str, Any]:
    """Everything that algorithms learn from an attempt."""
    return {
        "gateway": [(t.metadata["response_id"], t.reward) for t in LlmProxyTraceToTriplet().adapt(spans)],
        "tracer": [
            (t.metadata["response_id"], t.reward, t.metadata["agent_name"]) for t in TracerTraceToTriplet().adapt(spans)
        ],
        "trajectories": [(t.token_ids, t.call_rewards, t.reward) for t in TraceToTrajectory().adapt(spans)],
        "messages": [c["messages"][-1]["content"] for c in TraceToMessages().adapt(spans)],
    }


def conversation(steps: Sequence[tuple[bool, float, float]], *, sent: bool) -> list[Span]:
    """Calls with a reward after some of them, by true time, numbered in the order of their ends.

    steps: for each call whether a reward follows it, how long it takes, and the pause after it.
    sent: whether the client says when it sent each call.
    """
    at, spans, ids = NOW, list[Span](), [1]
    for index, (rewarded, seconds, pause) in enumerate(steps):
        said: dict[str, Any] = {"leyden__sent_time": at - 0.0005} if sent else {}
        spans.append(
            gateway_call(
                at,
                at + seconds,
                id=len(spans) + 1,
                prompt=list(ids),
                response=[2 * index + 2],
                response_id=f"r{index}",
                answered=f"a{index}",
                **({} if sent else {"index": index}),
                **said,
            )
        )
        ids += [2 * index + 2, 2 * index + 3]
        at += seconds + pause
        if rewarded:
            spans.append(reward(index / 10 + 0.1, at, id=len(spans) + 1))
            at += pause
    return spans


def delivered(spans: Sequence[Span]) -> list[Span]:
    """The spans numbered as they arrive: the gateway's 0.01 s after their end, the agent's in batches every 0.2 s."""

    def arrival(span: Span) -> float:
        assert span.end_time is not None
        if span.name == semconv.MODEL_CALL:
            return span.end_time + 0.01
        return NOW + 0.2 * ((span.end_time - NOW) // 0.2 + 1)

    ordered = sorted(spans, key=arrival)
    return [span.model_copy(update={"sequence_id": number}) for number, span in enumerate(ordered, start=1)]


STEPS = st.lists(st.tuples(st.booleans(), st.floats(0.001, 2), st.floats(0.001, 2)), min_size=1, max_size=6)
CLOSE_STEPS = st.lists(st.tuples(st.booleans(), st.floats(0.01, 0.1), st.floats(0.01, 0.1)), min_size=1, max_size=6)


@settings(max_examples=30)
@given(steps=STEPS, seconds=st.floats(-7200, 7200))
def test_calls_whose_sending_was_timed_are_matched_whatever_the_gateways_clock_says(
    steps: list[tuple[bool, float, float]], seconds: float
):
    spans = delivered(conversation(steps, sent=True))
    rewards = [index / 10 + 0.1 if rewarded else None for index, (rewarded, _, _) in enumerate(steps)]
    assert [value for _, value in learned(spans)["gateway"]] == rewards
    assert learned(shifted(spans, seconds)) == learned(spans)


@settings(max_examples=30)
@given(steps=CLOSE_STEPS, seconds=st.floats(2, 7200), ahead=st.booleans())
def test_calls_of_other_clients_are_matched_by_sequence_ids_where_the_clocks_disagree(
    steps: list[tuple[bool, float, float]], seconds: float, ahead: bool
):
    spans = conversation(steps, sent=False)
    assert learned(shifted(spans, seconds if ahead else -seconds)) == learned(spans)


@settings(max_examples=30)
@given(steps=STEPS)
def test_where_the_clocks_agree_batches_of_deliveries_change_nothing(steps: list[tuple[bool, float, float]]):
    spans = conversation(steps, sent=False)
    assert learned(delivered(spans)) == learned(spans)


@pytest.mark.parametrize("seconds", SHIFTS)
def test_a_floating_call_finds_its_agent_by_the_agents_clock(seconds: float):
    spans = [
        gateway_call(NOW + 1, NOW + 2, id=1, prompt=[1], response=[2], response_id="a", leyden__sent_time=NOW + 1),
        agent("planner", NOW, NOW + 3, id=2),
        gateway_call(NOW + 5, NOW + 6, id=3, prompt=[1], response=[2], response_id="b", leyden__sent_time=NOW + 5),
        agent("writer", NOW + 4, NOW + 7, id=4),
    ]
    names = [found[2] for found in learned(shifted(spans, seconds))["tracer"]]
    assert names == ["planner", "writer"]


@pytest.mark.parametrize("seconds", SHIFTS)
def test_calls_of_two_sources_are_in_the_order_of_the_agents_clock(seconds: float):
    """A hosted model is called directly, before and after one behind the gateway."""
    spans = [
        sdk_call(NOW, NOW + 1, id=1, response_id="a", asked="1"),
        gateway_call(NOW + 2, NOW + 3, id=2, prompt=[1], response=[2], response_id="b", leyden__sent_time=NOW + 2),
        sdk_call(NOW + 4, NOW + 5, id=3, response_id="c", asked="3"),
    ]
    assert [found[0] for found in learned(shifted(spans, seconds))["tracer"]] == ["a", "b", "c"]


def test_spans_numbered_by_their_start_contradict_no_clock():
    """Agent Lightning draws a number when a span begins: a long step has an early number and a late end."""
    spans = [
        agent("a", NOW, NOW + 60, id=1),
        gateway_call(NOW + 1, NOW + 2, id=2, prompt=[1], response=[2], response_id="a"),
        reward(0.5, NOW + 3, id=3),
        gateway_call(NOW + 4, NOW + 5, id=4, prompt=[1], response=[2], response_id="b"),
    ]
    assert learned(spans)["gateway"] == [("a", 0.5), ("b", None)]
    tree = TraceTree.from_spans(spans)
    assert [node.start_time for node in tree.traverse() if node.span.name == semconv.MODEL_CALL] == [NOW + 1, NOW + 4]


def test_numbers_that_fit_no_clock_are_not_believed():
    """A trace that was put together later: one call is numbered hours before its time, one hours after."""
    spans = conversation([(True, 1, 3600)] * 3, sent=False)
    numbers = [6, 2, 3, 4, 1, 5]
    mixed = [span.model_copy(update={"sequence_id": number}) for span, number in zip(spans, numbers, strict=True)]
    assert [value for _, value in learned(mixed)["gateway"]] == [pytest.approx(value) for value in (0.1, 0.2, 0.3)]


def test_spans_that_no_store_has_numbered_are_ordered_by_their_clocks():
    spans = [span.model_copy(update={"sequence_id": 0}) for span in conversation([(True, 1, 1)] * 2, sent=False)]
    assert [value for _, value in learned(spans)["gateway"]] == [0.1, 0.2]


async def test_a_call_that_the_store_gets_late_keeps_its_reward_where_the_agent_is_on_the_gateways_machine():
    async with FakeUpstream() as upstream, InMemoryLightningStore() as store:
        async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
            begun = await store.start_rollout("task")
            ids = begun.rollout_id, begun.attempt.attempt_id
            llm = proxy.as_resource(*ids)
            async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
                for _ in range(2):
                    await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
            proxy.end_attempt(*ids)
            await proxy.flush(*ids)
        first, second = sorted(await store.query_spans(*ids), key=lambda span: span.start_time or 0.0)
    late = second.model_copy(
        update={
            "start_time": second.start_time + 100.0,
            "end_time": second.end_time + 105.0,
            "sequence_id": 3,
            "attributes": second.attributes | {semconv.SENT_TIME: second.attributes[semconv.SENT_TIME] + 100.0},
        }
    )
    given = reward(1.0, late.end_time + 2.0, id=2)
    assert [triplet.reward for triplet in LlmProxyTraceToTriplet().adapt([first, given, late])] == [None, 1.0]


async def test_a_real_agents_rewards_are_matched_whatever_its_gateways_clock_says():
    """The calls take a millisecond, so the store numbers rewards and calls in the order of their batches."""
    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        rollout = await store.start_rollout(None)
        ids = (rollout.rollout_id, rollout.attempt.attempt_id)
        tracer = OtelTracer(instrumentation=["httpx2"])
        async with tracer.trace_context(store=store, rollout_id=ids[0], attempt_id=ids[1]):
            route = current_route()
            assert route is not None
            route.base_url = proxy.as_resource(*ids).endpoint
            async with AsyncOpenAI(base_url=route.base_url, api_key="EMPTY") as client:
                for number in range(3):
                    said: Any = [{"role": "user", "content": str(number)}]
                    await client.chat.completions.create(model="fake", messages=said)
                    ly.emit_reward(number / 10)
                    await asyncio.sleep(0.002)
        await proxy.flush(*ids)
        spans = await store.query_spans(ids[0])
    calls = [span for span in spans if span.name == semconv.MODEL_CALL]
    assert all(float(str(call.attributes[semconv.SENT_TIME])) <= (call.start_time or 0.0) for call in calls)
    assert not any(semconv.SENT_TIME in json.dumps(dict(call.headers)) for call in upstream.calls)
    assert "x-leyden-sent" not in {name.lower() for call in upstream.calls for name in call.headers}
    for seconds in SHIFTS:
        assert [value for _, value in learned(shifted(spans, seconds))["gateway"]] == [0.0, 0.1, 0.2]
