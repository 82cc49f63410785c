"""A policy that learns order execution, with its network on an NVIDIA GPU."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from leyden.cli.app import app
from tests.compat.order_execution.bars_of import write_days
from tests.compat.test_rl_command import PPO

pytestmark = pytest.mark.merge

USES_CUDA = os.environ.get("LEYDEN_TEST_DEVICE", "cuda") == "cuda"


def test_training_and_backtest_of_a_network_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_days(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("ppo.yaml").write_text(yaml.safe_dump({**PPO, "runtime": {"seed": 1, "use_cuda": USES_CUDA}}))
    if USES_CUDA:
        torch.cuda.reset_peak_memory_stats()
    trained = CliRunner().invoke(app, ["rl", "train", "ppo.yaml", "--run-dir", "run"])
    assert trained.exit_code == 0, trained.output
    tested = CliRunner().invoke(app, ["rl", "backtest", "ppo.yaml", "--run", "run"])
    assert tested.exit_code == 0, tested.output
    with Path("run/backtest.csv").open() as file:
        assert list(csv.DictReader(file))
    if USES_CUDA:
        assert torch.cuda.max_memory_allocated() > 0
