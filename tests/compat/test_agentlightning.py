"""Programs in the style of Agent Lightning's run under its import names, and behave as they did there."""

import ast
import asyncio
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import leyden.compat
from leyden.testing import FakeUpstream
from leyden_compat.finder import ForeignNameError

leyden.compat.install()
agl: Any = importlib.import_module("agentlightning")
otel: Any = importlib.import_module("agentlightning.utils.otel")
InMemoryLightningStore: Any = importlib.import_module("agentlightning.store.memory").InMemoryLightningStore


async def traced(body: Any) -> list[Any]:
    tracer = agl.OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context("test") as trace:
            body(trace)
    return tracer.get_last_trace()


async def test_emitted_spans_have_the_old_names_values_and_errors() -> None:
    def body(trace: Any) -> None:
        with trace.start_as_current_span("mine"):
            agl.emit_reward(
                {"speed": 1, "quality": 0.5}, primary_key="quality", attributes=otel.make_tag_attributes(["t"])
            )
        agl.emit_object({"a": [1]})
        agl.emit_object(b"x")
        agl.emit_message("hello", {"who": {"id": 1}})
        agl.emit_exception(KeyError("k"))
        with pytest.raises(TypeError):
            agl.emit_reward("high")
        with pytest.raises(TypeError):
            agl.emit_message(3)
        with pytest.raises(RuntimeError):
            agl.emit_object(object())

    spans = {span.name: span for span in await traced(body)}
    reward = spans["agentlightning.annotation"]
    assert [(each.name, each.value) for each in agl.get_rewards_from_span(reward)] == [("quality", 0.5), ("speed", 1.0)]
    assert agl.find_final_reward(list(spans.values())) == 0.5
    assert otel.extract_tags_from_attributes(reward.attributes) == ["t"]
    assert reward.parent.span_id == spans["mine"].context.span_id == reward.parent_id
    assert agl.get_object_value(spans["agentlightning.object"]) == b"x"
    assert spans["agentlightning.message"].attributes == {"agentlightning.message.body": "hello", "who.id": 1}
    assert spans["agentlightning.exception"].status.status_code == "OK"
    with pytest.raises(RuntimeError, match="no active tracer"):
        agl.emit_reward(1.0)
    assert agl.emit_reward(1.0, propagate=False).attributes["agentlightning.reward.0.value"] == 1.0


async def test_an_operation_takes_attributes_and_records_input_and_output() -> None:
    @agl.operation(category="math")
    def add(a: int, *more: int, scale: dict[str, int] | None = None) -> int:
        return a + sum(more)

    seen: list[Any] = []

    def body(_: Any) -> None:
        assert add(1, 2, 3, scale={"k": 4}) == 6
        with agl.operation(user_id=7) as op:
            op.set_input(1, question="q")
            op.set_output({"answer": 2})
        seen.append(op.span())
        assert agl.get_active_tracer() is not None

    function, block = await traced(body)
    below = "agentlightning.operation"
    assert function.attributes[f"{below}.name"] == "add" and function.attributes["category"] == "math"
    assert [function.attributes[f"{below}.input.{name}"] for name in ("a", "more.1", "scale.k")] == [1, 3, 4]
    assert function.attributes[f"{below}.output"] == 6
    assert block.attributes == seen[0].attributes
    assert block.attributes["user_id"] == 7 and block.attributes[f"{below}.input.args.0"] == 1
    assert add(1) == 1, "outside a trace the function runs unrecorded"
    assert agl.get_active_tracer() is None


async def test_a_store_answers_unknown_ids_with_nothing() -> None:
    async with InMemoryLightningStore(thread_safe=True) as store:
        assert await store.get_rollout_by_id("nope") is None
        assert await store.get_latest_attempt("nope") is None
        assert await store.get_resources_by_id("nope") is None
        assert await store.get_worker_by_id("nope") is None
        assert list(await store.query_spans("nope")) == []
        assert list(await store.query_attempts("nope")) == []
        rollout = await store.enqueue_rollout("task")
        assert await store.wait_for_rollouts(rollout_ids=["nope", rollout.rollout_id], timeout=0.0) == []
        [found] = await store.query_rollouts(status=["queuing"], rollout_ids=[rollout.rollout_id])
        assert found.rollout_id == rollout.rollout_id
        assert (await store.statistics())["uptime"] >= 0


