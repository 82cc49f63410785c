"""The example with a Node program, run as its reader runs it, and its program alone, against a model whose answers are known."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.testing import FakeUpstream
from leyden.training.runs.folder import store_path
from leyden.types import semconv

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "any_program"


def says(replies: Iterator[str]) -> Any:
    return lambda body: next(replies)


@pytest.mark.parametrize(
    ("replies", "reward", "asked"),
    [
        (["5", "8", "7"], 1.0, ["guess 0..9", "higher 6..9", "lower 6..7"]),
        (["0", "1", "2", "3"], 0.0, ["guess 0..9", "higher 1..9", "higher 2..9", "higher 3..9"]),
        (["seven"], 0.0, ["guess 0..9"]),
    ],
)
async def test_the_program_plays_the_game_by_its_rules(replies: list[str], reward: float, asked: list[str]) -> None:
    agent = ly.ProcessAgent(["node", str(EXAMPLE / "agent.mjs")], reward="last_line")
    async with (
        ly.open_store("memory://") as store,
        FakeUpstream(reply=says(iter(replies))) as upstream,
        ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
        ly.LitAgentRunner().run_context(agent=agent, store=store, recorders=[proxy]) as runner,
    ):
        rollout = await runner.step({"secret": 7}, resources={"main": proxy.as_resource()})
        spans = await store.query_spans(rollout.rollout_id)
    assert ly.find_final_reward(spans) == reward
    assert [call.request["messages"][-1]["content"] for call in upstream.calls] == asked


@pytest.mark.slow
@pytest.mark.timeout(240)  # it loads torch in a process of its own, and starts 120 of Node
async def test_a_step_of_training_plays_every_game_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(EXAMPLE / "train.py"), "--steps", "1", "--run-dir", str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    async with ly.SqliteLightningStore(store_path(tmp_path / "run")) as store:
        rollouts = await store.query_rollouts()
        spans_of = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    processes = [span for spans in spans_of.values() for span in spans if span.name == semconv.PROCESS]
    assert len(processes) == len(rollouts) == 120
    for process in processes:
        spans = spans_of[process.rollout_id]
        assert ly.find_final_reward(spans) == float(str(process.attributes[semconv.PROCESS_STDOUT]))
        calls = [span for span in spans if span.name == semconv.MODEL_CALL]
        assert calls and {call.parent_id for call in calls} == {process.span_id}
