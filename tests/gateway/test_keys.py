"""Where a call belongs, said by the URL, the key or headers; and who may say so."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from leyden._lib.attempt_key import attempt_key, read_attempt_key
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from tests.gateway.caller import Caller, new_caller, say


@pytest.fixture
async def guarded(upstream: FakeUpstream, store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    async with LLMProxy(model_list=[upstream.llm()], store=store, token="sesame") as proxy:
        yield proxy


async def call(base_url: str, api_key: str, **headers: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, default_headers=headers) as client:
        await client.chat.completions.create(model="fake", messages=say("hello"))


@pytest.mark.parametrize("path", ["/v1", ""])
async def test_a_key_routes_and_authenticates_where_the_url_has_no_ids(
    guarded: LLMProxy, store: InMemoryLightningStore, path: str
) -> None:
    one, other = await new_caller(guarded, store), await new_caller(guarded, store)
    root = guarded.endpoint.removesuffix("/v1")
    await call(root + path, guarded.make_key(one.rollout_id, one.attempt_id))
    assert (await one.span()).tokens is not None
    assert not await other.spans()


async def test_the_llm_of_an_attempt_carries_its_key_and_not_the_token(
    guarded: LLMProxy, store: InMemoryLightningStore
) -> None:
    caller = await new_caller(guarded, store)
    assert caller.llm.api_key == guarded.make_key(caller.rollout_id, caller.attempt_id)
    assert "sesame" not in caller.llm.model_dump_json()


async def test_a_key_opens_no_other_attempt(
    guarded: LLMProxy, store: InMemoryLightningStore, upstream: FakeUpstream
) -> None:
    one, other = await new_caller(guarded, store), await new_caller(guarded, store)
    with pytest.raises(openai.PermissionDeniedError, match=other.attempt_id) as caught:
        await call(other.llm.endpoint, one.llm.api_key or "")
    assert caught.value.code == "wrong_attempt"
    # headers do not help it out of its own attempt either
    headers = {"x-leyden-rollout": other.rollout_id, "x-leyden-attempt": other.attempt_id}
    await call(guarded.endpoint, one.llm.api_key or "", **headers)
    assert len(await one.spans()) == len(upstream.requests) == 1
    assert not await other.spans()


@pytest.mark.parametrize("token", ["sesame", None])
async def test_a_call_without_an_attempt_is_refused_or_else_answered_and_not_recorded(
    upstream: FakeUpstream, store: InMemoryLightningStore, token: str | None
) -> None:
    for unrecorded in (False, True):
        async with LLMProxy(model_list=[upstream.llm()], store=store, token=token, unrecorded=unrecorded) as proxy:
            if not unrecorded:
                with pytest.raises(openai.NotFoundError, match="carries no ids"):
                    await call(proxy.endpoint, "sesame")
                continue
            await call(proxy.endpoint, "sesame")
            for path in ("/rollout//attempt/", "/rollout//attempt//", "/rollout//attempt/127.0.0.1"):
                with pytest.raises(openai.NotFoundError):
                    await call(f"{proxy.endpoint.removesuffix('/v1')}{path}/v1", "sesame")
            one = await new_caller(proxy, store)
            await call(proxy.endpoint, proxy.make_key(one.rollout_id, one.attempt_id))
            assert (await one.span()).tokens is not None, "a call of an attempt is recorded all the same"
            if token is not None:
                with pytest.raises(openai.AuthenticationError):
                    await call(proxy.endpoint, "another")
    assert len(await store.query_rollouts()) == 1
    assert len(upstream.requests) == 2


async def test_calls_without_an_attempt_go_through_in_every_api_and_as_streams(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with (
        LLMProxy(model_list=[upstream.llm()], store=store, unrecorded=True) as proxy,
        AsyncOpenAI(base_url=proxy.endpoint, api_key="any", max_retries=0) as client,
    ):
        first = await client.responses.create(model="fake", input="hello")
        second = await client.responses.create(model="fake", input="again", previous_response_id=first.id)
        assert (await client.responses.retrieve(second.id)).id == second.id
        stream = await client.chat.completions.create(model="fake", messages=say("hello"), stream=True)
        assert [part async for part in stream]
        assert not await store.query_rollouts()


async def test_a_forged_key_is_refused(guarded: LLMProxy, store: InMemoryLightningStore) -> None:
    caller = await new_caller(guarded, store)
    ids = caller.rollout_id, caller.attempt_id
    good = guarded.make_key(*ids)
    for forged in (attempt_key(None, *ids), attempt_key("another", *ids), good[:-1], f"{good}0", "sk-leyden-", "EMPTY"):
        with pytest.raises(openai.AuthenticationError):
            await call(caller.llm.endpoint, forged)


@pytest.mark.parametrize("kind", ["headers", "baggage"])
async def test_headers_route_with_the_token_and_not_without(
    guarded: LLMProxy, store: InMemoryLightningStore, upstream: FakeUpstream, kind: str
) -> None:
    caller = await new_caller(guarded, store)
    headers = {"x-leyden-rollout": caller.rollout_id, "x-leyden-attempt": caller.attempt_id}
    if kind == "baggage":
        baggage = f"a=b, leyden.rollout_id={caller.rollout_id};p=1,leyden.attempt_id={caller.attempt_id}"
        headers = {"baggage": baggage}
    await call(guarded.endpoint, "sesame", **headers)
    assert (await caller.span()).tokens is not None
    with pytest.raises(openai.AuthenticationError):
        await call(guarded.endpoint, "guess", **headers)
    assert not [name for name in upstream.calls[0].headers if name.lower().startswith("x-leyden")]


async def test_a_gateway_without_a_token_takes_ids_from_keys_and_headers_too(proxy: LLMProxy, caller: Caller) -> None:
    ids = caller.rollout_id, caller.attempt_id
    await call(proxy.endpoint, proxy.make_key(*ids))
    await call(proxy.endpoint, "EMPTY", **{"x-leyden-rollout": ids[0], "x-leyden-attempt": ids[1]})
    await call(caller.llm.endpoint, proxy.make_key("ro-1", "at-1"))  # one client for many attempts, by URL
    assert len(await caller.spans()) == 3


@pytest.mark.parametrize("ids", [("ro-1", "at-1"), ("tasks/7 ü.?%2F#1", "a.b"), ("a.b", "c"), ("a", "b.c")])
def test_a_key_says_any_ids_in_plain_ascii(ids: tuple[str, str]) -> None:
    key = attempt_key("secret", *ids)
    assert key.isascii()
    assert " " not in key
    assert read_attempt_key("secret", key) == ids
    assert read_attempt_key("other", key) is None


@pytest.mark.parametrize("token", [None, "sesame"])
@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
async def test_a_page_of_another_site_calls_no_model(
    upstream: FakeUpstream, store: InMemoryLightningStore, token: str | None, headers: dict[str, str]
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, token=token) as proxy:
        caller = await new_caller(proxy, store)
        llm = caller.llm
        with pytest.raises(openai.PermissionDeniedError, match="web page of") as caught:
            await call(llm.endpoint, llm.api_key or "", **headers)
        assert caught.value.code == "foreign_request"
        assert not upstream.requests
        await call(llm.endpoint, llm.api_key or "", Origin=proxy.endpoint.removesuffix("/v1"))  # its own page may
        assert "origin" not in {name.lower() for name in upstream.calls[0].headers}


async def test_a_gateway_without_a_token_is_called_by_this_machines_names_or_its_own(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    async with LLMProxy(model_list=[upstream.llm()], store=store, access_host="gateway.example") as proxy:
        caller = await new_caller(proxy, store)
        base_url = caller.llm.endpoint.replace("gateway.example", "127.0.0.1")
        with pytest.raises(openai.PermissionDeniedError, match=r"evil\.example.*is not this machine"):
            await call(base_url, "EMPTY", Host="evil.example")
        assert not upstream.requests
        await call(base_url, "EMPTY", Host="gateway.example:80")
    async with LLMProxy(model_list=[upstream.llm()], store=store, token="sesame") as guarded:
        caller = await new_caller(guarded, store)
        await call(caller.llm.endpoint, caller.llm.api_key or "", Host="any.example")