async def test_statuses_that_programs_set_by_hand_are_taken() -> None:
    async with InMemoryLightningStore() as store:
        rollout = await store.enqueue_rollout("task")
        assert (await store.update_rollout(rollout.rollout_id, status="succeeded")).status == "succeeded"
        late = await store.update_attempt(rollout.rollout_id, "latest", status="failed")
        assert late.status == "succeeded", "a late report changes nothing, and raises nothing"
        assert (await store.update_rollout(rollout.rollout_id, metadata={"a": 1})).metadata == {"a": 1}


async def test_spans_have_links_context_and_a_resource_with_attributes() -> None:
    context = agl.SpanContext(trace_id="1" * 32, span_id="2" * 16, is_remote=False, trace_state={})
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout("task")
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        span = agl.Span(
            **ids, sequence_id=1, trace_id="3" * 32, span_id="4" * 16, parent_id=None, name="step",
            status=agl.TraceStatus(status_code="OK"), attributes={}, events=[agl.Event(name="e", attributes={})],
            links=[agl.Link(context=context, attributes={"why": "test"})], start_time=1.0, end_time=2.0, context=None,
            parent=None, resource=agl.OtelResource(attributes={"service": "s"}, schema_url=""),
        )  # fmt: skip
        await store.add_span(span)
        await store.add_span(agl.Span.from_attributes(attributes={"a": 1}, **ids, sequence_id=2, parent_id="4" * 16))
        first, second = await store.query_spans(rollout.rollout_id)
    assert first.links[0].context.span_id == "2" * 16 and first.links[0].attributes == {"why": "test"}
    assert first.resource.attributes["service"] == "s" and first.resource.schema_url == ""
    assert second.name == "agentlightning.virtual" and second.parent.span_id == first.context.span_id
    assert agl.Span.model_validate_json(first.model_dump_json()).resource.attributes["service"] == "s"


def test_constructors_take_the_old_arguments() -> None:
    with pytest.warns(DeprecationWarning, match="n_workers"):
        trainer = agl.Trainer(n_workers=2, strategy={"type": "shm", "main_thread": "algorithm", "graceful_delay": 1.0})
    assert trainer.n_runners == 2 and type(trainer.adapter).__name__ == "TracerTraceToTriplet"
    assert agl.Trainer(adapter={"agent_match": "x"}, daemon=True, max_rollouts=3).max_rollouts == 3
    assert (
        agl.ClientServerExecutionStrategy(n_runners=3, main_process="algorithm", allowed_exit_codes=(0,)).n_runners == 3
    )
    runner = agl.LitAgentRunner[str](
        agl.OtelTracer(), max_rollouts=1, poll_interval=0.1, heartbeat_launch_mode="asyncio"
    )
    assert runner.get_worker_id() == "Worker-Unknown"
    proxy = agl.LLMProxy(
        model_list=[{"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": "http://127.0.0.1:9/v1"}}],
        launch_mode="mp", num_retries=1, litellm_config={},
    )  # fmt: skip
    assert proxy.model_list[0]["model_name"] == "m"
    llm = agl.ProxyLLM(endpoint="http://h:1", model="m")
    assert llm.get_base_url() == "http://h:1"
    assert agl.PromptTemplate(template="{a[0]}", engine="f-string").format(a="xy") == "x"


def test_components_that_a_trainer_makes_are_those_of_agent_lightning() -> None:
    trainer = agl.Trainer(n_runners=8, tracer=agl.OtelTracer(), adapter={"agent_match": "plan"})
    assert isinstance(trainer.runner, agl.LitAgentRunner) and isinstance(trainer.runner.tracer, agl.OtelTracer)
    assert (trainer.adapter.agent_match, trainer.adapter.repair_hierarchy) == ("plan", True)


def test_a_port_selects_cs_and_counts_for_no_other_strategy() -> None:
    for strategy in (None, "cs", {"type": "cs"}, agl.ClientServerExecutionStrategy(server_port=9000)):
        served = agl.Trainer(port=8081, strategy=strategy).strategy
        assert isinstance(served, agl.ClientServerExecutionStrategy) and served.server_port == 8081
    assert agl.Trainer(port=8081, strategy={"type": "cs", "server_port": 9000}).strategy.server_port == 9000
    for strategy in ("shm", {"type": "shm"}, agl.SharedMemoryExecutionStrategy()):
        assert not hasattr(agl.Trainer(port=8081, strategy=strategy).strategy, "server_port")


