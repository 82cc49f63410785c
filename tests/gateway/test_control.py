"""Calls that wait, are limited, changed or written before their last byte, because whoever runs the gateway says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from leyden.errors import ConfigError, GatewayError, StoreError
from leyden.gateway import AttemptLimits, LLMProxy, RemoteGateway, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import Span, semconv
from tests.gateway.caller import Caller, new_caller, say, until


async def ask(caller: Caller, *, stream: bool = False, **options: Any) -> str:
    create: Any = caller.client.chat.completions.create
    answer = await create(model="fake", messages=say("hello"), stream=stream, **options)
    if not stream:
        return answer.id
    return [chunk.id async for chunk in answer][-1]


async def ask_for_ever(caller: Caller) -> None:
    for _ in range(100):
        await ask(caller)


async def test_paused_calls_wait_and_go_on(caller: Caller, upstream: FakeUpstream) -> None:
    await caller.proxy.pause()
    calls = [asyncio.create_task(ask(caller)) for _ in range(4)]
    await asyncio.sleep(0.1)
    assert not upstream.requests
    await caller.proxy.resume()
    assert len(set(await asyncio.gather(*calls))) == 4
    assert all(span.tokens for span in await caller.spans())


async def test_drain_waits_for_the_calls_at_the_model_and_lets_no_other_there(
    caller: Caller, upstream: FakeUpstream
) -> None:
    upstream.misbehave(Misbehaviour(delay_seconds=0.3))
    first = asyncio.create_task(ask(caller))
    await until(upstream.requests.copy)
    drained = asyncio.create_task(caller.proxy.drain())
    await asyncio.sleep(0.05)
    second = asyncio.create_task(ask(caller))
    await drained
    assert len(upstream.calls) == len(upstream.requests) == 1
    await caller.proxy.resume()
    await asyncio.gather(first, second)
    assert len(upstream.calls) == 2


async def test_a_call_that_waited_too_long_is_429_with_retry_after(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, pause_wait_seconds=0.05) as proxy:
        caller = await new_caller(proxy, store)
        await proxy.pause()
        async with caller.client:
            with pytest.raises(openai.RateLimitError, match="pause_wait_seconds") as caught:
                await ask(caller)
        assert caught.value.response.headers["retry-after"] == "1"
        assert "x-should-retry" not in caught.value.response.headers
        assert "paused" in str((await caller.span()).status.description)


async def test_a_gateway_that_is_not_running_holds_no_calls(upstream: FakeUpstream) -> None:
    with pytest.raises(GatewayError, match="start it"):
        await LLMProxy(model_list=[upstream.llm()]).pause()


@pytest.mark.parametrize(
    ("limits", "word"),
    [(AttemptLimits(calls=2), "calls"), (AttemptLimits(tokens=30), "tokens"), (AttemptLimits(cost=3e-5), "cost")],
)
async def test_an_attempt_that_has_spent_its_share_is_refused_and_its_siblings_are_not(
    upstream: FakeUpstream, store: InMemoryLightningStore, limits: AttemptLimits, word: str
) -> None:
    model = UpstreamModel(model_name="fake", endpoint=upstream.endpoint, price_per_million=(1.0, 1.0))
    async with LLMProxy(model_list=[model], store=store, attempt_limits=limits) as proxy:
        caller, sibling = await new_caller(proxy, store), await new_caller(proxy, store)
        async with caller.client, sibling.client:
            with pytest.raises(openai.RateLimitError, match=rf"spent its {word}") as caught:
                await ask_for_ever(caller)
            assert caught.value.response.headers["x-should-retry"] == "false"
            await ask(sibling)
        *answered, refused = await caller.spans()
        assert all(span.tokens for span in answered)
        assert f"spent its {word}" in str(refused.status.description)
        spent = [span.tokens for span in answered if span.tokens]
        total = [len(tokens.prompt_ids) + len(tokens.response_ids) for tokens in spent]
        assert [span.attributes["leyden.cost"] for span in answered] == pytest.approx([n / 1e6 for n in total])
        attempt = await store.get_latest_attempt(caller.rollout_id)
        assert attempt is not None
        assert attempt.prompt_tokens + attempt.response_tokens == sum(total)
        assert attempt.cost == pytest.approx(sum(total) / 1e6)
        if word != "calls":
            assert sum(total[:-1]) < 30 <= sum(total)
        else:
            assert len(answered) == 2


def under_way(proxy: LLMProxy) -> Any:
    assert proxy._running is not None
    return proxy._running.app._calls


@pytest.mark.parametrize(
    ("limits", "passed"), [(AttemptLimits(calls=5), 5), (AttemptLimits(tokens=1), 12), (AttemptLimits(cost=1e-9), 12)]
)
async def test_calls_at_once_are_counted_exactly_and_what_they_spend_when_they_are_answered(
    upstream: FakeUpstream, store: InMemoryLightningStore, limits: AttemptLimits, passed: int
) -> None:
    model = UpstreamModel(model_name="fake", endpoint=upstream.endpoint, price_per_million=(1.0, 1.0))
    async with LLMProxy(model_list=[model], store=store, attempt_limits=limits) as proxy:
        caller = await new_caller(proxy, store)
        await proxy.pause()  # until all of them are under way
        async with caller.client:
            calls = [asyncio.create_task(ask(caller)) for _ in range(12)]
            refused = 12 - passed
            await until(lambda: sum(call.done() for call in calls) == refused and len(under_way(proxy)) == passed)
            await proxy.resume()
            told = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(one) for one in told].count(str) == passed
            assert sum(isinstance(one, openai.RateLimitError) for one in told) == refused
            with pytest.raises(openai.RateLimitError, match="spent its"):
                await ask(caller)
        assert len(upstream.calls) == passed


async def test_overrides_are_of_one_mode_alone(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    overrides = {"val": {"temperature": 0, "top_p": 1}, "live": {"temperature": 0.1}}
    async with LLMProxy(model_list=[upstream.llm()], store=store, sampling_overrides=overrides) as proxy:
        for mode in ("train", "val", "live", None):
            rollout = await store.start_rollout({}, mode=mode)
            caller = Caller(proxy, store, rollout.rollout_id, rollout.attempt.attempt_id)
            async with caller.client:
                await ask(caller, temperature=0.7)
            temperature = (await caller.span()).attributes[f"{semconv.GEN_AI_REQUEST_PREFIX}.temperature"]
            assert temperature == upstream.requests[-1]["temperature"] == {"val": 0, "live": 0.1}.get(str(mode), 0.7)


def test_an_override_of_the_wrong_type_is_refused_before_any_call() -> None:
    with pytest.raises(ConfigError, match=r"sampling_overrides of mode 'train': top_p must be a number, got \"0.5\""):
        LLMProxy(sampling_overrides={"train": {"top_p": "0.5"}})


class Gatekeeper(InMemoryLightningStore):
    """A store that fails to write, when told so."""

    broken = False

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await asyncio.sleep(0.02)
        if self.broken:
            raise StoreError("disk full")
        return await super().add_many_spans(spans)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_durable_answer_is_in_the_store_when_it_is_whole(upstream: FakeUpstream, stream: bool) -> None:
    async with Gatekeeper() as store, LLMProxy(model_list=[upstream.llm()], store=store, durable=True) as proxy:
        caller = await new_caller(proxy, store)
        async with caller.client:
            for number in range(1, 4):
                await ask(caller, stream=stream)
                assert len(await store.query_spans(caller.rollout_id)) == number
            store.broken = True
            with pytest.raises(openai.APIError, match="could not be recorded"):
                await ask(caller, stream=stream)
        with pytest.raises(StoreError, match="disk full"):
            await caller.spans()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempt_limits": AttemptLimits(cost=1)}, "'m'.*price_per_million"),
        ({"sampling_overrides": {"eval": {}}}, "'eval'.*'val'"),
        ({"sampling_overrides": {"val": {"stop": {"a set"}}}}, "mode 'val' are not JSON"),
        ({"pause_wait_seconds": 0}, "pause_wait_seconds is 0"),
        ({"upstream_retries": -1}, "upstream_retries is -1"),
        ({"keep_alive_seconds": 0}, "keep_alive_seconds is 0"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMProxy(model_list=[{"model_name": "m", "endpoint": "http://x/v1"}], **options)
    with pytest.raises(ConfigError, match="calls is 0"):
        AttemptLimits(calls=0)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


async def test_an_operator_controls_a_gateway_over_http(upstream: FakeUpstream, store: InMemoryLightningStore) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        proxy.share_control("secret")
        gateway = RemoteGateway(proxy.endpoint, "secret")
        model = {"model_name": "fake", "endpoint": upstream.endpoint, "policy_version": None}
        idle = {"paused": False, "calls_waiting": 0, "calls_at_models": 0, "records_pending": 0, "models": [model]}
        assert await gateway.state() == idle
        assert (await gateway.pause())["paused"]
        caller = await new_caller(proxy, store)
        async with caller.client:
            call = asyncio.create_task(ask(caller))

            async def waits() -> int:
                return (await gateway.state())["calls_waiting"]

            await until(waits)
            assert (await gateway.drain())["calls_at_models"] == 0
            assert not call.done()
            assert not (await gateway.resume())["paused"]
            assert await call
            changed = await gateway.update_model_list(
                [{"model_name": "other", "endpoint": upstream.endpoint, "api_key": "k"}]
            )
            assert [model["model_name"] for model in changed["models"]] == ["other"]
            assert "k" not in str(changed)
            with pytest.raises(openai.NotFoundError, match="fake"):
                await ask(caller)


@pytest.mark.parametrize("secret", [None, "", "wrong"])
async def test_a_gateway_obeys_its_control_key_alone(
    upstream: FakeUpstream, store: InMemoryLightningStore, secret: str | None
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        proxy.share_control("secret")
        refused, admitted = RemoteGateway(proxy.endpoint, secret), RemoteGateway(proxy.endpoint, "secret")
        with pytest.raises(GatewayError, match="operator"):
            await refused.pause()
        assert not (await admitted.state())["paused"]


async def test_a_wrong_command_is_refused_and_changes_nothing(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        proxy.share_control("secret")
        gateway = RemoteGateway(proxy.endpoint, "secret")
        before = await gateway.state()
        wrong: Any = [{"model_name": "x", "endpoint": 7}]
        for refused, message in (
            (gateway.update_model_list(wrong), "endpoint"),
            (gateway.update_model_list([{"model_name": "x", "endpoint": "ftp://x"}]), "base URL"),
            (gateway.set_policy_version("nobody", 1), "'nobody'.*'fake'"),
            (gateway.set_policy_version("fake", -1), "at least 0"),
            (gateway._ask("POST", "stop"), "pause, drain, resume"),
            (gateway._ask("GET", "pause"), "no route GET"),
        ):
            with pytest.raises(GatewayError, match=message):
                await refused
        assert await gateway.state() == before
    with pytest.raises(GatewayError, match="cannot be reached"):
        await gateway.state()


async def test_a_call_has_the_version_of_the_weights_that_the_gateway_was_told(
    store: InMemoryLightningStore,
) -> None:
    async with (
        FakeUpstream(policy_version=None) as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        async with caller.client:
            await ask(caller)
            proxy.set_policy_version("fake", 3)
            await ask(caller)
            upstream._delay_seconds = 0.3
            slow = asyncio.create_task(ask(caller))
            await until(lambda: proxy._running is not None and proxy._running.control.gate.inside)
            proxy.set_policy_version("fake", 4)
            await slow
            proxy.set_policy_version("fake", None)
            upstream._delay_seconds = 0.0
            await ask(caller)
        told = [
            (span.attributes.get("leyden.policy_version"), span.attributes.get("leyden.policy_version.at_end"))
            for span in await caller.spans()
        ]
        assert told == [(None, None), (3, None), (3, 4), (None, None)]
        versions = [span.tokens.policy_versions for span in await caller.spans() if span.tokens]
        assert [set(each or ()) for each in versions] == [set(), {3}, {3}, set()]
