"""A crew, and openai 2 (which CrewAI pins) and anthropic 1, as `tests/frameworks` does it with the other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.harness import check, check_page, check_training, measure, python

GATEWAY = "leyden.model_call"
CHAT = "chat gpt-4.1-mini"

LOOP, THREADS, PROCESSES = "loop", "threads", "processes"
AGENTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "crewai": ([LOOP, THREADS, PROCESSES], {"seen_by": [CHAT, GATEWAY], "tool": True, "agents": []}),
    "openai": ([LOOP, THREADS], {"seen_by": [CHAT, GATEWAY], "tool": False, "agents": []}),
    "anthropic": (
        [LOOP, THREADS],
        {"seen_by": ["chat claude-sonnet-4-5", "anthropic.messages.create", GATEWAY], "tool": False, "agents": []},
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", AGENTS)
def test_every_call_of_256_agents_at_once_is_in_its_own_rollout_once_and_exact(name: str, tmp_path: Path):
    ways, expected = AGENTS[name]
    for report in measure(name, ways, tmp_path).values():
        check(report, **expected)


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_the_page_runs_and_nobody_is_called(tmp_path: Path):
    check_page("crewai", tmp_path)


@pytest.mark.timeout(300)
def test_the_crew_of_the_page_learns_to_call_its_tool(tmp_path: Path):
    check_training("crewai", tmp_path)


LATE = """
import os, time
from crewai.events.base_events import BaseEvent
from crewai.events.event_bus import crewai_event_bus
from leyden.tracing.instrumentation import instrument

class Happened(BaseEvent):
    type: str = "happened"

seen = []

@crewai_event_bus.on(Happened)
def behind_the_agent(source, event):
    time.sleep(0.5)
    seen.append(os.environ.get("CREWAI_DISABLE_TELEMETRY"))

with instrument("crewai"):
    crewai_event_bus.emit(None, Happened())
print(seen, os.environ.get("CREWAI_DISABLE_TELEMETRY"))
"""


@pytest.mark.merge
@pytest.mark.timeout(120)
def test_what_crewai_tells_itself_behind_an_agent_is_told_before_its_telemetry_is_as_it_was(tmp_path: Path):
    done = python("-c", LATE, outside=tmp_path / "outside")
    assert done.stdout.splitlines()[-1] == "['true'] None", done.stderr[-2000:]
