"""Our task server with the original package's clients, and our clients with its server (0.1.2)."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import leyden as ly
from leyden.legacy import AgentLightningClient, AgentLightningServer, LegacyAgentRunner, RolloutLegacy
from leyden.types import LLM, PromptTemplate

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*belongs to the task protocol:DeprecationWarning"),
    pytest.mark.timeout(120),
]
MODEL = {"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="tiny", sampling_parameters={"temperature": 0.5})}


@contextmanager
def program(name, *arguments):
    """A program with the original package, which is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, HERE / name, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGENTOPS_API_KEY": "", "OTEL_SDK_DISABLED": "true"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


async def test_the_original_client_works_through_the_tasks_of_our_server():
    async with AgentLightningServer(port=0) as server:
        resources_id = await server.update_resources(MODEL | {"prompt": PromptTemplate(template="{task}")})
        modes = ["train", "val", "test", None]
        ids = [await server.queue_task({"n": n}, mode=mode, metadata={"n": n}) for n, mode in enumerate(modes)]
        with program("original_client.py", server.endpoint, len(ids)) as client:
            out, errors = await asyncio.to_thread(client.communicate, timeout=100)
        assert client.returncode == 0, errors
        *lines, nothing = map(json.loads, out.splitlines())
        assert nothing == [None, None, None]
        for n, (task, resources, reply) in enumerate(lines):
            assert (task["rollout_id"], task["mode"], task["num_claims"]) == (ids[n], modes[n], 1)
            assert task["metadata"] == {"n": n} and task["last_claim_time"] >= task["create_time"]
            assert resources["resources_id"] == resources_id
            assert resources["resources"]["main_llm"]["sampling_parameters"] == {"temperature": 0.5}
            assert reply["status"] == "ok"
            report = await server.poll_completed_rollout(ids[n], timeout=5)
            assert report.final_reward == n / 10 and report.triplets[0].response == {"token_ids": [n + 1]}
            assert report.trace == [{"name": "step", "attributes": {"model": "tiny"}}]
            assert (report.logs, report.metadata) == (["a line"], {"mode": modes[n]})


async def test_the_original_trainer_runs_an_agent_on_our_server_and_its_errors_are_failures():
    async with AgentLightningServer(port=0) as server:
        await server.update_resources(MODEL)
        ids = [await server.queue_task({"n": n}, mode="train") for n in (0, 1)]
        with program("original_trainer.py", server.endpoint, 2) as trainer:
            _, errors = await asyncio.to_thread(trainer.communicate, timeout=100)
        assert trainer.returncode == 0, errors
        assert (await server.get_completed_rollout(ids[0])).is_empty
        assert (await server.get_completed_rollout(ids[1])).final_reward == 1.0
        statuses = [(await server.store.get_rollout_by_id(rollout_id)).status for rollout_id in ids]
        assert statuses == ["failed", "succeeded"]


async def next_report(server):
    """The next report that the original server printed, among the lines of its log."""
    while not (line := await asyncio.to_thread(server.stdout.readline)).startswith("{"):
        assert line, server.stderr.read()
    return json.loads(line)


async def begin(server, url):
    assert (await asyncio.to_thread(server.stdout.readline)).strip() == "ready", server.stderr.read()
    client = AgentLightningClient(url, poll_interval=0.05)
    assert await client.get_latest_resources_async() is None and client.get_latest_resources() is None
    server.stdin.write("\n")
    server.stdin.flush()
    return client


async def test_our_client_works_through_the_tasks_of_the_original_server():
    url = f"http://127.0.0.1:{(port := free_port())}"
    with program("original_server.py", port, 300) as server:
        client = await begin(server, url)
        for n, mode in enumerate(("train", "val", None)):
            task = client.poll_next_task() if n == 0 else await client.poll_next_task_async()
            assert (task.input, task.mode, task.num_claims) == ({"n": n}, mode, 1)
            update = await client.get_latest_resources_async()
            assert update.resources["main_llm"].model == "newer"
            if task.resources_id:
                assert client.get_resources_by_id(task.resources_id) == update and task.metadata == {"first": True}
            triplet = {"prompt": {"token_ids": [n]}, "response": {"token_ids": [n]}, "reward": 1.0}
            report = RolloutLegacy(rollout_id=task.rollout_id, task=task, triplets=[triplet], final_reward=float(n))
            reply = client.post_rollout(report) if n == 0 else await client.post_rollout_async(report)
            assert reply["status"] == "ok"
            received = await next_report(server)
            assert received["final_reward"] == n and received["triplets"][0]["prompt"] == {"token_ids": [n]}


async def test_our_client_gets_a_task_of_the_original_server_again_after_its_timeout():
    url = f"http://127.0.0.1:{(port := free_port())}"
    with program("original_server.py", port, 0.2) as server:
        client = await begin(server, url)
        claims = []
        while len([task for task in claims if task.input == {"n": 0}]) < 2:
            claims.append(await asyncio.wait_for(client.poll_next_task_async(), 20))
        assert [task.num_claims for task in claims if task.input == {"n": 0}] == [1, 2]


@ly.llm_rollout
async def agent(task, llm):
    assert llm.model == "newer"
    if task["n"] == 1:
        raise ValueError("no")
    return task["n"] / 2


@pytest.mark.parametrize("how", ["runner", "trainer"])
async def test_our_runner_and_trainer_serve_the_original_server(how, tmp_path):
    url = f"http://127.0.0.1:{(port := free_port())}"
    with program("original_server.py", port, 300) as server:
        client = await begin(server, url)
        if how == "runner":
            assert await LegacyAgentRunner(agent, client, max_tasks=3).iter_async() == 3
        else:
            trainer = ly.Trainer(max_rollouts=3, run_dir=tmp_path / "run", progress=False)
            summary = await asyncio.to_thread(trainer.fit_v0, agent, url)
            assert summary.result == 3 and (summary.rollouts["succeeded"], summary.rollouts["failed"]) == (2, 1)
        reports = [await next_report(server) for _ in range(3)]
        assert [report["final_reward"] for report in reports] == [0.0, None, 1.0]
        assert "ValueError" in reports[1]["metadata"]["error"]


async def test_the_guides_program_before_runs_with_the_original_package(tmp_path):
    page = (HERE.parents[1] / "docs/migrating/agent-lightning-0.1.md").read_text()
    before = page.partition("```python\n")[2].partition("```")[0]
    assert "from agentlightning import" in before
    (tmp_path / "before.py").write_text(before)
    with program(tmp_path / "before.py") as running:
        out, errors = await asyncio.to_thread(running.communicate, timeout=100)
    assert out.splitlines()[-1] == "[2.0, 4.0]", errors
