"""The example in 60 lines runs, and learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rl_custom_simulator.py"


@pytest.mark.slow
def test_the_room_is_kept_near_twenty_degrees() -> None:
    torch.set_num_threads(1)
    trainer = runpy.run_path(str(EXAMPLE))["main"](max_iters=30)
    assert trainer.metrics["val/degrees_off"] < 1.8  # it begins above 5
