"""What Prometheus is told: in its format, what the store knows, and only to those who may know it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from leyden._lib.host import pages
from leyden._lib.host.asgi import AsgiServer
from leyden._lib.host.http import SiteGuard
from leyden._lib.host.listening import listen
from leyden.gateway import LLMProxy
from leyden.monitor import AlertRule, Monitor
from leyden.monitor.monitor import Watch
from leyden.monitor.prometheus import exposition, metrics, of_requests
from leyden.serving import OnlineSession
from leyden.serving.serving_app import ServingApp
from leyden.store import InMemoryLightningStore, LightningStore, LightningStoreServer
from leyden.store.request_metrics import RequestMetrics
from leyden.testing import FakeUpstream
from tests.gateway.caller import new_caller, say

pytest.register_assert_rewrite("tests.monitor.metrics_format")

from tests.monitor.metrics_format import read_metrics  # noqa: E402

NASTY = 'w "quoted" \\ back, and {braces}='


async def worked(store: LightningStore) -> None:
    """Rollouts in several statuses, three workers, an alert."""
    await store.enqueue_rollout(1)
    await store.enqueue_rollout(2)
    await store.enqueue_rollout(3)
    claimed = await store.dequeue_rollout(NASTY)
    assert claimed is not None
    await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    await store.dequeue_rollout(NASTY)
    await store.update_worker(NASTY, {"host": "far", "cpu_percent": 81.5, "attempts_ended": 3, "own": 1, "pid": 7})
    gpus = {"gpu_percent": 97.0, "gpu_device_percent:0": 35.0, "gpu_device_percent:2": 97.0, "own:2": 1}
    await store.update_worker("with GPUs", gpus)
    await store.update_worker("gone", {"ended": True, "cpu_percent": 3.0})
    hot = AlertRule(name="hot", metric="cpu_percent", comparison=">", threshold=80.0, window_seconds=0.0)
    watch = Watch(Monitor(rules=[hot], sinks=()), store)
    await watch.check()


async def test_the_page_says_what_the_store_knows_in_prometheus_own_format() -> None:
    requests = RequestMetrics()
    requests.add("query_spans", 200, 0.0007)
    requests.add("query_spans", 200, 0.2)
    requests.add("dequeue_many_rollouts", 200, None)
    requests.add("other", 401, 0.001)
    async with InMemoryLightningStore() as store:
        await worked(store)
        page = read_metrics((await exposition(store, requests)).decode())
    assert page["leyden_rollouts"][{"status": "succeeded"}] == 1
    assert page["leyden_rollouts"][{"status": "failed"}] == 0
    assert page["leyden_queue_length"][{}] == 1
    assert page["leyden_records"][{"kind": "attempts"}] == 2
    assert page["leyden_workers"].values == {
        ("", frozenset({("health", "healthy")})): 2.0,
        ("", frozenset({("health", "unhealthy")})): 0.0,
        ("", frozenset({("health", "ended")})): 1.0,
    }
    assert page["leyden_cpu_percent"][{"worker": NASTY}] == 81.5
    assert page["leyden_gpu_percent"][{"worker": "with GPUs"}] == 97
    assert page["leyden_gpu_device_percent"][{"worker": "with GPUs", "gpu": "0"}] == 35
    assert page["leyden_gpu_device_percent"][{"worker": "with GPUs", "gpu": "2"}] == 97
    assert page["leyden_attempts_ended"][{"worker": NASTY}] == 3
    assert ("", frozenset({("worker", "gone")})) not in page["leyden_cpu_percent"].values
    assert page["leyden_store_reachable"][{"worker": ""}] == 1
    assert page["leyden_memory_percent"][{"worker": ""}] > 0
    assert page["leyden_missed_heartbeats"][{"worker": NASTY}] == 0
    assert page["leyden_alert"][{"rule": "hot", "worker": NASTY}] == 1
    assert "leyden_own" not in page
    assert page["leyden_http_requests_total"][{"method": "query_spans", "status": "200"}] == 2
    assert page["leyden_http_requests_total"][{"method": "other", "status": "401"}] == 1
    durations = page["leyden_http_request_seconds"].values
    assert durations["_bucket", frozenset({("method", "query_spans"), ("le", "0.1")})] == 1
    assert durations["_bucket", frozenset({("method", "query_spans"), ("le", "0.5")})] == 2
    assert durations["_sum", frozenset({("method", "query_spans")})] == pytest.approx(0.2007)
    assert not any(("method", "dequeue_many_rollouts") in labels for _, labels in durations)


async def test_an_empty_store_has_a_page_too() -> None:
    async with InMemoryLightningStore() as store:
        page = read_metrics((await exposition(store, RequestMetrics())).decode())
    assert page["leyden_queue_length"][{}] == 0
    assert "leyden_cpu_percent" not in page


async def test_a_server_shows_it_to_those_who_have_its_token_and_counts_what_it_is_asked() -> None:
    async with InMemoryLightningStore() as store:
        server = LightningStoreServer(store, token="secret", views=metrics(store))
        async with server, server.client() as client, aiohttp.ClientSession(server.endpoint) as session:
            await client.enqueue_rollout(1)
            for authorization, status in (("", 401), ("Bearer wrong", 401), ("Bearer secret", 200)):
                async with session.get("/metrics", headers={"Authorization": authorization}) as answer:
                    assert answer.status == status
                    text = await answer.text()
                    content_type = answer.headers["Content-Type"]
            assert content_type == "text/plain; version=0.0.4; charset=utf-8"
            async with session.post("/metrics", headers={"Authorization": "Bearer secret"}) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "GET")
            async with session.get("/v1/agl/nothing", headers={"Authorization": "Bearer secret"}) as answer:
                assert answer.status == 404
            async with session.get("/metrics", headers={"Authorization": "Bearer secret"}) as answer:
                later = read_metrics(await answer.text())["leyden_http_requests_total"]
    first = read_metrics(text)["leyden_http_requests_total"]
    assert first[{"method": "enqueue_many_rollouts", "status": "201"}] == 1
    assert first[{"method": "other", "status": "401"}] == 2
    assert later[{"method": "/metrics", "status": "200"}] == 1
    assert read_metrics(text)["leyden_http_connections"][{}] >= 2, "the client's and this session's"
    assert later[{"method": "other", "status": "404"}] == 1
    assert later[{"method": "other", "status": "405"}] == 1


async def test_a_server_that_was_handed_nothing_shows_nothing() -> None:
    async with (
        InMemoryLightningStore() as store,
        LightningStoreServer(store) as server,
        aiohttp.ClientSession(server.endpoint) as session,
        session.get("/metrics") as answer,
    ):
        assert answer.status == 404


async def get(url: str, token: str | None = None) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        return response.status, await response.text()


@asynccontextmanager
async def served(kind: str, token: str | None) -> AsyncGenerator[tuple[str, dict[str, str]]]:
    """A server of a kind: its address, and labels of a request that it has counted."""
    async with FakeUpstream() as upstream, InMemoryLightningStore() as store:
        if kind == "store":
            async with LightningStoreServer(store, token=token, views=metrics(store)) as server:
                await get(f"{server.endpoint}/v1/agl/statistics", token)
                yield server.endpoint, {"method": "statistics", "status": "200"}
        else:
            async with LLMProxy(model_list=[upstream.llm()], store=store, live_key="k", token=token) as proxy:
                root = proxy.endpoint.removesuffix("/v1")
                if kind == "gateway":
                    caller = await new_caller(proxy, store)
                    async with caller.client as client:
                        await client.chat.completions.create(model="fake", messages=say("hi"))
                    yield root, {"method": "chat/completions", "status": "200"}
                    return
                async with OnlineSession(store, gateway=proxy.endpoint, live_key="k") as session:
                    app = ServingApp(session, token=token, guard=SiteGuard(local_only=True))
                    server = AsgiServer(app, keep_alive_seconds=5)
                    listener = listen("127.0.0.1", 0)
                    await server.start(listener)
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    await get(f"{url}/v1/serving/status", token)
                    yield url, {"method": "status", "status": "200"}
                    await server.stop(grace_seconds=0.1)


@pytest.mark.parametrize("token", [None, "sesame"])
@pytest.mark.parametrize("kind", ["store", "gateway", "serve"])
async def test_every_server_has_health_without_and_metrics_with_its_token_at_the_same_paths(
    kind: str, token: str | None
) -> None:
    async with served(kind, token) as (url, counted):
        assert await get(f"{url}/health") == (200, '{"status":"ok"}')
        if token is not None:
            assert (await get(f"{url}/metrics"))[0] == 401
            assert (await get(f"{url}/metrics", "wrong"))[0] == 401
        status, text = await get(f"{url}/metrics", token)
    assert status == 200
    page = read_metrics(text)
    values = page["leyden_http_requests_total"].values
    assert values["", frozenset(counted.items())] == 1
    assert ("", frozenset({("method", "health"), ("status", "200")})) in values or kind == "store"
    if kind == "gateway":
        assert page["leyden_gateway_paused"][{}] == 0
        assert page["leyden_gateway_unread_calls_total"][{}] == 0
        (upstream,) = page["leyden_upstream_requests"].values.values()
        assert upstream == 1
    if kind == "serve":
        assert page["leyden_serving_lost_total"][{}] == 0


async def test_an_attempts_key_does_not_open_the_gateways_metrics() -> None:
    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store, token="sesame") as proxy,
    ):
        root = proxy.endpoint.removesuffix("/v1")
        assert (await get(f"{root}/metrics", proxy.make_key("ro", "at")))[0] == 401


def test_the_pages_of_several_processes_become_one() -> None:
    def text(n: int) -> str:
        requests = RequestMetrics()
        for _ in range(n):
            requests.add("models", 200, 0.01)
        return pages.metrics_text(of_requests(requests)).decode()

    page = read_metrics(pages.joined_metrics([text(1), text(2)]).body.decode())
    for process, count in (("0", 1), ("1", 2)):
        labels = {"method": "models", "status": "200", "process": process}
        assert page["leyden_http_requests_total"][labels] == count
    assert (
        page["leyden_http_request_seconds"].values["_count", frozenset({("method", "models"), ("process", "1")})] == 2
    )
