"""What an agent returns is recorded once, in its own attempt, or refused with its type and what is possible."""

import asyncio
import math
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider

import leyden as ly
from leyden.agent import record_result, result_spans
from leyden.errors import AgentError, InvalidReturn
from leyden.store import InMemoryLightningStore, LightningStore
from leyden.tracing import OtelTracer
from leyden.types import Attempt, AttemptedRollout, Span, find_final_reward, get_rewards_from_span

ROLLOUT = AttemptedRollout(
    rollout_id="ro-1",
    input=None,
    start_time=0.0,
    attempt=Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0),
)


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


def span_of(rollout: AttemptedRollout, span_id: str = "00000000000000ab") -> Span:
    return Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=0,
        trace_id="0" * 31 + "1",
        span_id=span_id,
        name="mine",
    )


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60) | st.booleans())
def test_a_number_is_the_reward(value: float):
    (span,) = result_spans(value, ROLLOUT)
    assert get_rewards_from_span(span) == {"primary": float(value)}
    assert (span.rollout_id, span.attempt_id, span.sequence_id) == ("ro-1", "at-1", 0)


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        (Fraction(1, 4), {"primary": 0.25}),
        ({"accuracy": 1}, {"accuracy": 1.0}),
        ({"format": 0.5, "primary": 1}, {"primary": 1.0, "format": 0.5}),
    ],
)
def test_rewards_by_name_have_the_primary_one_first(result: Any, rewards: dict[str, float]):
    (span,) = result_spans(result, ROLLOUT)
    assert list(get_rewards_from_span(span).items()) == list(rewards.items())


def test_nothing_is_nothing():
    assert result_spans(None, ROLLOUT) == result_spans([], ROLLOUT) == result_spans((), ROLLOUT) == []


def test_spans_are_taken_as_they_are():
    span = span_of(ROLLOUT)
    assert result_spans(span, ROLLOUT) == result_spans([span], ROLLOUT) == result_spans((span,), ROLLOUT) == [span]


async def coroutine() -> float:
    return 1.0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (math.nan, r"reward 'primary' of the agent is nan, which is no finite number"),
        (math.inf, "inf"),
        (10**400, "the agent returned is a whole number of 1,329 bits, more than a float can hold"),
        ("done", r"the agent returned is 'done' \(a str\), which is no number; possible: None, a finite number"),
        (object(), r"\(a object\), which is no number; possible"),
        (1j, r"\(a complex\)"),
        ({}, "an empty dict"),
        ({"a": 1.0, "b": 2.0}, r"several rewards \('a', 'b'\) and none is called 'primary'.*primary_key="),
        ({"a": "x"}, r"reward 'a' of the agent is 'x' \(a str\)"),
        ({1: 1.0}, r"with the name 1 \(a int\)"),
        ([1.0], r"a list with 1.0 \(a float\)"),
        (coroutine(), "a coroutine that was never awaited; define the agent with `async def`"),
    ],
)
def test_anything_else_is_refused_with_its_type_and_what_is_possible(result: Any, message: str):
    with pytest.raises(InvalidReturn, match=message) as caught:
        result_spans(result, ROLLOUT)
    assert isinstance(caught.value, AgentError)
    assert isinstance(caught.value, TypeError)


def test_a_span_of_another_attempt_is_refused():
    other = span_of(ROLLOUT)
    other.attempt_id = "at-2"
    with pytest.raises(InvalidReturn, match=r"span 'mine' of attempt 'at-2'.*this is attempt 'at-1' of rollout 'ro-1'"):
        result_spans([other], ROLLOUT)


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
async def test_a_reward_span_that_is_returned_counts_once(store: LightningStore, propagate: bool, as_list: bool):
    @ly.rollout
    async def agent(task: str) -> Any:
        ly.emit_reward(0.9)
        span = ly.emit_reward(0.2, propagate=propagate)
        return [span, span] if as_list else span

    async with ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
        rollout = await runner.step("task")
    spans = await store.query_spans(rollout.rollout_id)
    assert [get_rewards_from_span(span) for span in spans] == [{"primary": 0.9}, {"primary": 0.2}]
    assert (rollout.status, find_final_reward(spans)) == ("succeeded", 0.2)


async def test_in_the_trace_of_the_attempt_the_reward_comes_last_and_the_trace_knows_it(store: LightningStore):
    rollout, tracer = await store.start_rollout(None), OtelTracer()
    async with tracer.trace_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        otel_trace.get_tracer("library").start_span("call").end()
        (recorded,) = await record_result(0.5, rollout=rollout, store=store)
    spans = list(await store.query_spans(rollout.rollout_id))
    assert [span.name for span in spans] == ["call", "leyden.reward"]
    assert tracer.get_last_trace() == spans
    assert find_final_reward(tracer.get_last_trace()) == 0.5
    assert recorded.sequence_id == 2


async def test_outside_the_trace_of_the_attempt_it_goes_to_the_store_at_once(store: LightningStore):
    mine, other = await store.start_rollout(1), await store.start_rollout(2)
    await record_result(1, rollout=mine, store=store)
    async with OtelTracer().trace_context(
        store=store, rollout_id=other.rollout_id, attempt_id=other.attempt.attempt_id
    ):
        await record_result({"x": 2.0}, rollout=mine, store=store)
    assert [get_rewards_from_span(span) for span in await store.query_spans(mine.rollout_id)] == [
        {"primary": 1},
        {"x": 2},
    ]
    assert (await store.query_spans(other.rollout_id)).total == 0


async def test_opentelemetry_spans_that_were_collected_already_are_not_doubled(store: LightningStore):
    rollout, mine = await store.start_rollout(None), TracerProvider().get_tracer("the agent's own provider")
    tracer = OtelTracer()
    async with tracer.trace_context(store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
        collected = otel_trace.get_tracer("library").start_span("collected")
        collected.end()
        uncollected = mine.start_span("uncollected")
        uncollected.end()
        await asyncio.sleep(0)
        await record_result([collected, uncollected], rollout=rollout, store=store)
    spans = list(await store.query_spans(rollout.rollout_id))
    assert [span.name for span in spans] == ["collected", "uncollected"]
    assert tracer.get_last_trace() == spans
