"""The roles of `cs`: an algorithm with its store and its gateway in one place, runners in another, as on two machines.

All of 127.0.0.0/8 is this machine: the servers listen on every address of it, and runners know it by one that is written nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import aiohttp
import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.errors import ConfigError, StoreError
from leyden.execution.client_server import ClientServerExecutionStrategy, Role
from leyden.gateway import LLMProxy
from leyden.testing import FakeUpstream
from leyden.types import semconv

MACHINE_A = "127.0.0.2"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8"),
    pytest.mark.timeout(120),
]


@ly.llm_rollout
async def ask(task: str, llm: ly.LLM) -> float:
    """One call; 1.0 when it was answered, by a gateway on machine A."""
    assert llm.endpoint.startswith(f"http://{MACHINE_A}:")
    question = {"model": llm.model, "messages": [{"role": "user", "content": task}]}
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{llm.endpoint}/chat/completions", json=question) as answer,
    ):
        return float(answer.status == 200)


class Asking(ly.Algorithm):
    """Publishes a model behind the gateway, has each task done, and keeps what it finds in the store at the moment of its end."""

    uses_gateway = True

    def __init__(self, model: ly.LLM) -> None:
        self.model = model
        self.rollouts: list[ly.Rollout] = []
        self.spans: dict[str, list[ly.Span]] = {}

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store, proxy = self.get_store(), self.get_llm_proxy()
        assert proxy is not None
        proxy.update_model_list([self.model])
        await store.update_resources("rs-of-this-run", {"llm": proxy.as_resource()})
        queued = [await store.enqueue_rollout(task, resources_id="rs-of-this-run") for task in train_dataset]
        ids = [rollout.rollout_id for rollout in queued]
        self.rollouts = [*await store.wait_for_rollouts(rollout_ids=ids)]
        self.spans = await store.query_spans_of(ids)


def two_free_ports() -> int:
    """A port that is free, as is the one after it."""
    while True:
        with socket.create_server(("", 0)) as first, contextlib.suppress(OSError):
            port = first.getsockname()[1]
            with socket.create_server(("", port + 1)):
                return port


def place(role: Role, host: str, port: int, *, managed_store: bool = True) -> ClientServerExecutionStrategy:
    return ClientServerExecutionStrategy(
        role=role,
        server_host=host,
        server_port=port,
        token="secret",
        managed_store=managed_store,
        drain_seconds=0.0,
    )


@contextlib.asynccontextmanager
async def runners(port: int, *, managed_store: bool = True, **options: Any) -> AsyncGenerator[None]:
    """A trainer in the role `runner`."""
    strategy = place("runner", MACHINE_A, port, managed_store=managed_store)
    working = asyncio.create_task(ly.Trainer(strategy=strategy, **options).afit(ask))
    try:
        yield
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError):
            await working


def algorithm_side(port: int, algorithm: ly.Algorithm, *, host: str = "0.0.0.0", **options: Any) -> Awaitable[Any]:
    """A trainer in the role `algorithm`, which others reach."""
    trainer = ly.Trainer(algorithm=algorithm, strategy=place("algorithm", host, port), **{"store": "memory", **options})
    return trainer.afit(ask, ["a", "b", "c"])


class Nothing(ly.Algorithm):
    """Ends at once."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """See Algorithm.run."""


def check(algorithm: Asking) -> None:
    """Every call was recorded before its rollout had succeeded."""
    assert {rollout.status for rollout in algorithm.rollouts} == {"succeeded"}
    for spans in algorithm.spans.values():
        assert ly.find_final_reward(spans) == 1.0
        assert [span.status.status_code for span in spans if span.name == semconv.MODEL_CALL] == ["OK"]


@pytest.mark.slow
@pytest.mark.merge
async def test_agents_on_another_machine_find_the_gateway_and_their_record_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = two_free_ports()
    async with FakeUpstream() as upstream, runners(port), asyncio.timeout(100):
        await algorithm_side(port, algorithm := Asking(upstream.llm()))
    check(algorithm)
    said = capsys.readouterr().err
    assert f":{port}; waiting for runners: start them with LEYDEN_CURRENT_ROLE=runner" in said
    assert f"connected to http://{MACHINE_A}:{port}; waiting for rollouts that the algorithm there enqueues" in said


@pytest.mark.slow
@pytest.mark.merge
async def test_a_script_that_brings_its_gateway_starts_it_on_the_algorithms_side_only() -> None:
    port = two_free_ports()

    def gateway() -> LLMProxy:  # on each machine the script makes its own
        return LLMProxy(host="0.0.0.0", port=port + 1, token="of the gateway", access_host=MACHINE_A)

    async with FakeUpstream() as upstream, runners(port, llm_proxy=gateway()), asyncio.timeout(100):
        await algorithm_side(port, algorithm := Asking(upstream.llm()), llm_proxy=gateway())
    check(algorithm)


@pytest.mark.backends
@pytest.mark.merge
async def test_machines_that_share_a_database_find_the_gateway_where_the_algorithm_says() -> None:
    from tests.store.postgres_server import fresh_url, given_or_own_server

    port = two_free_ports()
    with given_or_own_server() as server, fresh_url(server) as url:
        async with FakeUpstream() as upstream, runners(port, store=url, managed_store=False), asyncio.timeout(100):
            await algorithm_side(port, algorithm := Asking(upstream.llm()), host=MACHINE_A, store=url)
    check(algorithm)


@pytest.mark.backends
@pytest.mark.merge
async def test_machines_with_a_store_server_each_find_the_gateway_where_the_algorithm_says() -> None:
    from leyden.store import LightningStoreServer
    from tests.store.postgres_server import fresh_url, given_or_own_server

    port = two_free_ports()
    with given_or_own_server() as server, fresh_url(server) as url:
        async with (
            ly.open_store(url) as one,
            ly.open_store(url) as other,
            LightningStoreServer(one) as beside_algorithm,
            LightningStoreServer(other) as beside_runners,
            FakeUpstream() as upstream,
            runners(port, store=beside_runners.endpoint, managed_store=False),
            asyncio.timeout(100),
        ):
            algorithm = Asking(upstream.llm())
            await algorithm_side(port, algorithm, host=MACHINE_A, store=beside_algorithm.endpoint)
    check(algorithm)


async def test_until_the_algorithm_is_ready_nobody_elsewhere_claims_what_a_resumed_queue_holds() -> None:
    ready = Latch()
    async with ly.InMemoryLightningStore() as store, ly.LightningStoreServer(store, claims_from=ready) as server:
        rollout = await store.enqueue_rollout("left by the run before")
        async with ly.open_store(server.endpoint) as client:
            assert await client.dequeue_rollout("too early") is None
            assert await client.dequeue_rollout("too early", timeout_seconds=0.05) is None
            waiting = asyncio.create_task(client.dequeue_rollout("waits", timeout_seconds=30.0))
            ready.set()
            claimed = await waiting
            assert claimed is not None
            assert claimed.rollout_id == rollout.rollout_id
            assert claimed.attempt.sequence_id == 1
            assert await client.dequeue_rollout("too late", timeout_seconds=0.05) is None


async def test_a_gateway_that_other_machines_cannot_reach_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="leyden"):
        await algorithm_side(two_free_ports(), Nothing(), llm_proxy=LLMProxy())
    assert "the gateway listens on 127.0.0.1" in caplog.text


def test_a_store_for_other_machines_demands_a_token() -> None:
    strategy = ClientServerExecutionStrategy(role="algorithm", server_host="0.0.0.0", server_port=two_free_ports())
    with pytest.raises(ConfigError, match="token"):
        ly.Trainer(algorithm=Nothing(), strategy=strategy, store="memory").fit(ask)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="token is empty"):
        ClientServerExecutionStrategy(role="algorithm", token="")
