"""What calls cost: by a file of prices, with cached tokens, and unknown wherever a token or its price is not known."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from leyden.errors import ConfigError
from leyden.gateway import AttemptLimits, LLMProxy, Price, Prices, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import Attempt, semconv
from tests.gateway.caller import Caller, new_caller, say, until

FILE = """
currency: USD
models:
  fake: {prompt: 2, cached: 0.5, answer: 10}
  fake-*: {prompt: 1, answer: 1}
"""


async def ask(caller: Caller, **options: Any) -> Any:
    create: Any = caller.client.chat.completions.create
    answer = await create(model="fake", messages=say("hello"), **options)
    return [chunk async for chunk in answer] if options.get("stream") else answer


async def attempt_of(caller: Caller, store: InMemoryLightningStore) -> Attempt:
    await caller.spans()  # waits until all of them are stored
    attempt = await store.get_latest_attempt(caller.rollout_id)
    assert attempt is not None
    return attempt


def answer_with(usage: Any) -> Misbehaviour:
    message = {"role": "assistant", "content": "yes"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [choice],
        "usage": usage,
    }
    return Misbehaviour(body=json.dumps(answer).encode())


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_a_file_prices_names_before_patterns_and_patterns_in_their_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"prices.{suffix}"
    content = {"models": {"gpt-*": {"prompt": 1, "answer": 2}, "gpt-4*": {"prompt": 3, "answer": 4}}}
    content["models"]["gpt-4.1"] = {"prompt": 5, "answer": 6}
    written = {
        "yaml": json.dumps(content),
        "json": json.dumps(content),
        "toml": '[models]\n"gpt-*" = {prompt = 1, answer = 2}\n"gpt-4*" = {prompt = 3, answer = 4}\n'
        '"gpt-4.1" = {prompt = 5, answer = 6}\n',
    }
    path.write_text(written[suffix])
    prices = Prices.of(path)
    assert [prices.of_model(name) for name in ("gpt-4.1", "gpt-4.1-mini", "other")] == [Price(5, 6), Price(1, 2), None]
    assert prices.of_model("mine", "gpt-4.1") == Price(5, 6)  # the server's own name for it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {m: {prompt: 1}}", "prices.yaml: m is .*prompt.*give the prices"),
        ("models: {m: 3}", "prices.yaml: m is 3"),
        ("models: {m: {prompt: -1, answer: 1}}", "prices.yaml: m: prompt is -1"),
        ("models: {m: {prompt: 1, answer: .nan}}", "prices.yaml: m: answer is nan"),
        ("models: {m: {prompt: 1, answer: null}}", "prices.yaml: m: answer is None"),
        ("models: {m: {prompt: 1, answer: 1, chached: 1}}", "'chached'; did you mean 'cached'"),
        ("model: {m: {prompt: 1, answer: 1}}", "section models"),
        ("models: {}\nunit: USD", "section models"),
        ("models: []", "section models"),
    ],
)
def test_prices_that_cannot_be_read_are_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises((ConfigError, TypeError), match=words):
        LLMProxy(prices=path)


@pytest.mark.parametrize("given", [(1,), (1, 2, 3, 4), "1,2", {"prompt": 1}, (1, "2")])
def test_the_price_of_one_model_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"model_list: price_per_million of 'm'"):
        UpstreamModel("m", "http://127.0.0.1:1/v1", price_per_million=given)


# ---- one call --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"prompt_tokens": 1000, "completion_tokens": 100}, 2 * 1000 + 10 * 100),
        (
            {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 800}},
            2 * 200 + 0.5 * 800 + 10 * 100,
        ),
        (
            {
                "prompt_tokens": 1000,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 300},
            },
            2 * 600 + 0.5 * 100 + 2.5 * 300,
        ),
        ({"prompt_tokens": 7, "total_tokens": 7}, 2 * 7),  # embeddings
        ({"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": None}, 24),
        ({"prompt_tokens": 7}, None),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None),  # a usage that counts nothing is none
        ({"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 6}}, None),
        ({"prompt_tokens": -5, "completion_tokens": 1}, None),
        ({"prompt_tokens": True, "completion_tokens": 1}, None),
        ({"prompt_tokens": 5.5, "completion_tokens": 1}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_call_costs_what_its_usage_proves(usage: Any, cost: float | None) -> None:
    found = Price(prompt=2, answer=10, cached=0.5, cache_write=2.5).cost(usage)
    assert found == (None if cost is None else pytest.approx(cost / 1e6, rel=1e-12))


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(FILE)
    return path


async def test_each_call_is_recorded_with_its_cost_and_cached_tokens_are_cheaper(
    upstream: FakeUpstream, store: InMemoryLightningStore, prices: Path
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, prices=prices) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            usage = (await ask(caller)).usage
            details = {"prompt_tokens_details": {"cached_tokens": 90}}
            upstream.misbehave(
                answer_with({"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107, **details})
            )
            await ask(caller)
            await ask(caller, stream=True, stream_options={"include_usage": True})
        costs = [cast(float, span.attributes[semconv.COST]) for span in await caller.spans()]
        plain = (2 * usage.prompt_tokens + 10 * usage.completion_tokens) / 1e6
        assert costs[:2] == pytest.approx([plain, (2 * 10 + 0.5 * 90 + 10 * 7) / 1e6])
        attempt = await attempt_of(caller, store)
        assert (attempt.cost, attempt.unpriced_calls) == (pytest.approx(sum(costs)), 0)


async def test_a_models_own_price_takes_precedence(
    upstream: FakeUpstream, store: InMemoryLightningStore, prices: Path
) -> None:
    model = UpstreamModel("fake", upstream.endpoint, price_per_million=(0, 0))
    async with LLMProxy(model_list=[model], store=store, prices=prices) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller)
        assert (await attempt_of(caller, store)).cost == 0.0


# ---- costs that are not known ----------------------------------------------------------------------------------------


async def test_an_answer_without_usage_has_no_cost_and_the_sum_of_its_attempt_says_so(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    model = UpstreamModel("fake", upstream.endpoint, price_per_million=(1, 1), record_tokens=False)
    async with LLMProxy(model_list=[model], store=store) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller)
            upstream.misbehave(Misbehaviour(no_usage=True))
            await ask(caller)
            await ask(caller, stream=True)  # OpenAI's servers send a stream's usage only if asked
        first, *others = await caller.spans()
        assert semconv.COST in first.attributes
        for span in others:
            assert semconv.COST not in span.attributes
            assert "no usage" in str(span.attributes[semconv.COST_UNKNOWN])
        attempt = await attempt_of(caller, store)
        assert (attempt.cost, attempt.unpriced_calls) == (first.attributes[semconv.COST], 2)


async def test_a_model_without_a_price_costs_an_unknown_amount_and_not_nothing(
    caller: Caller, store: InMemoryLightningStore
) -> None:
    await ask(caller)
    attempt = await attempt_of(caller, store)
    assert (attempt.cost, attempt.unpriced_calls) == (None, 1)


async def test_calls_that_were_not_answered_cost_nothing(store: InMemoryLightningStore, upstream: FakeUpstream) -> None:
    model = UpstreamModel("fake", upstream.endpoint, price_per_million=(1, 1))
    gone = UpstreamModel("gone", "http://127.0.0.1:1/v1", price_per_million=(1, 1))
    async with LLMProxy(model_list=[model], store=store, upstream_retries=0) as proxy:
        caller = await new_caller(proxy, store)
        proxy.update_model_list([model, gone])
        async with caller.client:
            upstream.misbehave(Misbehaviour(status=429), Misbehaviour(status=500), Misbehaviour(status=400))
            for _ in range(3):
                with pytest.raises(openai.APIStatusError):
                    await ask(caller)
            create: Any = caller.client.chat.completions.create
            for name in ("gone", "never heard of"):
                with pytest.raises(openai.APIStatusError):
                    await create(model=name, messages=say("hello"))
        attempt = await attempt_of(caller, store)
        assert (attempt.cost, attempt.unpriced_calls) == (None, 0)


async def test_a_call_that_was_tried_at_several_servers_is_paid_once_at_the_one_that_answered(
    store: InMemoryLightningStore, upstream: FakeUpstream
) -> None:
    async with FakeUpstream() as other:
        upstream.misbehave(Misbehaviour(status=503))
        models = [
            UpstreamModel("fake", upstream.endpoint, price_per_million=(1e6, 1e6)),
            UpstreamModel("fake", other.endpoint, price_per_million=(3e6, 3e6)),
        ]
        async with LLMProxy(model_list=models, store=store, upstream_retries=2) as proxy:
            caller = await new_caller(proxy, store)
            async with caller.client:
                usage = (await ask(caller)).usage
            attempt = await attempt_of(caller, store)
            assert (len(upstream.requests), len(other.calls)) == (1, 1)
            assert (attempt.cost, attempt.unpriced_calls) == (pytest.approx(3 * usage.total_tokens), 0)


@pytest.mark.parametrize("how", ["timeout", "hung up", "broken stream"])
async def test_a_call_that_was_given_up_may_be_billed_so_its_cost_is_unknown(
    store: InMemoryLightningStore, upstream: FakeUpstream, how: str
) -> None:
    model = UpstreamModel("fake", upstream.endpoint, price_per_million=(1, 1))
    seconds = 0.2 if how == "timeout" else 600.0
    async with LLMProxy(model_list=[model], store=store, timeout_seconds=seconds, upstream_retries=0) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            if how == "broken stream":
                upstream.misbehave(Misbehaviour(close_after_chunks=2))
                with pytest.raises(Exception, match=r".*"):
                    await ask(caller, stream=True)
            else:
                upstream.misbehave(Misbehaviour(delay_seconds=30))
                call = asyncio.create_task(ask(caller))
                await until(upstream.requests.copy)
                if how == "hung up":
                    call.cancel()
                with contextlib.suppress(openai.APIError, asyncio.CancelledError):
                    await call
        await until(caller.spans)
        attempt = await attempt_of(caller, store)
        assert (attempt.cost, attempt.unpriced_calls) == (None, 1)


async def test_an_attempt_with_a_limit_on_cost_ends_with_the_first_call_of_unknown_cost(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    model = UpstreamModel("fake", upstream.endpoint, price_per_million=(1, 1), record_tokens=False)
    async with LLMProxy(model_list=[model], store=store, attempt_limits=AttemptLimits(cost=1)) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller, stream=True)
            with pytest.raises(openai.RateLimitError, match=r"cost=1 cannot be kept.*include_usage"):
                await ask(caller)


# ---- a run -----------------------------------------------------------------------------------------------------------


async def test_a_gateway_refuses_two_price_lists() -> None:
    proxy = LLMProxy(prices={"models": {"m": {"prompt": 1, "answer": 1}}})
    with pytest.raises(ConfigError, match="prices of its own"):
        proxy.set_prices(Prices({"m": Price(2, 2)}))
