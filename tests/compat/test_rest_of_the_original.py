"""The bodies that Agent Lightning 0.3's client sends are taken and returned by the alias's server.

`tests/compat_peers` does the same with the original client.
"""

import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

import leyden.compat
from leyden.errors import UnknownRollout
from leyden.store import LightningStore, LightningStoreClient, open_store
from leyden_compat.agentlightning.store import InMemoryLightningStore, LightningStoreServer

leyden.compat.install()

CONTEXT = {"trace_id": "a" * 32, "span_id": "b" * 16, "is_remote": False, "trace_state": {}}
CONFIG = {"timeout_seconds": 60.0, "unresponsive_seconds": None, "max_attempts": 2, "retry_condition": ["failed"]}

agl: Any = importlib.import_module("agentlightning")

Post = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def serving(store: LightningStore) -> AsyncGenerator[tuple[str, Post]]:
    server = LightningStoreServer(store, "127.0.0.1", 0)
    await server.start()
    async with aiohttp.ClientSession() as session:

        async def post(path: str, body: Any = None, status: int = 200) -> Any:
            async with session.post(f"{server.endpoint}/v1/agl{path}", json=body) as response:
                assert response.status == status, await response.text()
                return await response.json()

        try:
            yield server.endpoint, post
        finally:
            await server.stop()


@pytest.fixture(params=["the alias's store", "a store of Leyden"])
async def store(request: pytest.FixtureRequest) -> AsyncGenerator[LightningStore]:
    async with InMemoryLightningStore() if request.param == "the alias's store" else open_store("memory://") as opened:
        yield opened


async def test_resources_are_the_body_itself_and_rollouts_are_under_a_key(store: LightningStore) -> None:
    llm = {"resource_type": "llm", "endpoint": "http://h/v1", "model": "m", "api_key": None, "sampling_parameters": {}}
    async with serving(store) as (_, post):
        added = await post("/resources", {"resources": llm}, 201)
        chosen = await post("/resources/chosen", {"main": llm})
        assert added["resources"]["resources"]["model"] == "m" and chosen["resources_id"] == "chosen"
        requests = [
            {"input": 1, "mode": None, "resources_id": "chosen", "config": CONFIG, "metadata": None},
            {"input": 2, "mode": "val", "resources_id": None, "config": None, "metadata": {"k": 1}},
        ]
        first, second = await post("/queues/rollouts/enqueue", {"rollouts": requests}, 201)
        assert first["config"] | CONFIG == first["config"] and second["metadata"] == {"k": 1}
        [alone] = await post("/queues/rollouts/enqueue", {"rollouts": requests[:1]}, 201)
        assert alone["input"] == 1
        [claimed] = await post("/queues/rollouts/dequeue", {"limit": 1})
        again = await post(f"/rollouts/{claimed['rollout_id']}/attempts", None, 201)
        assert (claimed["attempt"]["sequence_id"], again["attempt"]["sequence_id"]) == (1, 2)
        refused = await post("/queues/rollouts/enqueue", {"rollouts": [{"inputs": 1}]}, 400)
        assert "input: missing" in refused["message"]


async def test_spans_keep_links_context_parent_and_resource(store: LightningStore) -> None:
    async with serving(store) as (url, post):
        begun = await post("/rollouts", {"input": "x", "mode": None, "worker_id": None}, 201)
        ids = {"rollout_id": begun["rollout_id"], "attempt_id": begun["attempt"]["attempt_id"]}
        assert await post("/spans/next", ids) == {"sequence_id": 1}
        span = {
            **ids, "sequence_id": 5, "trace_id": "a" * 32, "span_id": "c" * 16, "parent_id": "b" * 16, "name": "step",
            "status": {"status_code": "OK", "description": None}, "attributes": {"n": 1}, "start_time": 1.0, "end_time": 2.0,
            "events": [{"name": "e", "attributes": {}, "timestamp": 1.5}], "parent": CONTEXT, "context": CONTEXT,
            "links": [{"context": CONTEXT, "attributes": {"why": "test"}}], "more": "is allowed there",
            "resource": {"attributes": {"service.name": "s"}, "schema_url": "https://schema"},
        }  # fmt: skip
        added = await post("/spans", span, 201)
        assert added["links"] == span["links"] and added["parent"]["span_id"] == "b" * 16
        assert added["attributes"] == {"n": 1} and added["resource"]["attributes"]["service.name"] == "s"
        found = await post("/spans/search", {"rollout_id": ids["rollout_id"], "limit": -1, "offset": 0})
        assert found["items"] == [added] and found["total"] == 1
        assert (await post("/spans/search", {"rollout_id": "ro-none"}))["items"] == []
        refused = await post("/spans", {"name": "step"}, 400)
        assert "rollout_id: missing" in refused["message"]
        async with LightningStoreClient(url) as ours:
            [seen] = await ours.query_spans(ids["rollout_id"])
            assert seen.resource["service.name"] == "s" and seen.sequence_id == 5


