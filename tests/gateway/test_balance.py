"""Several servers of one model: who takes a call, and what becomes of one that is ill."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import openai
import pytest

from leyden.gateway import LLMProxy, UpstreamModel, proxy
from leyden.gateway.balance import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, Balancer
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from tests.gateway.caller import Caller, new_caller, say

KEY = ("ro-1", "at-1")
SERVERS = [UpstreamModel(model_name="m", endpoint=f"http://{name}/v1") for name in "abc"]
A, B, C = SERVERS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_attempts_spread_and_stay() -> None:
    balancer = Balancer()
    keys = [("ro", f"at-{number}") for number in range(30)]
    chosen = [balancer.choose(SERVERS, key) for key in keys]
    assert [chosen.count(server) for server in SERVERS] == [10, 10, 10]
    assert [balancer.choose(SERVERS, key) for key in reversed(keys)] == chosen[::-1]
    for key in keys:
        balancer.end_attempt(key)
    assert not balancer


def test_a_new_attempt_gets_the_least_busy_server() -> None:
    balancer = Balancer()
    balancer.begin(A)
    balancer.begin(B)
    assert balancer.choose(SERVERS, KEY) is C


def test_a_failed_server_is_left_for_longer_each_time_and_then_tried_by_one_call() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    assert balancer.choose(SERVERS, KEY) is A
    pause = FIRST_PAUSE_SECONDS
    for _ in range(8):
        balancer.begin(A)
        balancer.end(A, healthy=False)
        clock.now += pause * 0.99
        assert balancer.choose([A, B], ("ro", "new")) is B
        balancer.end_attempt(("ro", "new"))
        clock.now += pause * 0.02
        balancer.begin(B)
        assert balancer.choose([A, B], ("ro", "probe")) is A
        balancer.end_attempt(("ro", "probe"))
        balancer.begin(A)
        assert balancer.choose([A, B], ("ro", "meanwhile")) is B, "one probe at a time"
        balancer.end_attempt(("ro", "meanwhile"))
        balancer.end(A, healthy=None)
        balancer.end(B, healthy=True)
        pause = min(pause * 2, MAX_PAUSE_SECONDS)
    balancer.begin(A)
    balancer.end(A, healthy=True)
    balancer.end_attempt(KEY)
    assert balancer.choose(SERVERS, ("ro", "last")) is A


def test_where_all_are_ill_the_one_that_may_be_back_first_is_tried() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    for server in (B, A, C):
        balancer.begin(server)
        balancer.end(server, healthy=False)
        clock.now += 0.1
    assert balancer.choose(SERVERS, KEY) is B
    assert balancer.choose(SERVERS, KEY, but=[B]) is A
    assert balancer.choose(SERVERS, KEY, but=SERVERS) is B


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeUpstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeUpstream()) for _ in range(3)]


@pytest.fixture
async def balanced(servers: list[FakeUpstream], store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    async with LLMProxy(model_list=[server.llm() for server in servers], store=store) as proxy:
        yield proxy


async def ask(caller: Caller, number: int = 0, *, stream: bool = False) -> None:
    answer: Any = await caller.client.chat.completions.create(
        model="fake", messages=say(f"turn {number}"), stream=stream
    )
    if stream:
        async for _ in answer:
            pass


async def test_each_attempt_stays_with_its_server_and_all_servers_work(
    balanced: LLMProxy, servers: list[FakeUpstream], store: InMemoryLightningStore
) -> None:
    callers = [await new_caller(balanced, store) for _ in range(9)]
    async with AsyncExitStack() as stack:
        for caller in callers:
            await stack.enter_async_context(caller.client)
        for number in range(3):
            await asyncio.gather(*(ask(caller, number) for caller in callers))
    assert [len(server.calls) for server in servers] == [9, 9, 9]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_another_server_takes_the_call_of_one_that_is_too_busy(
    balanced: LLMProxy, servers: list[FakeUpstream], store: InMemoryLightningStore, status: int, stream: bool
) -> None:
    servers[0].misbehave(Misbehaviour(status=status))
    caller = await new_caller(balanced, store)
    async with caller.client:
        await ask(caller, stream=stream)
    assert [len(server.requests) for server in servers] == [1, 1, 0]
    assert (await caller.span()).tokens is not None


async def test_a_dead_server_costs_no_call(
    balanced: LLMProxy, servers: list[FakeUpstream], store: InMemoryLightningStore
) -> None:
    await servers[1].stop()
    for number in range(6):
        caller = await new_caller(balanced, store)
        async with caller.client:
            await ask(caller, number)
        assert (await caller.span()).tokens is not None
    assert len(servers[0].calls) + len(servers[2].calls) == 6


async def test_a_server_that_takes_no_connection_costs_no_call(
    upstream: FakeUpstream, store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_CONNECT_SECONDS", 0.3)
    with ExitStack() as stack:
        mute, *others = (stack.enter_context(socket.socket()) for _ in range(4))
        mute.bind(("127.0.0.1", 0))
        mute.listen(0)
        for other in others:  # until its queue is full
            other.setblocking(False)
            other.connect_ex(mute.getsockname())
        models = [UpstreamModel("fake", f"http://127.0.0.1:{mute.getsockname()[1]}/v1"), upstream.llm()]
        async with LLMProxy(model_list=models, store=store) as gateway:
            caller = await new_caller(gateway, store)
            async with caller.client:
                await ask(caller)
            assert (await caller.span()).tokens is not None


async def test_an_answer_that_has_begun_is_never_asked_for_again(
    balanced: LLMProxy, servers: list[FakeUpstream], store: InMemoryLightningStore
) -> None:
    servers[0].misbehave(Misbehaviour(close_after_chunks=2), Misbehaviour(close_after_chunks=0))
    caller = await new_caller(balanced, store)
    async with caller.client:
        with pytest.raises(openai.APIConnectionError):
            await ask(caller, stream=True)
    assert sum(len(server.requests) for server in servers) == 1


async def test_an_error_of_the_request_stays_where_it_is(
    balanced: LLMProxy, servers: list[FakeUpstream], store: InMemoryLightningStore
) -> None:
    servers[0].misbehave(Misbehaviour(status=400))
    caller = await new_caller(balanced, store)
    async with caller.client:
        with pytest.raises(openai.BadRequestError):
            await ask(caller)
        await ask(caller)
    assert [len(server.requests) for server in servers] == [2, 0, 0]


async def test_when_every_server_is_too_busy_the_last_ones_answer_passes(
    balanced: LLMProxy, servers: list[FakeUpstream], store: InMemoryLightningStore
) -> None:
    for server in servers:
        server.misbehave(Misbehaviour(status=429, headers={"retry-after": "7"}))
    caller = await new_caller(balanced, store)
    async with caller.client:
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(caller)
    assert caught.value.response.headers["retry-after"] == "7"
    assert [len(server.requests) for server in servers] == [1, 1, 1]
    assert "429" in str((await caller.span()).status.description)


async def test_a_server_that_comes_back_while_the_call_is_tried_again_answers_it(
    store: InMemoryLightningStore,
) -> None:
    async with FakeUpstream() as upstream:
        port = int(upstream.endpoint.split(":")[2].removesuffix("/v1"))
        async with LLMProxy(model_list=[upstream.llm()], store=store, upstream_retries=8) as proxy:
            caller = await new_caller(proxy, store)
            await upstream.stop()
            async with caller.client:
                call = asyncio.create_task(ask(caller))
                await asyncio.sleep(0.05)
                await upstream.start(port=port)
                await call
            assert (await caller.span()).tokens is not None
