"""The tokens of a prompt are counted by the server that would answer it, or not at all."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Reply, ToolCall
from tests.gateway.caller import Caller, new_caller, say

ROUTES = {"messages": "messages/count_tokens", "responses": "responses/input_tokens"}
HEADERS = {"x-api-key": "EMPTY", "anthropic-version": "2023-06-01"}
TOOL: dict[str, Any] = {
    "messages": {"name": "f", "input_schema": {"type": "object", "properties": {"größe": {}}}},
    "responses": {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"größe": {}}}},
}
SPOKEN = [("chat", "completions"), ("messages",), ("responses",)]


def request_of(api: str, **fields: Any) -> dict[str, Any]:
    said = {"input": say("hello"), "instructions": "Be brief."} if api == "responses" else {"messages": say("hello")}
    return {"model": "fake", **said, "tools": [TOOL[api]], **({"system": "x"} if api == "messages" else {}), **fields}


async def post(caller: Caller, route: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{caller.llm.endpoint}/{route}", json=body, headers=HEADERS) as response,
    ):
        return response.status, await response.json()


def used(answer: dict[str, Any]) -> int:
    return answer["usage"]["input_tokens"]


@pytest.mark.parametrize("api", ROUTES)
@pytest.mark.parametrize("spoken", SPOKEN, ids=lambda each: each[0])
async def test_the_count_is_that_of_the_call(
    upstream: FakeUpstream, store: InMemoryLightningStore, api: str, spoken: tuple[str, ...]
) -> None:
    model = UpstreamModel("fake", upstream.endpoint, upstream_model=upstream.model, dialects=spoken)
    async with LLMProxy(model_list=[model], store=store) as proxy:
        caller = await new_caller(proxy, store)
        status, counted = await post(caller, ROUTES[api], request_of(api))
        if spoken[0] not in ("chat", api):
            assert status == 404
            assert "does not estimate" in counted["error"]["message"]
            return
        limit = {"max_tokens": 5} if api == "messages" else {}
        _, answer = await post(caller, api, request_of(api, **limit))
        assert (status, counted["input_tokens"]) == (200, used(answer))
        assert counted.get("object") == ("response.input_tokens" if api == "responses" else None)
        span = await caller.span()  # counting is no call
        assert span.attributes["leyden.call_index"] == 0


async def test_a_prompt_with_rewritten_calls_is_counted_as_the_server_gets_it(store: InMemoryLightningStore) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        return Reply(calls=(ToolCall("f", '{"a":1,   "b":2}'),))

    async with FakeUpstream(reply=reply) as upstream, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)
        body = request_of("messages", max_tokens=50)
        _, answer = await post(caller, "messages", body)
        result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": "ok"}
        body["messages"] += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        _, counted = await post(caller, ROUTES["messages"], body)
        assert counted["input_tokens"] == used((await post(caller, "messages", body))[1])


async def test_a_kept_conversation_is_counted_whole(caller: Caller) -> None:
    _, first = await post(caller, "responses", request_of("responses"))
    body = request_of("responses", previous_response_id=first["id"])
    _, counted = await post(caller, ROUTES["responses"], body)
    assert counted["input_tokens"] == used((await post(caller, "responses", body))[1])


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (web.json_response({"detail": "Not Found"}, status=404), "it answered 404 to /tokenize"),
        (web.json_response({"tokens": [1, 2]}), "has no count"),
        (web.json_response({"count": True}), "has no count"),
        (web.json_response([3]), "has no count"),
        (web.Response(text="<html>"), "has no count"),
    ],
)
async def test_a_server_that_cannot_count_is_a_404_with_its_reason(
    store: InMemoryLightningStore, answer: web.Response, part: str
) -> None:
    async def handle(_: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_post("/tokenize", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        model = UpstreamModel("fake", f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        async with LLMProxy(model_list=[model], store=store) as proxy:
            status, found = await post(await new_caller(proxy, store), ROUTES["messages"], request_of("messages"))
    finally:
        await runner.cleanup()
    assert status == 404
    assert part in found["error"]["message"]
    assert found["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({"model": "other"}, 404, "has no model 'other'"),
        ({"messages": 5}, 400, "messages must be a list"),
        ({"output_config": {"effort": "high"}}, 404, "effort"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "dropped_tools"),
    ],
)
async def test_a_prompt_that_would_be_refused_is_not_counted(
    caller: Caller, body: dict[str, Any], status: int, part: str
) -> None:
    found = await post(caller, ROUTES["messages"], request_of("messages", **body))
    assert found[0] == status
    assert part in found[1]["error"]["message"]
    assert await caller.spans() == []


async def test_counting_belongs_to_an_attempt_that_is_under_way(proxy: LLMProxy, caller: Caller) -> None:
    await caller.store.update_attempt(caller.rollout_id, caller.attempt_id, status="succeeded")
    proxy.end_attempt(caller.rollout_id, caller.attempt_id)
    assert (await post(caller, ROUTES["messages"], request_of("messages")))[0] in (404, 410)
