"""Every dialect through the gateway, with the clients that people use: the record is exact whatever was spoken."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI

from leyden import semconv
from leyden.adapter import TraceToTrajectory
from leyden.dialects import DialectName
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, ServedCall
from leyden.types import LLM, Span
from tests.gateway.caller import Caller, new_caller
from tests.gateway.conversations import (
    KINDS,
    N_TURNS,
    Answer,
    ChatAgent,
    CompletionsAgent,
    MessagesAgent,
    ResponsesAgent,
    converse,
    reply,
)

HAS_ANTHROPIC = importlib.util.find_spec("anthropic") is not None
AGENTS = ("chat", "completions", "responses", "responses by id", *(("messages",) if HAS_ANTHROPIC else ()))
STREAMS = (False, True)


class Agents:
    """Agents in every dialect. The clients are shared, as programs do; each agent has its own base URL."""

    def __init__(self) -> None:
        options: Any = {"base_url": "http://nowhere", "api_key": "EMPTY", "max_retries": 0, "timeout": 120}
        self.openai = AsyncOpenAI(**options)
        self.anthropic: Any = None
        if HAS_ANTHROPIC:
            from anthropic import AsyncAnthropic

            self.anthropic = AsyncAnthropic(**options)

    async def __aenter__(self) -> Agents:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.openai.close()
        if HAS_ANTHROPIC:
            await self.anthropic.close()

    def new(self, name: str, caller: Caller, *, stream: bool) -> Any:
        url = caller.llm.endpoint
        if name == "messages":
            return MessagesAgent(self.anthropic.with_options(base_url=url.removesuffix("/v1")), stream=stream)
        client = self.openai.with_options(base_url=url)
        if name.startswith("responses"):
            return ResponsesAgent(client, stream=stream, stateful=name == "responses by id")
        return (ChatAgent if name == "chat" else CompletionsAgent)(client, stream=stream)


@dataclass(frozen=True)
class Conversation:
    """One conversation, as its agent saw it and as it was recorded."""

    name: str
    stream: bool
    kind: str
    answers: list[Answer]
    spans: list[Span]


async def talk(
    model: UpstreamModel | LLM, cases: Sequence[tuple[str, bool, str]], *, at_once: int = 16
) -> list[Conversation]:
    """All `cases` through one gateway, many at once, each in an attempt of its own."""
    limit = asyncio.Semaphore(at_once)
    async with (
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[model], store=store) as proxy,
        Agents() as agents,
    ):

        async def one(number: int, name: str, stream: bool, kind: str) -> Conversation:
            async with limit:
                caller = await new_caller(proxy, store)
                answers = await converse(agents.new(name, caller, stream=stream), number, kind)
                return Conversation(name, stream, kind, answers, await caller.spans())

        return await asyncio.gather(*(one(number, *case) for number, case in enumerate(cases)))


def every_case(n: int, names: Sequence[str]) -> list[tuple[str, bool, str]]:
    """`n` cases, each agent with and without a stream and with every kind in turn."""
    cases = itertools.cycle(itertools.product(names, STREAMS, KINDS))
    return [
        (name, stream, "rewritten context" if name == "completions" else kind)
        for name, stream, kind in itertools.islice(cases, n)
    ]


def assert_exact(span: Span, truth: ServedCall, answer: Answer) -> None:
    assert span.status.status_code == "OK"
    assert span.tokens is not None, span.attributes.get(semconv.TOKENS_REFUSED)
    assert list(span.tokens.prompt_ids) == truth.prompt_ids
    assert list(span.tokens.response_ids) == truth.response_ids
    assert span.tokens.logprobs == truth.logprobs
    assert_same_answer(truth, answer)


def assert_same_answer(truth: ServedCall, answer: Answer) -> None:
    assert truth.response_id == answer.response_id
    assert truth.prompt_ids == answer.prompt_ids
    assert (truth.text, truth.reasoning) == (answer.text, answer.reasoning)
    arguments = [(call.call_id, call.name, json.loads(call.arguments)) for call in truth.calls]
    assert arguments == answer.calls
    assert answer.n_response in (len(truth.response_ids), None)


def assert_trainable(conversation: Conversation, truths: list[ServedCall]) -> None:
    """Each turn goes on from the one before it, to the id, but where the agent rewrote its context; and what is trained is what
    was sampled."""
    trajectories = TraceToTrajectory().adapt(conversation.spans)
    assert len(trajectories) == (2 if conversation.kind == "rewritten context" else 1)
    trained = [
        (id_, logprob)
        for one in trajectories
        for id_, mask, logprob in zip(one.token_ids, one.loss_mask, one.logprobs, strict=True)
        if mask
    ]
    assert trained == [pair for call in truths for pair in zip(call.response_ids, call.logprobs, strict=True)]


async def check_records(n_conversations: int) -> None:
    async with FakeUpstream(reply=reply) as upstream:
        conversations = await talk(upstream.llm(), every_case(n_conversations, AGENTS))
        truths = {call.response_id: call for call in upstream.calls}
    assert len(truths) == n_conversations * N_TURNS
    assert len(conversations) == n_conversations
    for one in conversations:
        assert len(one.spans) == len(one.answers) == N_TURNS
        found = [truths.pop(str(span.attributes[semconv.GEN_AI_RESPONSE_ID])) for span in one.spans]
        for span, truth, answer in zip(one.spans, found, one.answers, strict=True):
            assert_exact(span, truth, answer)
        if one.name != "completions":  # whose agent is its own chat template, without the end of an answer
            assert_trainable(one, found)


async def test_conversations_in_every_dialect_are_recorded_to_the_exact_token() -> None:
    await check_records(len(AGENTS) * len(STREAMS) * len(KINDS))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_ten_thousand_conversations_have_no_wrong_token() -> None:
    """The clients' own work takes most of the time, so it is shared out over the processors."""
    n_processes = min(8, os.cpu_count() or 1)
    with ProcessPoolExecutor(n_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(check_many, [10_000 // n_processes] * n_processes))


def check_many(n_conversations: int) -> None:
    asyncio.run(check_records(n_conversations))


@pytest.mark.parametrize("spoken", ["messages", "responses"])
async def test_a_server_that_speaks_one_dialect_is_told_the_same_by_agents_of_every_other(
    spoken: DialectName,
) -> None:
    names = tuple(name for name in ("chat", "responses", "messages") if name in AGENTS)
    async with FakeUpstream(reply=reply) as upstream:
        model = UpstreamModel("fake", upstream.endpoint, api_key="k", record_tokens=False, dialects=(spoken,))
        conversations = await talk(model, every_case(len(names) * len(STREAMS) * len(KINDS), names))
        truths = {call.response_id: call for call in upstream.calls}
    assert {call.path for call in truths.values()} == {f"/v1/{spoken}"}
    for one in conversations:
        found = [truths[answer.response_id] for answer in one.answers]
        assert [span.attributes[semconv.GEN_AI_RESPONSE_ID] for span in one.spans] == [
            truth.response_id for truth in found
        ]
        for span, truth, answer in zip(one.spans, found, one.answers, strict=True):
            assert_same_answer(truth, answer)
            assert span.tokens is None
            assert "return_token_ids" in str(span.attributes[semconv.TOKENS_REFUSED])
        for before, after in itertools.pairwise(found if one.kind != "rewritten context" else found[:1]):
            said = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(said)] == said
