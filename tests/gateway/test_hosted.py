"""A gateway that runs where its model does asks it as a function, and is controlled from the process that reserved its port."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from leyden._lib.host.http import read_body, send_reply
from leyden.errors import ConfigError, GatewayError
from leyden.gateway import LLMProxy, UpstreamModel, hosted
from leyden.gateway.remote import RemoteRecorder
from leyden.store import InMemoryLightningStore
from leyden.types import ProxyLLM
from tests.gateway.caller import Caller, new_caller, say, until

URL = "http://127.0.0.1:9/v1"
"""Nothing listens there: whoever answers was called as a function."""


class Model:
    """A model's server, as an ASGI application."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fault = ""
        self.cancelled = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        request = json.loads(await read_body(headers, receive, max_bytes=2**20))
        self.requests.append({"path": scope["path"], "key": headers[b"authorization"], **request})
        if self.fault == "refuses":
            return await send_reply(send, b'{"error": {"message": "no such luck", "type": "bad"}}', status=400)
        if self.fault == "dies":
            raise RuntimeError("the model is broken")
        if self.fault == "is slow":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if not request.get("stream"):
            return await send_reply(
                send, json.dumps(answer({"message": {"role": "assistant", "content": "4"}})).encode()
            )
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        chunk = {**answer({"delta": {"role": "assistant", "content": "4"}}), "object": "chat.completion.chunk"}
        for data in (json.dumps(chunk), "[DONE]"):
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def answer(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = {"content": [{"token": "4", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    choice |= {"index": 0, "finish_reason": "stop", "token_ids": [4], "logprobs": logprobs}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    known = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
    return {**known, "choices": [choice], "prompt_token_ids": [1, 2], "usage": usage}


@asynccontextmanager
async def run_by(proxy: LLMProxy, model: Any) -> AsyncIterator[None]:
    """Run a reserved gateway beside a model, as another process would: from what can be pickled, on a socket of its own."""
    settings, listener = proxy.for_process()
    given = pickle.loads(pickle.dumps(settings))
    async with AsyncExitStack() as there:
        await there.enter_async_context(hosted.serve(given, os.dup(listener.fileno()), model, URL))
        proxy.run_by(there.aclose)
        await asyncio.to_thread(proxy.update_model_list, [UpstreamModel("policy", URL, api_key="secret")])
        yield


@pytest.fixture
async def model() -> Model:
    return Model()


@pytest.fixture
async def proxy(store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    proxy = LLMProxy(store=store)
    await proxy.reserve()
    yield proxy
    await proxy.stop()


@pytest.fixture
async def caller(proxy: LLMProxy, store: InMemoryLightningStore, model: Model) -> AsyncIterator[Caller]:
    async with run_by(proxy, model):
        caller = await new_caller(proxy, store)
        async with caller.client:
            yield caller


async def ask(caller: Caller, **options: Any) -> Any:
    return await caller.client.chat.completions.create(model="policy", messages=say("hello"), **options)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_answered_without_http_and_recorded_to_the_token(
    caller: Caller, model: Model, stream: bool
) -> None:
    reply = await ask(caller, stream=stream)
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])
    else:
        text = reply.choices[0].message.content
    assert text == "4"
    assert (model.requests[0]["path"], model.requests[0]["key"]) == ("/v1/chat/completions", b"Bearer secret")
    span = await caller.span()
    assert span.tokens is not None
    assert (span.tokens.prompt_ids, span.tokens.response_ids, span.tokens.logprobs) == ([1, 2], [4], [-0.5])


async def test_a_refusal_of_the_model_reaches_the_agent(caller: Caller, model: Model) -> None:
    model.fault = "refuses"
    with pytest.raises(openai.BadRequestError, match="no such luck"):
        await ask(caller)
    assert (await caller.span()).status.status_code == "ERROR"


async def test_a_model_that_ends_a_call_without_an_answer_is_an_error_of_the_server(
    caller: Caller, model: Model
) -> None:
    model.fault = "dies"
    with pytest.raises(openai.InternalServerError, match="without an answer"):
        await ask(caller)


async def test_a_call_that_the_agent_gives_up_is_cancelled_at_the_model(caller: Caller, model: Model) -> None:
    model.fault = "is slow"
    call = asyncio.create_task(ask(caller))
    await until(lambda: bool(model.requests))
    call.cancel()
    async with asyncio.timeout(10):
        await model.cancelled.wait()


async def test_it_is_controlled_from_the_process_that_reserved_its_port(caller: Caller, model: Model) -> None:
    proxy = caller.proxy
    await proxy.drain()
    call = asyncio.create_task(ask(caller))
    await asyncio.sleep(0.1)
    assert not model.requests
    await proxy.resume()
    await call
    await asyncio.to_thread(proxy.set_policy_version, "policy", 3)
    await ask(caller)
    versions = [span.tokens.policy_versions for span in await caller.spans() if span.tokens is not None]
    assert versions == [None, [3]]
    (status,) = await asyncio.to_thread(proxy.upstreams)
    assert (status.model_name, status.requests, status.healthy) == ("policy", 2, True)
    with pytest.raises(openai.APIStatusError, match="410"):
        await ask(caller)


def test_a_server_keeps_its_login_on_the_way_to_the_other_process() -> None:
    server = UpstreamModel("fake", "http://me:a%20secret%40@127.0.0.1:8000/v1", price_per_million=(1.0, 2.0))
    again = UpstreamModel(**hosted._written(server))
    assert again == server
    assert again.login == ("me", "a secret@")


async def test_calls_wait_while_no_process_runs_it_and_attempts_end_late(
    proxy: LLMProxy, store: InMemoryLightningStore, model: Model
) -> None:
    recorder = pickle.loads(pickle.dumps(proxy))
    assert isinstance(recorder, RemoteRecorder)
    rollout = await store.start_rollout({"task": 1})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    base = ProxyLLM(endpoint=proxy.endpoint, model="policy", api_key="none").with_attempted_rollout(*ids)
    async with openai.AsyncOpenAI(base_url=base.endpoint, api_key="none", max_retries=0) as client:
        for _ in range(2):  # the second process takes over after the first
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=say("hello")))
            done, _ = await asyncio.wait({call}, timeout=0.1)
            assert not done
            async with run_by(proxy, model):
                await call
                await proxy.leave()
            assert not proxy.is_running()
            await client.close()
            client = openai.AsyncOpenAI(base_url=base.endpoint, api_key="none", max_retries=0)
        async with run_by(proxy, model):
            await recorder.flush(*ids)
    assert len(await store.query_spans(*ids)) == 2


async def test_calls_wait_for_the_models_of_a_new_process(
    proxy: LLMProxy, store: InMemoryLightningStore, model: Model
) -> None:
    rollout = await store.start_rollout({"task": 1})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    base = ProxyLLM(endpoint=proxy.endpoint, model="policy", api_key="none").with_attempted_rollout(*ids)
    settings, listener = proxy.for_process()
    async with AsyncExitStack() as there:
        given = pickle.loads(pickle.dumps(settings))
        await there.enter_async_context(hosted.serve(given, os.dup(listener.fileno()), model, URL))
        proxy.run_by(there.aclose)
        async with openai.AsyncOpenAI(base_url=base.endpoint, api_key="none", max_retries=0) as client:
            call = asyncio.create_task(client.chat.completions.create(model="policy", messages=say("hello")))
            done, _ = await asyncio.wait({call}, timeout=0.3)
            assert not done, "the process has no model yet"
            await asyncio.to_thread(proxy.update_model_list, [UpstreamModel("policy", URL, api_key="secret")])
            assert (await call).choices


async def test_a_gateway_that_cannot_be_reached_is_named(caller: Caller) -> None:
    await caller.proxy.leave()
    caller.proxy.run_by(asyncio.Event().wait)  # type: ignore[arg-type]
    caller.proxy._reservation.listener.close()
    with pytest.raises(GatewayError, match="in the engine's process cannot be reached for models"):
        await asyncio.to_thread(caller.proxy.update_model_list, [])
    caller.proxy._running = None


async def test_a_gateway_without_a_store_reserves_no_port() -> None:
    with pytest.raises(ConfigError, match="no store to record calls in"):
        await LLMProxy().reserve()
