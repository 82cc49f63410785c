"""One client that is made in the first rollout and kept for all: no call is trained as one of another rollout, and every
message names the cause.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

import leyden as ly
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import Rollout, RolloutConfig, Span, semconv

openai = pytest.importorskip("openai")

from tests.gateway.caller import new_caller, say  # noqa: E402

N_ROLLOUTS = 4


class Wrapper:
    """A library's model object that makes its client once, as LangChain's do."""

    def __init__(self, llm: ly.LLM) -> None:
        self._client = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)

    async def invoke(self, text: str) -> None:
        await self._client.chat.completions.create(model="fake", messages=say(text))

    async def close(self) -> None:
        await self._client.close()


class InAThread:
    def __init__(self, llm: ly.LLM) -> None:
        self._client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0)

    async def invoke(self, text: str) -> None:
        await asyncio.to_thread(lambda: self._client.chat.completions.create(model="fake", messages=say(text)))

    async def close(self) -> None:
        self._client.close()


class Plain:
    def __init__(self, llm: ly.LLM) -> None:
        self._url = f"{llm.endpoint}/chat/completions"
        self._session = aiohttp.ClientSession()

    async def invoke(self, text: str) -> None:
        async with self._session.post(self._url, json={"model": "fake", "messages": say(text)}) as answer:
            assert answer.status == 200

    async def close(self) -> None:
        await self._session.close()


async def run_with_one_client(make: Callable[[ly.LLM], Any]) -> tuple[dict[str, Rollout], dict[str, list[Span]]]:
    """Run rollouts of which all use the client of the first one, which lasts until the others are over."""
    clients: list[Any] = []
    made, over, done = asyncio.Event(), asyncio.Event(), []

    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> float:
        if task == "first":
            clients.append(make(llm))
            await clients[0].invoke("first")
            made.set()
            await over.wait()
            return 1.0
        await made.wait()
        await clients[0].invoke(task)
        done.append(task)
        if len(done) == N_ROLLOUTS - 1:
            over.set()
        return 0.0

    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        resources = await store.add_resources({"main_llm": proxy.as_resource(model="fake")})
        config = RolloutConfig(require_reward=True, require_model_call=True)
        for task in ["first", *(f"other {number}" for number in range(1, N_ROLLOUTS))]:
            await store.enqueue_rollout(task, resources_id=resources.resources_id, config=config)
        runner = ly.LitAgentRunner(max_rollouts=N_ROLLOUTS, concurrency=N_ROLLOUTS)
        async with runner.run_context(agent=agent, store=store, recorders=[proxy]) as bound:
            await bound.iter()
        await clients[0].close()
        rollouts = {str(rollout.input): rollout for rollout in await store.query_rollouts()}
        spans = {
            task: list(await store.query_spans(rollout.rollout_id, name=semconv.MODEL_CALL))
            for task, rollout in rollouts.items()
        }
        reasons = {
            task: str((await store.query_attempts(rollout.rollout_id))[0].metadata.get("reason"))
            for task, rollout in rollouts.items()
        }
    for task, rollout in rollouts.items():
        rollout.metadata["seen"] = reasons[task]
    return rollouts, spans


@pytest.mark.parametrize("make", [Wrapper, InAThread, Plain])
async def test_calls_of_other_rollouts_through_the_first_ones_client_train_neither_and_all_say_why(
    make: Callable[[ly.LLM], Any], caplog: pytest.LogCaptureFixture
) -> None:
    rollouts, spans = await run_with_one_client(make)
    own, *foreign = sorted(spans["first"], key=lambda span: span.status.status_code == "ERROR")
    assert rollouts["first"].status == "succeeded"
    assert own.status.status_code == "OK"
    assert own.tokens is not None
    assert len(foreign) == N_ROLLOUTS - 1
    for span in foreign:
        assert span.tokens is None
        assert "make one in each rollout" in str(span.status.description)
        assert json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))
    for task in rollouts:
        if task != "first":
            assert rollouts[task].status == "failed"
            assert "make one in each rollout" in rollouts[task].metadata["seen"]
            assert rollouts["first"].rollout_id in rollouts[task].metadata["seen"]
    assert caplog.text.count("make one in each rollout") == 1
    triplets = ly.TraceToTriplet().adapt(spans["first"])
    assert [list(triplet.response.token_ids) for triplet in triplets] == [list(own.tokens.response_ids)]
    assert "other" not in str(ly.TraceToMessages().adapt(spans["first"]))


async def test_a_thread_that_outlives_its_rollout_calls_for_the_rollout_whose_address_it_has() -> None:
    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        over, current = await new_caller(proxy, store), await new_caller(proxy, store)
        proxy.end_attempt(over.rollout_id, over.attempt_id)
        of_thread = {
            "baggage": f"{semconv.ROLLOUT_ID}={over.rollout_id},{semconv.ATTEMPT_ID}={over.attempt_id}",
        }
        async with current.client as client:
            await client.chat.completions.create(model="fake", messages=say("hi"), extra_headers=of_thread)
        assert (await current.span()).tokens is not None
        assert await over.spans() == []
