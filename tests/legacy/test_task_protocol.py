"""The task protocol of Agent Lightning 0.1 between our server and our client, over real sockets."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from leyden.adapter import TraceToTriplet
from leyden.errors import ConfigError, StoreError, UnknownResources, UnknownRollout
from leyden.legacy import AgentLightningClient, AgentLightningServer, DevTaskLoader, RolloutLegacy, Task, TripletLegacy
from leyden.legacy.reports import REPORT, REPORT_JSON, report_of
from leyden.store import InMemoryLightningStore
from leyden.types import LLM, PromptTemplate, ProxyLLM, RolloutConfig, Span, find_final_reward

pytestmark = pytest.mark.filterwarnings("ignore:.*belongs to the task protocol:DeprecationWarning")

MODEL = {"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="tiny")}


def server(**options):
    return AgentLightningServer(port=0, **options)


def client_of(running: AgentLightningServer, **options) -> AgentLightningClient:
    return AgentLightningClient(running.endpoint, **{"poll_interval": 0.02, **options})


def request(url: str, body: bytes | None = None, method: str | None = None) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method), timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_a_task_travels_to_a_client_and_its_report_back():
    async with server() as running:
        resources_id = await running.update_resources(MODEL)
        queued = await running.queue_task({"q": "6*7"}, mode="train", metadata={"n": 1})
        client = client_of(running)

        task = await client.poll_next_task_async()
        assert (task.rollout_id, task.input, task.mode, task.metadata) == (queued, {"q": "6*7"}, "train", {"n": 1})
        assert task.num_claims == 1 and task.last_claim_time >= task.create_time
        update = await client.get_resources_by_id_async(task.resources_id)
        assert update.resources_id == resources_id and update.resources == MODEL

        sent = RolloutLegacy(
            rollout_id=queued,
            final_reward=0.5,
            triplets=[{"prompt": {"token_ids": [1, 2]}, "response": {"token_ids": [3]}, "reward": 0.5}],
            trace=[{"name": "step", "attributes": {"a": 1}}],
            logs=["done"],
            metadata={"k": "v"},
        )
        reply = await client.post_rollout_async(sent)
        assert reply == {"status": "ok", "message": f"Rollout {queued} received and stored.", "data": None}
        assert await running.poll_completed_rollout(queued, timeout=5) == sent
        assert await running.get_completed_rollout(queued) is None, "a report is taken once"
        rollout = await running.store.get_rollout_by_id(queued)
        assert rollout.status == "succeeded" and rollout.attempt.reward == 0.5


async def test_a_client_without_await_does_the_same():
    async with server() as running:
        await running.update_resources(MODEL)
        queued = await running.queue_task(3, resources_id=None)

        def work() -> RolloutLegacy:
            client = client_of(running)
            task = client.poll_next_task()
            assert client.get_latest_resources().resources == MODEL
            assert client.get_resources_by_id(task.resources_id).resources == MODEL
            report = RolloutLegacy(rollout_id=task.rollout_id, final_reward=2.0 * task.input)
            assert client.post_rollout(report)["status"] == "ok"
            return report

        report = await asyncio.to_thread(work)
        assert await running.retrieve_completed_rollouts() == [report]
        assert await running.retrieve_completed_rollouts() == []
        assert report.rollout_id == queued


async def test_a_task_whose_worker_is_lost_is_given_out_again_and_the_first_report_counts():
    async with server(task_timeout_seconds=0.2) as running:
        queued = await running.queue_task("slow")
        client = client_of(running)
        first = await client.poll_next_task_async()
        again = await asyncio.wait_for(client.poll_next_task_async(), 10)
        assert (first.num_claims, again.num_claims) == (1, 2) and again.rollout_id == queued

        await client.post_rollout_async(RolloutLegacy(rollout_id=queued, final_reward=1.0))
        await client.post_rollout_async(RolloutLegacy(rollout_id=queued, final_reward=0.0))
        assert (await running.poll_completed_rollout(queued, timeout=5)).final_reward == 1.0
        assert request(f"{running.endpoint}/task")[1] == {"is_available": False, "task": None}


async def test_a_late_report_on_a_task_that_waits_again_takes_it_off_the_queue():
    async with server(task_timeout_seconds=0.1) as running:
        queued = await running.queue_task("slow")
        client = client_of(running)
        await client.poll_next_task_async()
        async with asyncio.timeout(10):
            while (await running.store.get_rollout_by_id(queued)).status != "requeuing":  # noqa: ASYNC110 -- the sweep has no event
                await asyncio.sleep(0.02)
        await client.post_rollout_async(RolloutLegacy(rollout_id=queued, final_reward=1.0))
        assert (await running.get_completed_rollout(queued)).final_reward == 1.0
        assert request(f"{running.endpoint}/task")[1]["is_available"] is False


async def test_an_empty_report_is_a_failed_rollout_and_still_a_report():
    async with server() as running:
        queued = await running.queue_task("x")
        client = client_of(running)
        task = await client.poll_next_task_async()
        await client.post_rollout_async(RolloutLegacy(rollout_id=queued, task=task))
        assert (await running.store.get_rollout_by_id(queued)).status == "failed"
        taken = await running.get_completed_rollout(queued)
        assert taken.is_empty and taken.task.input == "x"


async def test_a_report_on_a_task_that_the_server_never_had_is_kept():
    async with server() as running:
        client = client_of(running)
        report = RolloutLegacy(
            rollout_id="rollout-of-before", task=Task(rollout_id="rollout-of-before", input=1), final_reward=3.0
        )
        assert (await client.post_rollout_async(report))["status"] == "ok"
        assert await running.retrieve_completed_rollouts() == [report]


async def test_a_reward_without_end_is_reported_and_refused_by_nobody():
    async with server() as running:
        queued = await running.queue_task("x")
        body = json.dumps({"rollout_id": queued, "final_reward": 1.0, "from_a_later_version": True}).encode()
        assert request(f"{running.endpoint}/rollout", body)[0] == 200
        assert (await running.get_completed_rollout(queued)).final_reward == 1.0


async def test_waiting_for_a_report_ends_with_its_timeout():
    async with server() as running:
        queued = await running.queue_task("x")
        assert await running.poll_completed_rollout(queued, timeout=0.05) is None
        assert await running.get_completed_rollout(queued) is None
        with pytest.raises(UnknownRollout):
            await running.poll_completed_rollout("rollout-nobody-queued", timeout=0.05)


async def test_errors_have_the_form_that_old_clients_read():
    async with server() as running:
        at = running.endpoint
        assert request(f"{at}/resources/latest") == (404, {"detail": "No resources have been set on the server."})
        assert request(f"{at}/resources/none%2Fsuch") == (404, {"detail": "Resource ID 'none/such' not found."})
        assert request(f"{at}/nowhere")[0] == 404
        assert request(f"{at}/rollout")[0] == 405
        status, reply = request(f"{at}/rollout", b'{"final_reward": "much"}')
        assert status == 422
        assert {tuple(fault["loc"]) for fault in reply["detail"]} == {("body", "rollout_id"), ("body", "final_reward")}
        client = client_of(running)
        assert await client.get_latest_resources_async() is None
        with pytest.raises(UnknownResources):
            await running.queue_task("x", resources_id="res-none")


async def test_a_client_outlives_a_server_that_is_away(caplog):
    running = server()
    await running.start()
    client = client_of(running)
    await running.stop()
    assert client.get_latest_resources() is None and await client.get_latest_resources_async() is None
    assert "Connection refused" in caplog.text or "Cannot connect" in caplog.text
    polling = asyncio.create_task(client.poll_next_task_async())
    await asyncio.sleep(0.05)
    await running.start()  # at the same port
    queued = await running.queue_task("after the restart")
    assert (await asyncio.wait_for(polling, 10)).rollout_id == queued
    await running.stop()


async def test_the_store_is_the_queue_so_new_runners_and_old_clients_share_it():
    async with InMemoryLightningStore() as store, server(store=store) as running:
        await store.add_resources(
            {"m": ProxyLLM(endpoint="http://127.0.0.1:9/v1", model="tiny"), "p": PromptTemplate(template="{task}")}
        )
        rollout = await store.enqueue_rollout("new", "val", config=RolloutConfig(max_attempts=1))
        client = client_of(running)
        task = await client.poll_next_task_async()
        assert task.rollout_id == rollout.rollout_id
        update = await client.get_resources_by_id_async(task.resources_id)
        assert type(update.resources["m"]) is LLM, "0.1 knows no gateway"
        await client.post_rollout_async(RolloutLegacy(rollout_id=task.rollout_id, final_reward=0.25))
        spans = await store.query_spans(rollout.rollout_id)
        assert find_final_reward(spans) == 0.25

        queued = await running.queue_task("old")
        claimed = await store.dequeue_rollout("a new runner")
        await store.update_attempt(queued, claimed.attempt.attempt_id, status="succeeded")
        assert (await running.poll_completed_rollout(queued)).rollout_id == queued


async def test_a_dev_loader_gives_its_tasks_again_and_again_and_keeps_the_reports():
    loader = DevTaskLoader(["a", "b"], MODEL)
    tasks = [loader.poll_next_task() for _ in range(3)]
    assert [task.rollout_id for task in tasks] == ["local_task_001", "local_task_002", "local_task_001"]
    assert loader.get_resources_by_id(tasks[0].resources_id).resources == MODEL
    await loader.post_rollout_async(RolloutLegacy(rollout_id="local_task_001"))
    assert [report.rollout_id for report in loader.rollouts] == ["local_task_001"]
    with pytest.raises(UnknownResources, match="'other'"):
        loader.get_resources_by_id("other")
    with pytest.raises(ConfigError, match="no tasks"):
        DevTaskLoader([], MODEL)
    with pytest.raises(ConfigError, match="not both"):
        DevTaskLoader(["a", Task(rollout_id="1", input="b")], MODEL)


async def test_options_that_cannot_work_are_refused_by_name():
    with pytest.raises(ConfigError, match="insecure=True"):
        server(host="0.0.0.0")
    with pytest.raises(ConfigError, match="endpoint"):
        AgentLightningClient("localhost:8000")
    async with server() as running:
        with pytest.raises(StoreError, match=f"port={running.port}"):
            await AgentLightningServer(port=running.port).start()


async def test_a_page_of_another_site_is_refused():
    async with server() as running:
        foreign = urllib.request.Request(f"{running.endpoint}/task", headers={"Origin": "http://elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(urllib.request.urlopen, foreign, timeout=10)
        assert refused.value.code == 403
        refused.value.close()


@pytest.mark.parametrize("values", [b"[],", b"1,0,", b'"",', b"[" * 300])
async def test_a_report_of_too_much_work_is_refused_before_it_is_parsed(values: bytes):
    body = b'{"rollout_id": "x", "metadata": {"a": [' + values * (2**23 // len(values)) + b"1]}}"
    async with server() as running:
        status, reply = request(f"{running.endpoint}/rollout", body)
    assert status == 413
    assert "too much work" in reply["detail"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "9" * 5000, '"nan"', '"-inf"'])
@pytest.mark.parametrize("where", ["final_reward", "triplets"])
async def test_a_reward_that_is_no_finite_number_is_refused_and_its_task_is_not_given_out_again(
    number: str, where: str
):
    async with server(task_timeout_seconds=60) as running:
        queued = await running.queue_task("x")
        client = client_of(running)
        assert await client.poll_next_task_async() is not None
        reward = number if where == "final_reward" else f'[{{"prompt": 1, "response": 2, "reward": {number}}}]'
        body = f'{{"rollout_id": "{queued}", "{where}": {reward}}}'.encode()
        status, reply = request(f"{running.endpoint}/rollout", body)
        assert status == 422
        assert where in reply["detail"][0]["loc"] or "JSON" in reply["detail"][0]["msg"]
        if "JSON" not in reply["detail"][0]["msg"]:
            report = await running.poll_completed_rollout(queued, timeout=5)
            assert report is not None
            assert report.final_reward is None
            assert request(f"{running.endpoint}/task")[1]["is_available"] is False


@pytest.mark.parametrize("rollout_id", ["", "x" * 5000, "a\\u0000b", "line\\nbreak", "\\ud800"])
async def test_an_id_that_no_store_takes_is_refused(rollout_id: str):
    async with server() as running:
        status, reply = request(f"{running.endpoint}/rollout", f'{{"rollout_id": "{rollout_id}"}}'.encode())
        assert status == 422
        assert reply["detail"]


@pytest.mark.parametrize("value", ["NaN", "1e999", "9" * 4400, "[" * 150 + "]" * 150])
async def test_a_task_that_no_store_takes_is_refused(value: str):
    async with server() as running:
        task = f'{{"rollout_id": "new", "task": {{"rollout_id": "new", "input": {value}}}, "final_reward": 1}}'
        assert request(f"{running.endpoint}/rollout", task.encode())[0] == 422


def test_a_report_with_nan_of_an_agent_in_this_process_has_no_reward():
    triplet = TripletLegacy(prompt=1, response=2, reward=float("inf"))
    given = RolloutLegacy(rollout_id="r", final_reward=float("nan"), triplets=[triplet])
    span = Span(
        rollout_id="r", attempt_id="a", sequence_id=1, trace_id="t", span_id="s", name=REPORT,
        attributes={REPORT_JSON: given.model_dump_json()},
    )  # fmt: skip
    report = report_of("r", [span], TraceToTriplet())
    assert report.final_reward is None
    assert report.triplets is not None
    assert report.triplets[0].reward is None


class Failing(InMemoryLightningStore):
    """A store whose queries of spans fail as often as `failures` says, after as many as `before` says."""

    before = failures = 0

    async def query_spans(self, *args, **kwargs):
        self.before -= 1
        if self.before < 0 and self.failures > 0:
            self.failures -= 1
            raise StoreError("the disk is away")
        return await super().query_spans(*args, **kwargs)


async def test_a_report_is_not_lost_if_the_store_fails_while_it_is_read():
    async with Failing() as store, server(store=store) as running:
        queued = [await running.queue_task(number) for number in range(3)]
        for rollout_id in queued:
            request(f"{running.endpoint}/rollout", json.dumps({"rollout_id": rollout_id, "final_reward": 1}).encode())
        store.failures = 1
        with pytest.raises(StoreError):
            await running.get_completed_rollout(queued[0])
        store.before, store.failures = 2, 1
        with pytest.raises(StoreError):
            await running.retrieve_completed_rollouts()
        assert {report.rollout_id for report in await running.retrieve_completed_rollouts()} == set(queued)
        assert await running.retrieve_completed_rollouts() == []
