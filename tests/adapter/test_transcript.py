"""A rollout as text: each step at its place, each message once, and its tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai

import leyden as ly
from leyden.adapter import transcript
from leyden.adapter.transcript import step_lines, transcript_lines
from leyden.testing import FakeUpstream, Reply, ToolCall
from leyden.types import SpanStatus, semconv

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
LONG = "It is sunny. " * 50


def reply(request: dict[str, Any]) -> Reply:
    answered = any(message["role"] == "tool" for message in request["messages"])
    return Reply("Sunny.") if answered else Reply(calls=(ToolCall("get_weather", json.dumps({"city": "Lima"})),))


@ly.llm_rollout
async def agent(task: str, llm: ly.LLM) -> float:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        asked = await client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL])  # type: ignore[arg-type]
        call = asked.choices[0].message
        assert call.tool_calls is not None
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": LONG}
        messages += [call.model_dump(exclude_none=True), result]
        await client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL])  # type: ignore[arg-type]
    return 0.5


async def recorded() -> list[ly.Span]:
    async with FakeUpstream(reply=reply) as upstream, ly.InMemoryLightningStore() as store:
        async with ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
            trainer = ly.Trainer(
                algorithm="baseline", store=store, llm_proxy=proxy, initial_resources={"model": proxy.as_resource()}
            )
            await trainer.afit(agent, ["Weather in Lima?"])
        (rollout,) = await store.query_rollouts()
        return list(await store.query_spans(rollout.rollout_id))


async def test_it_shows_each_message_once_with_tool_calls_rewards_and_tokens() -> None:
    spans = await recorded()
    lines = [re.sub(r"  \d+\.\d\d s", "", line) for line in transcript_lines(spans, max_characters=60)]
    steps = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in steps] == [
        "leyden.model_call",
        "leyden.model_call",
        "leyden.reward",
        "recorded:",
    ]
    assert steps[2] == "leyden.reward  0.5"
    tokens = ly.TraceToTrajectory().adapt(spans)[0]
    assert steps[3] == f"recorded: {len(tokens.token_ids)} tokens, {tokens.n_trained} of them the model's"
    whole = f"tool: {LONG.rstrip()}"
    assert [line for line in lines if line.startswith(" ")] == [
        "  system: Be brief.",
        "  user: Weather in Lima?",
        "  assistant:",
        '      calls get_weather({"city": "Lima"})',
        f"  {whole[:60]} ... ({len(whole)} characters in all)",
        "  assistant: Sunny.",
    ]
    assert f"  {whole}" in transcript_lines(spans, max_characters=None)


async def test_without_details_it_is_the_names_of_the_steps() -> None:
    assert step_lines(await recorded()) == ["leyden.model_call", "leyden.model_call", "leyden.reward"]


def test_an_attempt_without_spans_has_no_lines() -> None:
    assert transcript_lines([]) == step_lines([]) == []


def test_a_failed_step_says_why_at_its_depth() -> None:
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "0" * 32}
    status = SpanStatus(status_code="ERROR", description="no answer")
    spans = [
        ly.Span(**ids, sequence_id=1, span_id="1" * 16, name="agent", start_time=1.0, end_time=3.5),
        ly.Span(**ids, sequence_id=2, span_id="2" * 16, parent_id="1" * 16, name="search", status=status),
    ]
    assert transcript_lines(spans) == ["agent  2.50 s", "  search", "    failed: no answer"]


def test_a_stack_trace_is_shown_by_its_last_lines_and_whole_if_nothing_is_to_be_cut() -> None:
    trace = "\n".join(["Traceback:", *(f"line {number}" for number in range(20)), "ValueError: no"])
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "0" * 32, "span_id": "1" * 16}
    span = ly.Span(**ids, sequence_id=1, name=semconv.EXCEPTION, attributes={semconv.EXCEPTION_STACKTRACE: trace})
    short = [line.strip() for line in transcript_lines([span])]
    assert short[1:3] == ["... (14 earlier lines)", "line 13"]
    assert short[-1] == "ValueError: no"
    assert [line.strip() for line in transcript_lines([span], max_characters=None)[1:]] == trace.splitlines()


def test_a_stack_trace_shows_the_users_own_line_although_a_library_raised_far_below() -> None:
    def frame(path: str, function: str) -> list[str]:
        return [f'  File "{path}", line 7, in {function}', f"    {function}()"]

    library = [line for n in range(9) for line in frame(f"/x/site-packages/openai/part{n}.py", f"deep{n}")]
    runner = str(Path(transcript.__file__).parent.parent / "execution" / "runner" / "attempt.py")
    trace = [
        "Traceback (most recent call last):",
        *frame(runner, "run"),
        *frame("/home/me/leyden/agent.py", "mine"),
        *library,
        "openai.APITimeoutError: Request timed out.",
    ]
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "0" * 32, "span_id": "1" * 16}
    attributes = {semconv.EXCEPTION_STACKTRACE: "\n".join(trace)}
    span = ly.Span(**ids, sequence_id=1, name=semconv.EXCEPTION, attributes=attributes)
    shown = [line.strip() for line in transcript_lines([span])[1:]]
    assert shown[:4] == [
        "... (3 earlier lines)",
        'File "/home/me/leyden/agent.py", line 7, in mine',
        "mine()",
        "... (12 lines of libraries)",
    ]
    assert shown[4:] == [line.strip() for line in trace[-7:]]
