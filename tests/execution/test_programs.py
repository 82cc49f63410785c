"""Programs as agents, wherever their runners live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.store import SqliteLightningStore
from leyden.training.runs.folder import store_path
from leyden.types import find_final_reward

RAY = pytest.param({"type": "ray", "num_cpus": 0.1}, marks=[pytest.mark.ray, pytest.mark.timeout(180)], id="ray")


@pytest.mark.parametrize("strategy", ["shm", "ipc", "cs", RAY])
async def test_a_program_is_an_agent_under_every_strategy(strategy: Any, tmp_path: Path) -> None:
    agent = ly.ProcessAgent(["sh", "-c", "read task; echo 0.$task"], reward="last_line")
    trainer = ly.Trainer(algorithm="baseline", strategy=strategy, n_runners=2, run_dir=tmp_path / "run")
    summary = await trainer.afit(agent, list(range(1, 7)))
    assert not summary.failures
    async with SqliteLightningStore(store_path(tmp_path / "run"), read_only=True) as store:
        rollouts = await store.query_rollouts()
        rewards = {
            rollout.input: find_final_reward(await store.query_spans(rollout.rollout_id)) for rollout in rollouts
        }
    assert rewards == {task: task / 10 for task in range(1, 7)}
