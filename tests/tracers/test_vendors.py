"""AgentOps, Weave and OpenTelemetry's own instrumentation, as they are installed: recorded in the right rollout, and nobody is called.

Each case is a process of its own, in which any connection that leaves this machine, and any look-up of a name, ends the test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUARD = """
import sys
def guard(event, args):
    if event == "socket.getaddrinfo" and args[0] not in (None, "127.0.0.1", b"127.0.0.1", "localhost"):
        print("OUTSIDE", args[0], file=sys.stderr, flush=True)
    if event == "socket.connect" and isinstance(args[1], tuple) and not args[1][0].startswith("127."):
        print("OUTSIDE", args[1], file=sys.stderr, flush=True)
sys.addaudithook(guard)
"""
AGENT = """
import asyncio, json, os
import leyden as ly
from leyden.testing import FakeUpstream

QUESTION = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}

async def run(agent, tracer, tasks):
    async with FakeUpstream() as upstream, ly.InMemoryLightningStore() as store:
        async with ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
            runner = ly.LitAgentRunner(tracer, concurrency=256, max_rollouts=len(tasks))
            await store.add_resources({"llm": proxy.as_resource()})
            rollouts = [await store.enqueue_rollout(task) for task in tasks]
            async with runner.run_context(agent=agent, store=store, recorders=[proxy]):
                await runner.iter()
            result = {}
            for rollout in rollouts:
                final = await store.get_rollout_by_id(rollout.rollout_id)
                spans = list(await store.query_spans(rollout.rollout_id))
                result[rollout.input] = [final.status, [span.model_dump(mode="json") for span in spans]]
            return result

def finish(result, **more):
    print(json.dumps({"result": result, **more}))
"""


def in_a_process(script: str, *, guarded: bool = True, **environment: str) -> dict[str, Any]:
    source = GUARD + AGENT + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "sk-the-users-own", "HOME": "/nonexistent", **environment},
        timeout=220,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if guarded:
        assert "OUTSIDE" not in done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def model_calls(spans: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gateway's record of the one call, and the other library's span of it."""
    (gateway,) = (span for span in spans if span["name"] == "leyden.model_call")
    response = gateway["attributes"]["gen_ai.response.id"]
    (sdk,) = (
        span for span in spans if span is not gateway and span["attributes"].get("gen_ai.response.id") == response
    )
    assert gateway["tokens"]["response_ids"]
    return gateway, sdk


