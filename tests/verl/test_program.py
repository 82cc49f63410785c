"""`python -m leyden.algorithm.verl` as a whole run on a CPU, in mode v0: a worker of Agent Lightning 0.1 runs the agent
in training, and a runner on the store in validation."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import leyden as ly
from leyden.legacy import AgentLightningClient, LegacyAgentRunner
from tests.verl.under_ray import KEYS, ROOT, play

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]
STEPS = {"trainer.total_training_steps": 1, "trainer.save_freq": 1, "trainer.test_freq": 1}
OWN = {"leyden.mode": "v0", "leyden.port": 0}


async def old_worker(url: str) -> int:
    """Run all rollouts of training."""
    client = AgentLightningClient(url, poll_interval=0.2)
    return await LegacyAgentRunner(play, client, max_tasks=16).iter_async()


async def runner(url: str) -> None:
    """Run all rollouts of validation."""
    runner = ly.LitAgentRunner[Any](max_rollouts=4)
    async with ly.open_store(url) as store, runner.run_context(agent=play, store=store):
        await runner.iter()


@pytest.mark.filterwarnings("ignore:.*Agent Lightning 0.1.*:DeprecationWarning")
async def test_the_program_trains_with_an_old_worker_and_validates_with_a_runner(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"secret": number}) + "\n" for number in range(4)))
    files = {"data.train_files": str(tasks), "data.val_files": str(tasks), "trainer.val_before_train": False}
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({**KEYS, **STEPS, **OWN, **files}))
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden.algorithm.verl", "--config", tmp_path / "keys.yaml"),
        *("--run-dir", tmp_path / "run", "--port", "0"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stderr is not None
    said: list[str] = []
    store = ""

    async def work(url: str) -> None:
        assert await old_worker(url) == 16
        await runner(store)

    working: asyncio.Task[None] | None = None
    try:
        async for line in program.stderr:
            said.append(line.decode(errors="replace"))
            if found := re.search(r"the store is at (\S+),", said[-1]):
                store = found[1]
            if working is None and (found := re.search(r"0\.1 find their tasks at (\S+)", said[-1])):
                working = asyncio.create_task(work(found[1]))
        assert await program.wait() == 0, "".join(said[-60:])
        assert working is not None
        await working
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
        if working is not None:
            working.cancel()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "succeeded"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["rollouts"], row["failed"]) for row in rows] == [("train", 16, 0), ("val", 4, 0)]
    assert rows[0]["trained_tokens_after_processing"] > 0
    assert rows[0]["verl/training/rollout_probs_diff_max"] < 1e-4
    assert (tmp_path / "run" / "checkpoints" / "global_step_1").is_dir()


def test_the_whole_program_of_the_documentation_runs_under_the_alias(tmp_path: Path) -> None:
    program = Path(__file__).with_name("seed_program.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "leyden.compat", program, str(port)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rollouts: 24 succeeded" in done.stderr  # four tasks four times, and four before and after the step
    assert "actor/grad_norm:" in done.stdout
