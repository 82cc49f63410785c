"""What is written down: each call in its own attempt, to the exact token, or refused with the reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from leyden.adapter import TraceToTriplet
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore, SqliteLightningStore
from leyden.testing import FakeUpstream, Misbehaviour, ServedCall
from leyden.types import AttemptedRollout, RolloutConfig, Span, semconv
from tests.gateway.caller import Caller, new_caller, say


async def ask(client: AsyncOpenAI, kind: str, text: str, **options: Any) -> str:
    """One call of any kind; its response id."""
    if kind == "chat":
        return (await client.chat.completions.create(model="fake", messages=say(text), **options)).id
    if kind == "completion":
        return (await client.completions.create(model="fake", prompt=text, **options)).id
    if kind == "chat stream":
        stream: Any = await client.chat.completions.create(model="fake", messages=say(text), stream=True, **options)
    else:
        stream = await client.completions.create(model="fake", prompt=text, stream=True, **options)
    return [chunk.id async for chunk in stream][-1]


KINDS = ["chat", "chat stream", "completion", "completion stream"]


def assert_exact(span: Span, truth: ServedCall) -> None:
    assert span.tokens is not None, span.attributes.get(semconv.TOKENS_REFUSED)
    assert span.tokens.prompt_ids == truth.prompt_ids
    assert span.tokens.response_ids == truth.response_ids
    assert span.tokens.logprobs == truth.logprobs
    assert span.attributes[semconv.GEN_AI_RESPONSE_ID] == truth.response_id


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_exact(caller: Caller, upstream: FakeUpstream, kind: str) -> None:
    response_id = await ask(caller.client, kind, "one ü two", max_tokens=9)
    span = await caller.span()
    assert_exact(span, upstream.truth(response_id))
    assert span.tokens is not None
    assert span.tokens.policy_versions == [7] * 9
    assert span.status.status_code == "OK"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_span_says_what_was_asked_and_answered(caller: Caller, upstream: FakeUpstream, kind: str) -> None:
    await ask(caller.client, kind, "hello ü", temperature=0.5, seed=11)
    span = await caller.span()
    truth = upstream.calls[0]
    assert span.name == semconv.MODEL_CALL
    assert json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])) == say("hello ü")
    assert json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])) == [
        {"role": "assistant", "content": truth.text}
    ]
    expected = {
        semconv.CALL_INDEX: 0,
        semconv.GEN_AI_OPERATION: "chat" if kind.startswith("chat") else "text_completion",
        semconv.GEN_AI_REQUEST_MODEL: "fake",
        semconv.GEN_AI_RESPONSE_MODEL: "fake",
        semconv.GEN_AI_FINISH_REASONS: ["stop"],
        semconv.GEN_AI_INPUT_TOKENS: len(truth.prompt_ids),
        semconv.GEN_AI_OUTPUT_TOKENS: len(truth.response_ids),
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 11,
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time
    assert span.sequence_id > 0


async def test_a_call_hangs_below_the_span_that_made_it(caller: Caller) -> None:
    trace_id, parent_id = "1" * 32, "2" * 16
    await caller.client.chat.completions.create(
        model="fake", messages=say("a"), extra_headers={"traceparent": f"00-{trace_id}-{parent_id}-01"}
    )
    await caller.client.chat.completions.create(
        model="fake", messages=say("b"), extra_headers={"traceparent": "no trace context"}
    )
    await ask(caller.client, "chat", "c")
    first, second, third = await caller.spans()
    assert (first.trace_id, first.parent_id) == (trace_id, parent_id)
    assert second.parent_id is None
    assert second.trace_id == third.trace_id != trace_id


async def test_calls_are_numbered_in_their_attempt(caller: Caller) -> None:
    for number in range(4):
        await ask(caller.client, KINDS[number], str(number))
    assert [span.attributes[semconv.CALL_INDEX] for span in await caller.spans()] == [0, 1, 2, 3]


async def test_128_attempts_at_once_keep_each_call_in_its_own(
    proxy: LLMProxy, store: InMemoryLightningStore, upstream: FakeUpstream
) -> None:
    callers = [await new_caller(proxy, store) for _ in range(128)]
    shared = callers[0].client

    async def agent(number: int, caller: Caller) -> list[str]:
        client = shared.with_options(base_url=caller.llm.endpoint)
        return [await ask(client, KINDS[(number + turn) % 4], f"{number}, turn {turn}") for turn in range(3)]

    response_ids = await asyncio.gather(*(agent(number, caller) for number, caller in enumerate(callers)))
    truths = {call.response_id: call for call in upstream.calls}
    assert len(truths) == 384
    for caller, expected in zip(callers, response_ids, strict=True):
        spans = await caller.spans()
        assert [span.attributes[semconv.GEN_AI_RESPONSE_ID] for span in spans] == expected
        for span in spans:
            assert_exact(span, truths[str(span.attributes[semconv.GEN_AI_RESPONSE_ID])])
    await shared.close()


async def test_what_was_flushed_is_on_disk_with_its_tokens(upstream: FakeUpstream, tmp_path: Path) -> None:
    async with (
        SqliteLightningStore(tmp_path / "store.db") as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            for kind in KINDS:
                await ask(client, kind, "hello ü")
        await proxy.flush(caller.rollout_id, caller.attempt_id)
    async with SqliteLightningStore(tmp_path / "store.db") as store:
        spans = await store.query_spans(caller.rollout_id, caller.attempt_id)
        assert len(spans) == 4
        for span, truth in zip(spans, upstream.calls, strict=True):
            assert_exact(span, truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Misbehaviour(no_token_ids=True), "gave no prompt_token_ids"),
        (Misbehaviour(lost_response_ids=1), "completion_tokens"),
        (Misbehaviour(lost_logprobs=1), "logprobs for"),
        (Misbehaviour(no_usage=True), "no usage"),
    ],
)
async def test_tokens_that_cannot_be_proven_are_refused_and_the_call_passes(
    caller: Caller, upstream: FakeUpstream, kind: str, fault: Misbehaviour, reason: str
) -> None:
    upstream.misbehave(fault)
    await ask(caller.client, kind, "hello")
    span = await caller.span()
    assert span.tokens is None
    assert reason in str(span.attributes[semconv.TOKENS_REFUSED])
    assert span.status.status_code == "OK"
    assert json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))[0]["content"] == upstream.calls[0].text


async def test_several_choices_are_recorded_as_text_only(caller: Caller, upstream: FakeUpstream) -> None:
    choices = [{"index": i, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"} for i in (0, 1)]
    body = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "fake", "choices": choices}
    upstream.misbehave(Misbehaviour(body=json.dumps(body).encode()))
    await ask(caller.client, "chat", "hello", n=2)
    span = await caller.span()
    assert span.tokens is None
    assert "2 choices" in str(span.attributes[semconv.TOKENS_REFUSED])
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["stop", "stop"]


async def test_a_server_that_refuses_unknown_fields_is_asked_for_nothing(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    model = UpstreamModel(model_name="m", endpoint=upstream.endpoint, upstream_model="fake", record_tokens=False)
    async with LLMProxy(model_list=[model], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client as client:
            await client.chat.completions.create(model="m", messages=say("hello"), seed=3)
        assert upstream.requests[0] == {"model": "fake", "messages": say("hello"), "seed": 3}
        span = await caller.span()
        assert span.attributes[semconv.GEN_AI_REQUEST_MODEL] == "m"
        assert "gave no" in str(span.attributes[semconv.TOKENS_REFUSED])


async def test_a_rerun_of_a_rollout_gets_the_same_seeds(upstream: FakeUpstream) -> None:
    seeds: list[list[int]] = []
    for deterministic_seed in (1, 1, 2):
        async with (
            InMemoryLightningStore() as store,
            LLMProxy(model_list=[upstream.llm()], store=store, deterministic_seed=deterministic_seed) as proxy,
        ):
            upstream.requests.clear()
            for rollout_id in ("ro-a", "ro-b"):
                rollout = await store.start_rollout({}, rollout_id=rollout_id)
                caller = Caller(proxy, store, rollout_id, rollout.attempt.attempt_id)
                async with caller.client as client:
                    await ask(client, "chat", "x")
                    await ask(client, "chat", "x")
                    await ask(client, "chat", "x", seed=5)
                spans = await caller.spans()
                assert [span.attributes["gen_ai.request.seed"] for span in spans] == [
                    request["seed"] for request in list(upstream.requests)[-3:]
                ]
            seeds.append([request["seed"] for request in upstream.requests])
    assert seeds[0] == seeds[1]
    assert seeds[0][2] == seeds[0][5] == 5
    drawn = {*seeds[0], *seeds[2]} - {5}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**31 for seed in drawn)


async def seed_of(
    proxy: LLMProxy, store: InMemoryLightningStore, upstream: FakeUpstream, rollout: AttemptedRollout
) -> int:
    """The seed of the first call of this attempt."""
    caller = Caller(proxy, store, rollout.rollout_id, rollout.attempt.attempt_id)
    async with caller.client as client:
        await ask(client, "chat", "x")
    return upstream.requests[-1]["seed"]


async def test_rollouts_with_one_sampling_key_get_the_same_seeds_in_every_store(upstream: FakeUpstream) -> None:
    seeds: list[tuple[int, int]] = []
    for _ in range(2):
        async with (
            InMemoryLightningStore() as store,
            LLMProxy(model_list=[upstream.llm()], store=store, deterministic_seed=1) as proxy,
        ):
            first, second = [
                await store.start_rollout({}, metadata={semconv.SAMPLING_KEY: f"train/0/{place}"}) for place in (0, 1)
            ]
            seeds.append((await seed_of(proxy, store, upstream, first), await seed_of(proxy, store, upstream, second)))
    assert seeds[0] == seeds[1]
    assert len({*seeds[0]}) == 2


async def test_an_interrupted_attempt_is_sampled_again_with_its_seeds_and_a_failed_one_with_others(
    upstream: FakeUpstream,
) -> None:
    async with (
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store, deterministic_seed=1) as proxy,
    ):
        config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
        rollout = await store.start_rollout({}, config=config)
        seeds = [await seed_of(proxy, store, upstream, rollout)]
        for reason_kind in ("interrupted", "exception"):
            await store.update_attempt(
                rollout.rollout_id,
                rollout.attempt.attempt_id,
                status="failed",
                metadata={"reason_kind": reason_kind},
            )
            [rollout] = await store.dequeue_many_rollouts(limit=1)
            seeds.append(await seed_of(proxy, store, upstream, rollout))
    assert seeds[0] == seeds[1]
    assert seeds[1] != seeds[2]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_parameters_that_change_the_distribution_are_recorded_in_every_dialect(caller: Caller, path: str) -> None:
    asked: dict[str, Any] = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}.get(
        path, {"messages": say("hi"), "max_tokens": 9}
    )
    changed: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.1,
        "logit_bias": {"5": 1},
        "bad_words": ["no"],
        "do_sample": False,
    }
    neutral: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1, "presence_penalty": None, "samplers": []}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {caller.llm.api_key}"}) as session:
        for fields in ({}, neutral, neutral | changed):
            body = {"model": "fake", **asked, **fields}
            async with session.post(f"{caller.llm.endpoint}/{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
    triplets = TraceToTriplet().adapt(await caller.spans())
    assert [triplet.metadata.get("sampling") for triplet in triplets] == [None, None, changed]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_a_parameter_of_the_wrong_type_is_refused_in_every_dialect(caller: Caller, path: str) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {caller.llm.api_key}"}) as session:
        for name, value in (("top_k", "5"), ("min_p", [0.1]), ("bad_words", "no"), ("use_beam_search", 1)):
            body = {"model": "fake", "prompt": "hi", "input": "hi", "messages": say("hi"), "max_tokens": 9, name: value}
            async with session.post(f"{caller.llm.endpoint}/{path}", json=body) as answer:
                assert (answer.status, f"{name} must be" in await answer.text()) == (400, True)
