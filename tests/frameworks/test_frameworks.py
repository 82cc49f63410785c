"""The small agent of each framework, unmodified: 256 at once on one event loop, in threads and in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import ROOT, check, check_page, check_training, measure, python

GATEWAY = "leyden.model_call"
CHAT = "chat gpt-4.1-mini"
CLAUDE = ["chat claude-sonnet-4-5", "anthropic.messages.create", GATEWAY]  # anthropic 2 makes a span of its own
WAYS = ["loop", "threads", "processes"]

FRAMEWORKS: dict[str, dict[str, Any]] = {
    "openai": {"seen_by": [CHAT, GATEWAY], "tool": False, "agents": []},
    "langgraph": {"seen_by": [CHAT, GATEWAY], "tool": True, "agents": []},
    "openai_agents": {"seen_by": [CHAT, GATEWAY], "tool": True, "agents": ["Weather"]},
    "anthropic": {"seen_by": CLAUDE, "tool": False, "agents": []},
    "autogen": {
        "seen_by": ["OpenAIChatCompletionClient.create", CHAT, GATEWAY],
        "tool": True,
        "agents": ["weather_agent"],
    },
    "agent_framework": {"seen_by": [CHAT, CHAT, GATEWAY], "tool": True, "agents": ["weather"]},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_call_of_256_agents_at_once_is_in_its_own_rollout_once_and_exact(name: str, tmp_path: Path):
    for report in measure(name, WAYS, tmp_path).values():
        check(report, **FRAMEWORKS[name])


@pytest.mark.merge
@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", ["openai", "anthropic", "langchain", "openai_agents", "autogen", "agent_framework"])
def test_each_page_runs_and_nobody_is_called(page: str, tmp_path: Path):
    check_page(page, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_agent_of_each_page_learns_to_call_its_tool(name: str, tmp_path: Path):
    check_training(name, tmp_path)


PATCHED = """
import importlib, sys
from leyden.tracing.instrumentation import in_use, instrument, instrumentation_class, names
LIBRARIES = {"openai": "openai", "anthropic": "anthropic", "langchain": "langgraph.prebuilt", "openai-agents": "agents",
             "autogen": "autogen_agentchat.agents", "agent-framework": "agent_framework"}
assert not set(in_use()) & set(LIBRARIES), in_use()
for name, library in LIBRARIES.items():
    importlib.import_module(library)
assert set(in_use()) == set(LIBRARIES) | {"httpx", "httpx2", "aiohttp"}, in_use()

def state():
    import agents.models.openai_provider, agents.tracing, langchain_core.callbacks, langgraph.pregel, openai, anthropic
    from agent_framework.observability import OBSERVABILITY_SETTINGS as settings
    from agents.tracing.processors import default_processor
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
    processors = agents.tracing.get_trace_provider()._multi_processor._processors
    methods = {
        "openai": [(openai.resources.chat.completions.Completions, "create")],
        "anthropic": [(anthropic.resources.messages.Messages, "create")],
        "langchain": [(langchain_core.callbacks.BaseCallbackManager, "__init__"), (langgraph.pregel.Pregel, "stream")],
        "openai-agents": [(agents.models.openai_provider, "shared_http_client")],
        "autogen": [(AssistantAgent, "on_messages_stream"), (BaseOpenAIChatCompletionClient, "create")],
    }
    return {
        **{name: [id(vars(owner)[method]) for owner, method in found] for name, found in methods.items()},
        "agent-framework": (settings.enable_instrumentation, settings.enable_sensitive_data),
        "processors": [id(processor) for processor in processors],
        "exports": default_processor() in processors,
    }

before = state()
assert before["exports"]
for name in LIBRARIES:
    with instrument(name), instrument(name):
        assert instrumentation_class(name).installed()
        during = state()
        assert during[name] != before[name], name
        with instrument(name):
            assert state() == during, name
        assert state() == during, name
        assert during["exports"] == (name != "openai-agents")
    assert state() == before, name
print("as before")
"""


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_a_library_is_changed_only_once_it_is_imported_and_is_afterwards_as_it_was(tmp_path: Path):
    done = python("-c", PATCHED, outside=tmp_path / "outside")
    assert done.stdout.endswith("as before\n"), done.stderr[-4000:]


KEEPS_OTHERS = """
import agents
from agents.tracing import TracingProcessor, get_trace_provider
from agents.tracing.processors import default_processor
from leyden.tracing.instrumentation import instrument

class Mine(TracingProcessor):
    def on_trace_start(self, trace): pass
    on_trace_end = on_span_start = on_span_end = on_trace_start
    def shutdown(self): pass
    def force_flush(self): pass

mine, late = Mine(), Mine()
agents.add_trace_processor(mine)
processors = lambda: get_trace_provider()._multi_processor._processors
with instrument("openai-agents"):
    assert mine in processors() and default_processor() not in processors()
    agents.add_trace_processor(late)
assert processors() == (default_processor(), mine, late), processors()
print("kept")
"""


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_trace_processors_that_the_user_added_to_the_agents_sdk_stay(tmp_path: Path):
    done = python("-c", KEEPS_OTHERS, outside=tmp_path / "outside")
    assert done.stdout == "kept\n", done.stderr[-4000:]


FAILING = """
import asyncio, importlib, sys
sys.path.insert(0, "examples/frameworks")
import leyden as ly
from leyden.adapter import model_calls
from leyden.testing import FakeUpstream, Misbehaviour
from run import pretend, record

async def main():
    for name in sys.argv[1:]:
        module = importlib.import_module(f"{name}_agent")
        async with FakeUpstream(model=module.MODEL, reply=pretend) as upstream, ly.InMemoryLightningStore() as store:
            upstream.misbehave(Misbehaviour(), Misbehaviour(status=400))
            await record(module.agent, [{"city": "Paris"}], upstream, store)
            (rollout,) = await store.query_rollouts()
            calls = model_calls(await store.query_spans(rollout.rollout_id))
            assert (rollout.status, [call.failed for call in calls]) == ("failed", [False, True]), (name, calls)
            assert "400" in calls[1].refused
    print("once")

asyncio.run(main())
"""


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_a_call_that_fails_is_one_failed_call_for_every_framework(tmp_path: Path):
    done = python("-c", FAILING, *FRAMEWORKS, outside=tmp_path / "outside")
    assert done.stdout.endswith("once\n"), done.stderr[-4000:]


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_the_guard_of_these_tests_sees_who_calls_outside(tmp_path: Path):
    outside = tmp_path / "outside"
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import httpx; httpx.get(\"http://example.com\")'])"
    python("-c", code, outside=outside)
    assert "example.com" in outside.read_text()


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_the_command_of_the_examples_shows_what_was_below_what(tmp_path: Path):
    done = python(str(ROOT / "examples" / "frameworks" / "run.py"), "langgraph", outside=tmp_path / "outside")
    assert done.returncode == 0, done.stderr
    assert "{'city': 'Lima'}: succeeded, reward 1.0" in done.stdout
    assert "  invoke_agent\n    chat gpt-4.1-mini\n      leyden.model_call\n    execute_tool get_weather" in done.stdout
