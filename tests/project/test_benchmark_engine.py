"""What the benchmark of the engine runs on a GPU, run on a CPU with a tiny shape."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import engine
from benchmarks.harness import Peer


@pytest.mark.slow
@pytest.mark.merge
def test_the_script_for_a_gpu_measures_on_any_device() -> None:
    found = Peer("leyden", Path(sys.executable)).run(engine.GPU_SCRIPT, "tiny", "cpu")
    rates = {name: found[name] for name in ("decode", "gradient", "gradient_flops", "product_flops")}
    assert all(isinstance(rate, float) and rate > 0 for rate in rates.values()), found
