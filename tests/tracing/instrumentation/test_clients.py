"""A client that knows nothing of Leyden calls a model: in its own rollout, through its gateway; anything else is left alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

import leyden as ly
from leyden.agent.emitter import operation
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.tracing import DummyTracer, OtelTracer, TraceContext
from leyden.tracing.instrumentation import CallRoute, current_route, instrument, instrumentation_class
from leyden.types import AttemptedRollout, RolloutConfig, semconv

OPENAI = "https://api.openai.com/v1"
QUESTION: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
KEY = {"authorization": "Bearer sk-the-users-own"}


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


@pytest.fixture
async def proxy(upstream: FakeUpstream, store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        yield proxy


def attempt_of(proxy: LLMProxy, rollout: AttemptedRollout, tracer: OtelTracer) -> TraceContext:
    """As the runner opens one, and tells it where its gateway is."""
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    return tracer.trace_context(store=proxy.get_store(), **ids)


def go_by(proxy: LLMProxy, rollout: AttemptedRollout) -> None:
    route = current_route()
    assert route is not None
    route.base_url = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id).endpoint


async def by_httpx2(text: str) -> None:
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{OPENAI}/chat/completions", json=question(text), headers=KEY)
        assert answer.status_code == 200, answer.text


async def by_httpx2_in_a_thread(text: str) -> None:
    def call() -> None:
        with httpx2.Client(trust_env=False, base_url=OPENAI, headers=KEY) as client:
            assert client.post("/chat/completions", json=question(text)).status_code == 200

    await asyncio.to_thread(call)


async def by_aiohttp(text: str) -> None:
    async with (
        aiohttp.ClientSession(headers=KEY) as session,
        session.post(f"{OPENAI}/chat/completions", json=question(text)) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def by_openai(text: str) -> None:
    async with AsyncOpenAI(api_key="sk-the-users-own", max_retries=0) as client:
        await client.chat.completions.create(**question(text))


async def by_a_stream_in_a_thread(text: str) -> None:
    def call() -> None:
        with OpenAI(api_key="sk-the-users-own", max_retries=0) as client:
            for _ in client.chat.completions.create(**question(text), stream=True):
                pass

    thread = threading.Thread(target=call)
    thread.start()
    await asyncio.to_thread(thread.join)


CLIENTS: list[Callable[[str], Awaitable[None]]] = [
    by_httpx2,
    by_httpx2_in_a_thread,
    by_aiohttp,
    by_openai,
    by_a_stream_in_a_thread,
]


def question(text: str) -> dict[str, Any]:
    return {**QUESTION, "messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("call", CLIENTS)
async def test_a_call_to_a_model_host_is_recorded_in_its_attempt_below_its_step(
    call: Callable[[str], Awaitable[None]], proxy: LLMProxy, store: InMemoryLightningStore, upstream: FakeUpstream
):
    rollout = await store.start_rollout(None)
    async with attempt_of(proxy, rollout, OtelTracer(instrumentation=["httpx2", "aiohttp"])):
        go_by(proxy, rollout)
        with operation(name="step"):
            await call("hello")
    await proxy.flush(rollout.rollout_id, rollout.attempt.attempt_id)
    spans = {span.name: span for span in await store.query_spans(rollout.rollout_id)}
    assert set(spans) == {semconv.MODEL_CALL, semconv.OPERATION}
    recorded = spans[semconv.MODEL_CALL]
    assert recorded.tokens is not None
    assert recorded.tokens.response_ids == upstream.calls[-1].response_ids
    assert recorded.parent_id == spans[semconv.OPERATION].span_id
    sent = {name.lower(): value for name, value in upstream.calls[-1].headers.items()}
    assert rollout.rollout_id in sent["baggage"]
    assert "sk-the-users-own" not in str(sent)


async def test_256_rollouts_at_once_each_call_in_their_own(proxy: LLMProxy, store: InMemoryLightningStore):
    tracer = OtelTracer(instrumentation=["httpx2", "aiohttp"])
    rollouts = [await store.start_rollout(index) for index in range(256)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=32)) as session:
        limits = httpx2.Limits(max_connections=32)
        async with httpx2.AsyncClient(trust_env=False, limits=limits, timeout=50) as client:  # one client for all

            async def agent(rollout: AttemptedRollout) -> None:
                async with attempt_of(proxy, rollout, tracer):
                    go_by(proxy, rollout)
                    url = f"{OPENAI}/chat/completions"
                    (await client.post(url, json=question(f"httpx2 {rollout.input}"))).raise_for_status()
                    async with session.post(url, json=question(f"aiohttp {rollout.input}")) as answer:
                        answer.raise_for_status()
                        await answer.read()

            await asyncio.gather(*(agent(rollout) for rollout in rollouts))
    for rollout in rollouts:
        await proxy.flush(rollout.rollout_id, rollout.attempt.attempt_id)
        calls = await store.query_spans(rollout.rollout_id)
        said = [str(call.attributes[semconv.GEN_AI_INPUT_MESSAGES]) for call in calls]
        assert len(said) == 2
        assert f"httpx2 {rollout.input}" in said[0]
        assert f"aiohttp {rollout.input}" in said[1]


@pytest.fixture
async def echo() -> AsyncIterator[tuple[str, list[dict[str, str]]]]:
    """A server that is no model, and the headers that it got."""
    from aiohttp import web

    got: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        got.append({name.lower(): value for name, value in request.headers.items()} | {"path": request.path_qs})
        return web.Response(text="here")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}", got
    await runner.cleanup()


async def test_without_a_gateway_a_model_host_gets_the_trace_context_and_everyone_else_nothing(
    echo: tuple[str, list[dict[str, str]]],
):
    host, got = echo
    tracer = OtelTracer(model_hosts=[f"{host}/models"])
    async with httpx2.AsyncClient(trust_env=False) as client, aiohttp.ClientSession() as session:
        with tracer.trace_context() as trace, operation(name="step"):
            for path in ("models/v1/x?q=1", "other"):
                await client.get(f"http://{host}/{path}", headers=KEY)
                async with session.get(f"http://{host}/{path}", headers=KEY):
                    pass
        await client.get(f"http://{host}/models/v1/after")
    assert [request["path"] for request in got] == ["/models/v1/x?q=1"] * 2 + ["/other"] * 2 + ["/models/v1/after"]
    for request in got[:2]:
        assert trace.trace_id in request["traceparent"]
        assert request["baggage"] == trace.route.baggage()
        assert request["authorization"] == KEY["authorization"]
    for request in got[2:]:
        assert not {"traceparent", "baggage"} & set(request)


async def test_the_agents_own_trace_context_is_kept(echo: tuple[str, list[dict[str, str]]]):
    host, got = echo
    async with httpx2.AsyncClient(trust_env=False) as client:
        with OtelTracer(model_hosts=[host]).trace_context(), operation(name="step"):
            await client.get(f"http://{host}/", headers={"traceparent": "mine", "baggage": "mine too"})
    assert (got[0]["traceparent"], got[0]["baggage"]) == ("mine", "mine too")


ROUTE = {"base_url": "http://127.0.0.1:9/rollout/ro-1/attempt/at-1/v1", "api_key": "token"}


@pytest.mark.parametrize(
    ("url", "becomes"),
    [
        ("https://api.openai.com/v1/responses?a=b", "http://127.0.0.1:9/rollout/ro-1/attempt/at-1/v1/responses?a=b"),
        ("https://API.Anthropic.com:443/v1/messages", "http://127.0.0.1:9/rollout/ro-1/attempt/at-1/v1/messages"),
        ("https://openrouter.ai/api/v1/x", "http://127.0.0.1:9/rollout/ro-1/attempt/at-1/v1/x"),
        ("http://127.0.0.1:9/v1/x", "http://127.0.0.1:9/rollout/ro-1/attempt/at-1/v1/x"),
        ("http://127.0.0.1:9/rollout/ro-2/attempt/at-2/v1/x", "http://127.0.0.1:9/rollout/ro-2/attempt/at-2/v1/x"),
        ("https://openrouter.ai/v1/x", None),
        ("https://api.openai.com.evil.example/v1/x", None),
        ("https://example.com/?to=api.openai.com", None),
    ],
)
def test_where_a_request_goes(url: str, becomes: str | None):
    hosts = ("api.openai.com", "api.anthropic.com", "openrouter.ai/api")
    redirection = CallRoute("ro-1", "at-1", hosts, **ROUTE).redirect(url, {"x-api-key": "sk-own"})
    assert (redirection and redirection.url) == becomes
    if redirection is not None:
        assert redirection.headers["authorization"] == "Bearer token"
        assert redirection.headers["x-api-key"] == "token"


METHODS = [(httpx2.Client, "send"), (httpx2.AsyncClient, "send"), (aiohttp.ClientSession, "_request")]


def methods() -> list[Any]:
    return [vars(owner)[name] for owner, name in METHODS]


@pytest.fixture
def originals() -> Iterator[list[Any]]:
    originals = methods()
    yield originals
    assert methods() == originals


def test_nested_and_overlapping_blocks_patch_once_and_the_last_one_puts_back(originals: list[Any]):
    names = ("httpx2", "aiohttp")
    outer, inner, third = (instrument(*names) for _ in range(3))
    outer.__enter__()
    patched = methods()
    assert all(now is not before for now, before in zip(patched, originals, strict=True))
    inner.__enter__()
    assert methods() == patched
    outer.__exit__(None, None, None)
    assert methods() == patched
    third.__enter__()
    third.__exit__(None, None, None)
    assert all(instrumentation_class(name).installed() for name in names)
    inner.__exit__(None, None, None)
    assert methods() == originals
    assert not any(instrumentation_class(name).installed() for name in names)


def test_many_threads_that_open_and_close_leave_everything_as_it_was(originals: list[Any]):
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(50):
            with instrument("httpx2", "aiohttp"):
                assert instrumentation_class("httpx2").installed()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_trace_of_the_dummy_tracer_instruments_nothing(originals: list[Any]):
    with DummyTracer().trace_context():
        assert methods() == originals


def test_a_library_that_is_missing_is_left_out_and_an_unknown_name_is_refused():
    class Missing(instrumentation_class("httpx")):
        modules = ("no_such_library_at_all",)

    with Missing(), Missing():
        assert not Missing.installed()
    with pytest.raises(ConfigError, match="'openia' is not known; possible: 'httpx'"):
        OtelTracer(instrumentation=["openia"])


async def test_the_runner_tells_where_the_gateway_is(proxy: LLMProxy, store: InMemoryLightningStore):
    @ly.rollout
    async def agent(task: str) -> float:
        await by_openai(task)
        return 1.0

    await store.add_resources({"llm": proxy.as_resource()})
    rollout = await store.enqueue_rollout("hello", config=RolloutConfig(require_model_call=True))
    runner = ly.LitAgentRunner(max_rollouts=1)
    async with runner.run_context(agent=agent, store=store, recorders=[proxy]):
        await runner.iter()
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "succeeded"