def test_a_runner_runs_one_rollout_at_a_time() -> None:
    under_way: list[Any] = []
    most: list[int] = []

    class Agent(agl.LitAgent[int]):
        def rollout(self, task: int, resources: Any, rollout: Any) -> float:
            under_way.append(task)
            time.sleep(0.02)  # long enough for a second one to begin
            most.append(len(under_way))
            under_way.remove(task)
            return 1.0

    agl.Trainer(algorithm=agl.Baseline()).fit(Agent(), [1, 2, 3, 4])
    assert most == [1, 1, 1, 1]
    agl.Trainer(algorithm=agl.Baseline(), concurrency=4).fit(Agent(), [1, 2, 3, 4])
    assert max(most) > 1


def test_the_names_of_version_0_1_are_those_of_today() -> None:
    tracer: Any = importlib.import_module("agentlightning.tracer")
    exporter = tracer.TripletExporter(agent_match="writer")
    assert exporter.export([]) == [] and tracer.BaseTracer is tracer.Tracer
    with pytest.warns(DeprecationWarning, match="triplet_exporter"):
        assert agl.Trainer(triplet_exporter=exporter).adapter is exporter


def test_a_missing_name_names_its_replacement() -> None:
    with pytest.raises(ForeignNameError, match="open_store"):
        exec("from agentlightning.store.mongo import MongoLightningStore")


PROGRAM = """
import asyncio

import agentlightning as agl
from agentlightning.algorithm.utils import batch_iter_over_dataset
from agentlightning.types import LLM, PromptTemplate
from openai import OpenAI


@agl.algo
async def choose(*, store, adapter, train_dataset):
    scores = {}
    for template in ("Short: {task}", "Longer prompt: {task}"):
        await store.add_resources({"prompt": PromptTemplate(template=template, engine="f-string")})
        tasks = next(batch_iter_over_dataset(train_dataset, 2))
        rollouts = [await store.enqueue_rollout(input=task, mode="train") for task in tasks]
        while len(done := await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=0.01)) < 2:
            await asyncio.sleep(0.02)
        spans = [await store.query_spans(rollout.rollout_id, "latest") for rollout in done]
        assert all(any(span.name == "agentlightning.annotation" for span in each) for each in spans)
        scores[template] = sum(agl.find_final_reward(each) for each in spans)
    print(max(scores, key=scores.get), scores)


@agl.rollout
def agent(task: str, prompt_template: PromptTemplate) -> float:
    client = OpenAI(base_url=URL, api_key="none")
    said = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": prompt_template.format(task=task)}]
    )
    assert said.choices[0].message.content
    return float(len(prompt_template.template))


async def step():
    runner = agl.LitAgentRunner[str](agl.AgentOpsTracer())
    store = agl.InMemoryLightningStore()
    served = [{"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": URL, "api_key": "none"}}]
    proxy = agl.LLMProxy(model_list=served, store=store, launch_mode="thread")
    await proxy.start()
    with runner.run_context(agent=solve, store=store):
        rollout = await runner.step("six times seven", resources={"main": proxy.as_resource()})
    await proxy.stop()
    [triplet] = agl.TracerTraceToTriplet().adapt(await store.query_spans(rollout.rollout_id))
    print(rollout.status, triplet.reward, triplet.prompt.get("raw_content")[0]["content"], "token_ids" in triplet.response)


@agl.llm_rollout
def solve(task: str, llm: LLM):
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    agl.emit_reward(1.0)


if __name__ == "__main__":
    agl.setup_logging("WARNING", submodule_levels={"agentlightning.store": "ERROR"})
    agl.Trainer(n_runners=2, algorithm=choose, initial_resources=None).fit(agent, train_dataset=["a", "b", "c"])
    asyncio.run(step())
"""