async def test_leydens_own_client_keeps_its_errors_at_the_same_address(store: LightningStore) -> None:
    async with serving(store) as (url, post), LightningStoreClient(url) as ours:
        with pytest.raises(UnknownRollout):
            await ours.get_rollout_by_id("ro-none")
        queued = await ours.enqueue_rollout("task")
        by_hand = await post(f"/rollouts/{queued.rollout_id}", {"status": "succeeded"})
        assert by_hand["status"] == "succeeded", "the old client may set a queued rollout's status"
        assert (await ours.get_rollout_by_id(queued.rollout_id)).status == "succeeded"


PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("origins", "admitted"), [(None, False), ([PAGE], True), ("*", True), (["https://other"], False)]
)
async def test_pages_of_the_origins_that_a_program_names_may_call_the_server(origins: Any, admitted: bool) -> None:
    server = LightningStoreServer(InMemoryLightningStore(), "127.0.0.1", 0, origins)
    await server.start()
    try:
        async with aiohttp.ClientSession(f"{server.endpoint}/") as session:
            asks = {
                "Origin": PAGE,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type",
            }
            async with session.options("v1/agl/rollouts", headers=asks) as preflight:
                assert (preflight.headers.get("Access-Control-Allow-Origin") == PAGE) == admitted
            comes = {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
            async with session.post("v1/agl/rollouts", json={"input": 1}, headers=comes) as started:
                assert started.status == (201 if admitted else 403)
                assert (started.headers.get("Access-Control-Allow-Origin") == PAGE) == admitted
            for page in ("metrics", "v1/prometheus"):
                async with session.get(page) as shown:
                    assert shown.status == 200 and "leyden_" in await shown.text()
    finally:
        await server.stop()


async def test_a_server_serves_a_store_of_the_program() -> None:
    class Own(agl.LightningStore):
        async def enqueue_rollout(self, input: Any, mode: Any = None, *args: Any, **options: Any) -> Any:
            return agl.Rollout(rollout_id="mine", input=input, mode=mode, start_time=1.0)

    async with serving(Own()) as (_, post):
        [queued] = await post("/queues/rollouts/enqueue", {"rollouts": [{"input": 7, "mode": "val"}]}, 201)
        assert (queued["rollout_id"], queued["input"], queued["mode"]) == ("mine", 7, "val")


async def test_a_span_of_the_original_with_opentelemetrys_kind_is_taken(store: LightningStore) -> None:
    async with serving(store) as (_, post):
        begun = await post("/rollouts", {"input": "x"}, 201)
        span = {
            "rollout_id": begun["rollout_id"], "attempt_id": begun["attempt"]["attempt_id"], "sequence_id": 1,
            "trace_id": "a" * 32, "span_id": "c" * 16, "parent_id": None, "name": "step", "attributes": {}, "events": [],
            "status": {"status_code": "UNSET", "description": None}, "links": [], "start_time": 1.0, "end_time": 2.0,
            "context": None, "parent": None, "resource": {"attributes": {}, "schema_url": ""},
            "kind": "SpanKind.INTERNAL", "instrumentation_scope": "t",
        }  # fmt: skip
        assert (await post("/spans", span, 201))["name"] == "step"