OPENAI_AGENT = """
    from openai import AsyncOpenAI, OpenAI

    @ly.rollout
    async def agent(task):
        ly.emit_message(f"start {task}")
        async with AsyncOpenAI(max_retries=0) as client:  # knows nothing of Leyden: the address is OpenAI's
            question = {**QUESTION, "messages": [{"role": "user", "content": f"task {task}"}]}
            await client.chat.completions.create(**question)
        return 1.0
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("tracer", ["AgentOpsTracer", "WeaveTracer", "OtelTracer"])
def test_64_agents_on_openais_client_are_recorded_by_their_gateway_and_by_the_library_and_nobody_is_called(tracer: str):
    answer = in_a_process(f"""
    {OPENAI_AGENT.strip()}
    import openai.resources.chat.completions as completions, httpx2, builtins
    before = completions.AsyncCompletions.create, httpx2.AsyncClient.send, builtins.__import__
    result = asyncio.run(run(agent, ly.{tracer}(), [str(n) for n in range(64)]))
    after = completions.AsyncCompletions.create, httpx2.AsyncClient.send, builtins.__import__
    finish(result, same=[a is b for a, b in zip(before, after)])
    """)
    assert answer["same"] == [True, True, True]
    for task, (status, spans) in answer["result"].items():
        assert status == "succeeded", task
        gateway, sdk = model_calls(spans)
        assert f"task {task}" in str(gateway["attributes"]["gen_ai.input.messages"])
        assert f"task {task}" in json.dumps(sdk["attributes"])
        assert gateway["parent_id"] == sdk["span_id"]


@pytest.mark.timeout(240)
def test_agentops_decorators_are_recorded_and_its_init_calls_nobody():
    answer = in_a_process("""
    import agentops
    from agentops.sdk.decorators import operation

    @operation
    def tool(x):
        ly.emit_message("inside")
        return x + 1

    @ly.rollout
    def agent(task):
        agentops.init(api_key="11111111-1111-1111-1111-111111111111")
        return float(tool(1))

    result = asyncio.run(run(agent, ly.AgentOpsTracer(), ["a", "b"]))
    finish(result, initialized=agentops.tracer.initialized)
    """)
    assert answer["initialized"] is False
    for status, spans in answer["result"].values():
        assert status == "succeeded"
        message, tool, reward = spans
        assert message["parent_id"] == tool["span_id"]
        assert (tool["name"], reward["name"]) == ("tool.task", "leyden.reward")


@pytest.mark.timeout(240)
def test_weaves_ops_are_recorded_with_what_went_in_and_out_and_how_they_failed():
    answer = in_a_process("""
    tracer = ly.WeaveTracer()
    import weave

    @weave.op
    def tool(x):
        ly.emit_message("inside")
        if x == 3:
            raise KeyError("three")
        return x + 1

    @weave.op
    async def plan(task):
        await asyncio.sleep(0)
        return sum([await asyncio.to_thread(tool, n) for n in (1, 2)])

    @ly.rollout
    async def agent(task):
        try:
            tool(3)
        except KeyError:
            pass
        return float(await plan(task))

    result = asyncio.run(run(agent, tracer, [str(n) for n in range(64)]))
    finish(result, client=repr(weave.get_client()))
    """)
    assert answer["client"] == "None"
    for task, (status, spans) in answer["result"].items():
        assert status == "succeeded"
        _, failed, _, first, _, second, plan, reward = spans
        assert (failed["name"], failed["status"]["status_code"]) == ("tool", "ERROR")
        assert failed["attributes"]["exception.type"] == "KeyError"
        assert json.loads(first["attributes"]["leyden.operation.input"]) == {"x": 1}
        assert (first["attributes"]["leyden.operation.output"], second["attributes"]["leyden.operation.output"]) == (
            "2",
            "3",
        )
        assert first["parent_id"] == second["parent_id"] == plan["span_id"]
        assert json.loads(plan["attributes"]["leyden.operation.input"]) == {"task": task}
        assert reward["attributes"]["leyden.reward.0.value"] == 5.0


@pytest.mark.timeout(240)
def test_the_guard_sees_what_weave_does_by_itself():
    answer = in_a_process("import weave; finish({})", guarded=False)
    assert "OUTSIDE" in answer["stderr"]
    assert "sentry" in answer["stderr"]


@pytest.mark.timeout(240)
def test_what_the_user_has_instrumented_stays_so_and_is_not_seen_twice():
    answer = in_a_process(f"""
    {OPENAI_AGENT.strip()}
    from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
    OpenAIInstrumentor().instrument()
    result = asyncio.run(run(agent, ly.OtelTracer(), ["a"]))
    finish(result, still=OpenAIInstrumentor().is_instrumented_by_opentelemetry)
    """)
    assert answer["still"] is True
    model_calls(answer["result"]["a"][1])


@pytest.mark.timeout(240)
def test_plain_httpx_goes_to_the_gateway_too():
    answer = in_a_process("""
    import httpx

    @ly.rollout
    async def agent(task):
        async with httpx.AsyncClient(trust_env=False) as client:
            url = "https://api.openai.com/v1/chat/completions"
            (await client.post(url, json=QUESTION)).raise_for_status()
        def sync():
            with httpx.Client(trust_env=False) as client:
                client.post(url, json=QUESTION).raise_for_status()
        await asyncio.to_thread(sync)
        return 1.0

    finish(asyncio.run(run(agent, ly.OtelTracer(), [str(n) for n in range(64)])))
    """)
    for status, spans in answer["result"].values():
        assert status == "succeeded"
        assert [span["name"] for span in spans].count("leyden.model_call") == 2


@pytest.mark.timeout(240)
def test_opentelemetrys_packages_are_installed_once_and_removed_with_the_last_block():
    answer = in_a_process("""
    from anthropic.resources.messages import Messages
    from openai.resources.chat.completions import Completions
    from leyden.tracing.instrumentation import instrument

    def methods():
        return Messages.create, Completions.create

    def wrapped():
        return [hasattr(vars(owner)["create"], "_self_wrapper") for owner in (Messages, Completions)]

    seen, before = [wrapped()], methods()
    with instrument("openai", "anthropic"):
        seen.append(wrapped())
        with instrument("anthropic", "openai"):
            seen.append(wrapped())
        seen.append(wrapped())
    seen.append(wrapped())
    finish(seen, back=[a is b for a, b in zip(before, methods())])
    """)
    assert answer["result"] == [[False, False], [True, True], [True, True], [True, True], [False, False]]
    assert answer["back"] == [True, True]