@pytest.mark.slow
@pytest.mark.merge
async def test_a_program_with_an_algorithm_an_agent_and_a_model_runs_unchanged(tmp_path: Path) -> None:
    async with FakeUpstream(model="m") as upstream:
        (tmp_path / "program.py").write_text(f"URL = {upstream.endpoint!r}\n{PROGRAM}")
        command = [sys.executable, "-m", "leyden.compat", "program.py"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, text=True, capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Longer prompt: {task} {'Short: {task}': 26.0, 'Longer prompt: {task}': 42.0}",
        "succeeded 1.0 six times seven True",
    ]


ROOMS = """
import logging

from openai import AsyncOpenAI, OpenAI

from agentlightning import Trainer, setup_logging
from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.apo import APO
from agentlightning.litagent import rollout
from agentlightning.types import PromptTemplate


@rollout
def choose_room(task: dict, prompt_template: PromptTemplate) -> float:
    client = OpenAI(base_url=URL, api_key="x")
    text = prompt_template.format(**task)
    messages = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model="m", messages=messages, temperature=0.0)
    return float(answer.choices[0].message.content == task["expected"])


if __name__ == "__main__":
    setup_logging()
    handler = logging.FileHandler("apo.log")
    logging.getLogger("agentlightning.algorithm.apo").addHandler(handler)
    algorithm = APO[dict](
        AsyncOpenAI(base_url=URL, api_key="x"),
        gradient_model="m", apply_edit_model="m", val_batch_size=4, gradient_batch_size=2,
        beam_width=2, branch_factor=2, beam_rounds=1, _poml_trace=True,
    )
    trainer = Trainer(
        algorithm=algorithm, n_runners=4, adapter=TraceToMessages(),
        initial_resources={"prompt_template": PromptTemplate(template="A room for {attendees}?", engine="f-string")},
    )
    tasks = [{"attendees": 5 + n, "expected": "Nova"} for n in range(4)]
    trainer.fit(agent=choose_room, train_dataset=tasks, val_dataset=tasks)
    print(algorithm.get_best_prompt().template)
"""


def room_model(body: dict[str, Any]) -> str:
    """Choose the right room if told to be careful; told of a prompt, say what it lacks, or write a better one."""
    said = str(body["messages"])
    if "room for" in said and len(said) < 100:
        return "Nova" if "careful" in said else "Orion"
    if "<new_prompt>" not in said:
        return "It does not say what to look at."
    return "<new_prompt>Look at the capacity, and be careful. A room for {attendees}?</new_prompt>"


@pytest.mark.slow
@pytest.mark.merge
async def test_an_apo_program_learns_a_prompt_unchanged(tmp_path: Path) -> None:
    async with FakeUpstream(model="m", reply=room_model) as upstream:
        (tmp_path / "program.py").write_text(f"URL = {upstream.endpoint!r}\n{ROOMS}")
        command = [sys.executable, "-m", "leyden.compat", "program.py"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, text=True, capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Look at the capacity, and be careful. A room for {attendees}?"
    assert "a better prompt" in (tmp_path / "apo.log").read_text(), "the old logger's handlers get the log"


OF_0_1 = """
from agentlightning import LLM, DevTaskLoader, LitAgent, Trainer, reward


@reward
async def one(n): return float(n == 1)


class Agent(LitAgent):
    async def training_rollout_async(self, task, rollout_id, resources):
        return await one(task["n"]) if list(resources) == ["main_llm"] else None


if __name__ == "__main__":
    tasks = DevTaskLoader([{"n": 1}, {"n": 2}], {"main_llm": LLM(endpoint="http://localhost:9/v1", model="tiny")})
    trainer = Trainer(n_workers=1, max_tasks=2, dev=True)
    trainer.fit(Agent(), "http://localhost:8000", tasks)
    trainer.fit(Agent(), backend="http://localhost:8000", dev_backend=tasks)
    Trainer(n_workers=1, max_tasks=2).fit(Agent(), tasks)
    print([report.final_reward for report in tasks.rollouts])
"""


@pytest.mark.slow
@pytest.mark.merge
def test_a_program_of_version_0_1_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OF_0_1)
    command = [sys.executable, "-m", "leyden.compat", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]"


