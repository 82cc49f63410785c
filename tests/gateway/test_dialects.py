"""Every dialect through the gateway, with the clients that people use: the record is exact whatever was spoken."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import LLM, semconv
from tests.gateway.caller import new_caller
from tests.gateway.conversations import (
    AGENTS,
    KINDS,
    N_TURNS,
    STREAMS,
    Agents,
    Conversation,
    assert_exact,
    assert_same_answer,
    assert_trainable,
    converse,
    every_case,
    reply,
)


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
                answers = await converse(agents.new(name, caller.llm.endpoint, stream=stream), number, kind)
                return Conversation(name, stream, kind, answers, await caller.spans())

        return await asyncio.gather(*(one(number, *case) for number, case in enumerate(cases)))


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


@pytest.mark.parametrize("spoken", ["messages", "responses"])
async def test_a_server_that_speaks_one_dialect_is_told_the_same_by_agents_of_every_other(
    spoken: str,
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
