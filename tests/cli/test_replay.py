"""`leyden replay`, as a user runs it: a failed rollout is debugged without its model, and goes on with one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from leyden.cli import main
from leyden.testing import FakeUpstream

AGENT = """
import openai
import leyden as ly

@ly.llm_rollout
async def agent(task: dict, llm: ly.LLM) -> float:
    messages = []
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        for number in range(3):
            messages.append({"role": "user", "content": ASK})
            answer = await client.chat.completions.create(
                model=llm.model, messages=messages, **llm.sampling_parameters
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    END
"""
ASK = "f\"{task['q']} {number}\""
OTHER = f'"other Where?" if number == 1 else {ASK}'
BUG, FIXED = 'raise KeyError("score")', "return 0.75"

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command in a folder with three versions of an agent; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, ask, end in (("buggy", ASK, BUG), ("fixed", ASK, FIXED), ("changed", OTHER, FIXED)):
        (tmp_path / f"agent_{name}.py").write_text(AGENT.replace("ASK", ask).replace("END", end))
    (tmp_path / "tasks.json").write_text('[{"q": "Where?"}]')

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, told.out, told.err

    return call


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


async def record(said: Said, upstream: FakeUpstream) -> str:
    """Measure the agent with the bug; return the id of its failed rollout."""
    model = f"fake={upstream.endpoint}"
    await asyncio.to_thread(said, "eval", "agent_buggy:agent", "--tasks", "tasks.json", "--model", model)
    (failed,) = json.loads((await asyncio.to_thread(said, "show", "latest", "--failed", "--json"))[1])
    assert failed["reason"] == "KeyError: 'score'"
    return failed["rollout_id"]


async def test_a_failed_rollout_is_debugged_without_its_model(said: Said, upstream: FakeUpstream) -> None:
    rollout_id = await record(said, upstream)
    asked = len(upstream.requests)
    code, out, _ = await asyncio.to_thread(said, "replay", rollout_id, "--agent", "agent_buggy:agent")
    assert code == 1
    assert "state       failed: KeyError: 'score'" in out
    code, out, err = await asyncio.to_thread(said, "replay", rollout_id[:12], "--agent", "agent_fixed:agent")
    assert code == 0, err
    assert [line.split() for line in out.splitlines()[:3]] == [["call", str(n), "replayed"] for n in range(3)]
    assert "reward      none before, 0.75 now" in out
    assert len(upstream.requests) == asked
    runs = json.loads((await asyncio.to_thread(said, "runs", "--json"))[1])
    assert sorted(run["kind"] for run in runs) == ["eval", "replay", "replay"]
    shown = (await asyncio.to_thread(said, *out.splitlines()[-1].split()[1:]))[1]
    assert "Where? 2" in shown


async def test_a_changed_agent_leaves_the_record_where_it_was_changed(said: Said, upstream: FakeUpstream) -> None:
    rollout_id = await record(said, upstream)
    code, out, _ = await asyncio.to_thread(said, "replay", rollout_id, "--agent", "agent_changed:agent")
    lines = out.splitlines()
    assert code == 1
    assert lines[0].split() == ["call", "0", "replayed"]
    assert lines[1].endswith('diverged: messages[2].content is "other Where?", the record has "Where? 1"')
    assert lines[2].startswith("calls after the record need a model: give --model")
    assert "no model 'fake'" in out
    model = f"fake={upstream.endpoint}"
    arguments = ["replay", rollout_id, "--agent", "agent_changed:agent", "--model", model, "--json"]
    code, out, err = await asyncio.to_thread(said, *arguments)
    assert code == 0, err
    data = json.loads(out)
    assert [call["state"] for call in data["calls"]] == ["replayed", "diverged", "live"]
    assert (data["reward_before"], data["reward"], data["status"]) == (None, 0.75, "succeeded")


@pytest.mark.parametrize("name", ["fake", "another"])
async def test_calls_from_k_on_are_live_with_any_model(said: Said, upstream: FakeUpstream, name: str) -> None:
    rollout_id = await record(said, upstream)
    async with FakeUpstream(model=name) as other:
        model = f"{name}={other.endpoint}"
        arguments = ["replay", rollout_id, "--agent", "agent_fixed:agent", "--from", "1", "--model", model, "--json"]
        code, out, err = await asyncio.to_thread(said, *arguments)
        assert code == 0, err
        assert [call["state"] for call in json.loads(out)["calls"]] == ["replayed", "live", "live"]
        assert [len(request["messages"]) for request in other.requests] == [3, 5]


async def test_what_cannot_be_replayed_is_said_before_a_run_begins(
    said: Said, upstream: FakeUpstream, tmp_path: Path
) -> None:
    rollout_id = await record(said, upstream)
    n_runs = len(list((tmp_path / ".leyden").iterdir()))
    for arguments, fault in (
        ([rollout_id, "--agent", "agent_fixed:nobody"], "agent_fixed has no 'nobody'"),
        (["ro-none", "--agent", "agent_fixed:agent"], "has no rollout 'ro-none'"),
        ([rollout_id, "--agent", "agent_fixed:agent", "--from", "1"], "has no model/ folder"),
        ([rollout_id, "--agent", "agent_fixed:agent", "--from", "4"], "has 3 recorded calls, so give 0 to 3"),
        ([rollout_id, "--agent", "agent_fixed:agent", "--run", "none"], "there is no run 'none'"),
    ):
        code, _, err = await asyncio.to_thread(said, "replay", *arguments)
        assert code == 1
        assert err.startswith("leyden: ")
        assert fault in err
    assert len(list((tmp_path / ".leyden").iterdir())) == n_runs


def test_the_command_explains_itself_with_examples(said: Said) -> None:
    code, out, _ = said("replay", "--help")
    assert code == 0
    assert "leyden replay ro-1f2e3d --agent agent.py:agent" in out
