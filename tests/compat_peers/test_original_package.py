"""Agent Lightning 0.3's own client, runner, algorithm and store, with our server, runner and importer."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import leyden as ly
from leyden.execution.runner import LitAgentRunner
from leyden.store import open_store
from leyden.types import find_final_reward
from leyden_compat.agentlightning.store import LightningStoreServer
from leyden_compat.finder import SHADOW
from leyden_compat.importing import ImportFailed, import_store

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(180)


@contextmanager
def program(name, *arguments):
    """A program with the original package, which is killed at the end of the block."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SHADOW)]
    process = subprocess.Popen(
        [sys.executable, HERE / name, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "AGENTOPS_API_KEY": "",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",  # with OpenTelemetry 1.45, 0.3.0 exports to localhost:4318 alone
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def output(name, *arguments):
    with program(name, *arguments) as running:
        out, errors = await asyncio.to_thread(running.communicate, timeout=150)
    assert running.returncode == 0, errors
    return out.splitlines()[-1] if out else ""


@pytest.fixture(params=["memory", "file"])
async def served(request, tmp_path):
    async with open_store("memory://" if request.param == "memory" else tmp_path / "store.sqlite") as store:
        server = LightningStoreServer(store, "127.0.0.1", 0)
        await server.start()
        try:
            yield store, server.endpoint
        finally:
            await server.stop()


async def test_every_call_of_the_original_client_is_answered(served):
    store, url = served
    said = json.loads(await output("original_client.py", url))

    names = {
        name: update["resources"].keys()
        for name, update in said.items()
        if "resources" in name and "unk" not in name and "resources" in update
    }
    assert list(names["add_resources"]) == ["main", "prompt", "other"] and list(names["get_latest_resources"]) == [
        "prompt"
    ]
    assert said["get_resources_by_id"] == said["add_resources"]
    assert said["update_resources again"]["version"] == 2 and said["query_resources"]["total"] == 1

    first = said["enqueue_rollout"]
    assert (first["mode"], first["config"]["max_attempts"], first["metadata"]) == ("train", 2, {"k": 1})
    assert [rollout["input"] for rollout in said["enqueue_many_rollouts"]] == [3, 4]
    assert said["dequeue_rollout"]["rollout_id"] == first["rollout_id"]
    assert said["dequeue_rollout"]["attempt"]["worker_id"] == "w-1"
    assert len(said["dequeue_many_rollouts"]) == 3 and said["dequeue_rollout, nothing"] is None

    assert said["get_next_span_sequence_id"] == 1 and said["get_many_span_sequence_ids"] == [2, 3]
    added = said["add_span"]
    assert added["links"][0]["attributes"] == {"why": "test"} and added["parent"]["span_id"] == "b" * 16
    assert added["status"] == {"status_code": "ERROR", "description": "too late"}
    assert added["resource"]["attributes"]["service.name"] == "s" and added["context"]["span_id"] == f"{7:016x}"
    assert [span["sequence_id"] for span in said["add_many_spans"]] == [8, 9]
    assert said["query_spans"]["total"] == 3 and said["query_spans"]["items"][0] == added
    assert said["query_spans, unknown"] == {"total": 0, "items": []}

    assert said["update_attempt"]["status"] == "failed" and said["update_attempt"]["metadata"] == {"m": 1}
    assert said["start_attempt by a worker"]["attempt"]["worker_id"] == "w-3"
    assert said["update_attempt latest"]["status"] == "succeeded"
    assert said["update_attempt, late"]["status"] == "succeeded", "a late report changes nothing, and raises nothing"
    assert [attempt["sequence_id"] for attempt in said["query_attempts"]["items"]] == [1, 2, 3]
    assert said["get_latest_attempt"]["sequence_id"] == 3 and said["get_latest_attempt, unknown"] is None

    assert (said["update_rollout"]["status"], said["update_rollout"]["metadata"]) == ("succeeded", {"a": 1})
    assert [rollout["rollout_id"] for rollout in said["wait_for_rollouts"]] == [said["update_rollout"]["rollout_id"]]
    assert said["get_rollout_by_id"]["status"] == "requeuing", "its first attempt has failed, and it has two"
    assert said["get_rollout_by_id, unknown"] is None and said["get_resources_by_id, unknown"] is None
    assert said["query_rollouts"]["total"] == 2 and said["query_rollouts, all"]["total"] == 6
    assert said["get_worker_by_id"]["heartbeat_stats"] == {"cpu": 0.5} and said["get_worker_by_id, unknown"] is None
    assert said["update_worker, alone"]["worker_id"] == "w-9"
    assert "w-2" in [worker["worker_id"] for worker in said["query_workers"]["items"]], (
        "the worker of the attempt under way"
    )
    assert said["statistics"]["total_rollouts"] == 6

    assert (await store.get_rollout_by_id(first["rollout_id"])).input == {"n": 1}
    assert len(await store.query_spans(said["start_rollout"]["rollout_id"])) == 3


async def test_a_runner_of_the_original_works_for_an_algorithm_here(served):
    store, url = served
    await store.add_resources({"llm": ly.LLM(endpoint="http://127.0.0.1:9/v1", model="tiny")})
    queued = [await store.enqueue_rollout({"n": n}) for n in (0, 1, 2)]
    await output("original_runner.py", url, len(queued))
    done = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in queued]
    assert [rollout.status for rollout in done] == ["succeeded", "failed", "succeeded"]
    spans = await store.query_spans(queued[2].rollout_id)
    assert find_final_reward(spans) == 1.0


@ly.prompt_rollout
async def double(task, prompt_template):
    assert prompt_template.format(n=task["n"]) == f"Double {task['n']}"
    return 2.0 * task["n"]


async def test_an_algorithm_of_the_original_gets_the_rewards_of_a_runner_here(served):
    _, url = served
    with program("original_algorithm.py", url) as algorithm:
        async with open_store(url) as store:
            runner = LitAgentRunner(ly.OtelTracer(), max_rollouts=2)
            async with runner.run_context(agent=double, store=store):
                await runner.iter()
        out, errors = await asyncio.to_thread(algorithm.communicate, timeout=100)
    assert algorithm.returncode == 0, errors
    assert out.splitlines()[-1] == "[2.0, 4.0]"


MONGO = os.environ.get("LEYDEN_TEST_MONGO")
NEEDS_MONGO = pytest.mark.skipif(MONGO is None, reason="LEYDEN_TEST_MONGO is not set")


@pytest.mark.parametrize("where", [pytest.param([], id="memory"), pytest.param([MONGO], id="mongo", marks=NEEDS_MONGO)])
async def test_a_store_of_the_original_is_imported_and_imported_again(tmp_path, where):
    with program("original_store.py", *where) as source:
        while not (line := await asyncio.to_thread(source.stdout.readline)).strip().isdigit():
            assert line, source.stderr.read()
        url = f"http://127.0.0.1:{int(line)}"
        async with open_store(tmp_path / "imported.sqlite") as store:
            progress = []
            first = await import_store(url, store, lambda done, total: progress.append((done, total)))
            assert (first.resources, first.rollouts, first.present, first.spans, first.running) == (1, 125, 0, 8, 1)
            assert progress[-1] == (126, 126)
            again = await import_store(url + "/v1/agl", store)
            assert (again.rollouts, again.present, again.spans) == (0, 125, 0)

            ended = await store.query_rollouts(status_in=["succeeded"], sort_by="start_time")
            assert [rollout.input["question"] for rollout in ended] == [0, 1, 2]
            assert [len(await store.query_spans(rollout.rollout_id)) for rollout in ended] == [1, 2, 3]
            assert ended[0].resources_id == "res-1" and ended[0].metadata["imported"]["store"] == url
            [span] = await store.query_spans(ended[0].rollout_id)
            assert span.attributes == {"reward": 0.5, "n": 1} and span.sequence_id == 1
            [failed] = await store.query_rollouts(status_in=["failed"])
            assert [attempt.status for attempt in await store.query_attempts(failed.rollout_id)] == ["failed", "failed"]
            assert failed.config.max_attempts == 2
            assert len(await store.query_rollouts(status_in=["queuing"])) == 120
            assert len(await store.query_rollouts(status_in=["cancelled"])) == 1
            resources = (await store.get_resources_by_id("res-1")).resources
            assert resources["main"].sampling_parameters == {"temperature": 0.5}
            assert resources["prompt"].template == "Say {word}"
    async with open_store("memory://") as store:
        with pytest.raises(ImportFailed, match="cannot be reached"):
            await import_store(url, store)


async def test_the_program_of_the_guide_before_the_move_runs_with_the_original(tmp_path):
    page = (HERE.parents[1] / "docs/migrating/agent-lightning.md").read_text()
    before = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    first, _, rest = before.partition("\n")
    assert first.startswith("import leyden.compat")
    count = "import asyncio\nprint(len(asyncio.run(trainer.store.query_rollouts())))\n"
    (tmp_path / "program.py").write_text(rest + count)
    assert await output(tmp_path / "program.py") == "4"


@pytest.mark.parametrize("name", ["own_parts", "own_bundles", "own_traces"])
async def test_a_program_with_parts_of_its_own_prints_with_the_original_what_the_alias_is_tested_for(name):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    compat = HERE.parent / "compat"
    with program(compat / f"{name}.py", port) as running:
        out, errors = await asyncio.to_thread(running.communicate, timeout=150)
    assert running.returncode == 0, errors
    assert out == (compat / f"{name}.txt").read_text()