async def test_metrics_are_counted_and_can_be_awaited_or_not(caplog: pytest.LogCaptureFixture) -> None:
    metrics: Any = importlib.import_module("agentlightning.utils.metrics")
    backend = metrics.MultiMetricsBackend([metrics.ConsoleMetricsBackend(log_interval_seconds=0, group_level=1)])
    backend.register_counter("requests", ["operation", "status"])
    backend.register_histogram("latency", ["operation"], buckets=[0.1, 1.0])
    backend.inc_counter("requests", 600, labels={"operation": "search", "status": "200"})
    await backend.inc_counter("requests", 600, labels={"operation": "search", "status": "500"})
    with caplog.at_level("INFO", "leyden.metrics"):
        for value in (0.01, 0.02, 0.03):
            await backend.observe_histogram("latency", value=value, labels={"operation": "search"})
    assert "latency{operation=search}=20.00ms,29.00ms,29.80ms  requests{operation=search}=" in caplog.text
    with pytest.raises(ValueError, match="'status' is required"):
        backend.inc_counter("requests", labels={"operation": "search"})
    with pytest.raises(ValueError, match="not registered"):
        backend.observe_histogram("requests", 1.0)
    with pytest.raises(ValueError, match="already registered"):
        backend.register_counter("latency")


async def test_a_program_finds_what_litellm_wrote_of_a_call() -> None:
    """The checks of `minimal/llm_proxy.py test`, over HTTP too."""
    async with FakeUpstream(model="there") as upstream, InMemoryLightningStore() as memory:
        server = agl.LightningStoreServer(memory, "127.0.0.1", 0)
        await server.start()
        model = {"model": "hosted_vllm/there", "api_base": upstream.endpoint}
        proxy = agl.LLMProxy(model_list=[{"model_name": "here", "litellm_params": model}], store=server)
        await proxy.start()
        try:
            store = agl.LightningStoreClient(server.endpoint)
            rollout = await store.start_rollout(input="hello")
            url = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id).endpoint
            question = {"model": "here", "messages": [{"role": "user", "content": "Who are you?"}]}
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{url}/chat/completions", json=question) as reply:
                    answer = await reply.json()
                async with session.post(f"{url}/chat/completions", json={**question, "stream": True}) as reply:
                    assert b'"token_ids"' in await reply.read()
            truth = upstream.truth(answer["id"])
            choice = answer["choices"][0]
            assert choice["provider_specific_fields"] == {"stop_reason": None, "token_ids": truth.response_ids}
            assert answer["prompt_token_ids"] == truth.prompt_ids
            spans = await store.query_spans(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
            assert [span.name for span in spans] == ["leyden.model_call", "raw_gen_ai_request"] * 2
            assert spans.total == 4
            for span in spans:
                assert span.resource.attributes["agentlightning.rollout_id"] == rollout.rollout_id
            raw = spans[1].attributes
            assert raw["llm.hosted_vllm.messages"] == str(question["messages"])
            assert "return_token_ids" in raw["llm.hosted_vllm.extra_body"]
            assert raw["llm.hosted_vllm.prompt_token_ids"] == str(truth.prompt_ids)
            assert ast.literal_eval(raw["llm.hosted_vllm.choices"])[0]["token_ids"] == truth.response_ids
            assert len(await store.query_spans(rollout.rollout_id, name="raw_gen_ai_request")) == 2
            assert len(await store.query_spans(rollout.rollout_id, name_contains="call")) == 2
            for adapter in (agl.LlmProxyTraceToTriplet(), agl.TracerTraceToTriplet()):
                triplets = adapter.adapt(spans)
                assert triplets[0].response["token_ids"] == truth.response_ids
                assert len(triplets) == 2, "a call with two spans is one call"
            await store.close()
        finally:
            await proxy.stop()
            await server.stop()


async def test_answers_show_no_token_ids_without_the_callback() -> None:
    async with FakeUpstream(model="m") as upstream, InMemoryLightningStore() as store:
        model = {"model": "hosted_vllm/m", "api_base": upstream.endpoint}
        served = [{"model_name": "m", "litellm_params": model}]
        async with agl.LLMProxy(model_list=served, store=store, callbacks=["opentelemetry"]) as proxy:
            rollout = await store.start_rollout(input="hello")
            url = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id).endpoint
            question = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/chat/completions", json=question) as reply,
            ):
                assert "token_ids" not in await reply.text()
