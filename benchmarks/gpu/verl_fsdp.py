"""Steps of verl's trainer with FSDP2 on one GPU, sampled by Leyden's engine (`rollout.name=leyden`).

The model and the game are those of `leyden demo`. Figures are seconds and reward of each step, and `apart`, the largest difference between
a sampled probability and the trainer's, which shows that each update reaches the sampler. With `--cpu` it is FSDP2 on gloo, as in
`examples/verl_cpu`.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, Measurement, main

ON_A_GPU: dict[str, Any] = {
    "trainer.device": "cuda",
    "leyden.platform": None,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}


def measure(measurement: Measurement) -> None:
    import yaml

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", VERL_LOGGING_LEVEL="ERROR", PYTHONPATH=str(ROOT))
    import leyden as ly
    from examples.verl_cpu.train import KEYS, NUMBERS, WEIGHTS, play
    from leyden.training.runs import open_run

    keys: dict[str, Any] = {
        **yaml.safe_load(KEYS.read_text()),
        "actor_rollout_ref.model.path": str(WEIGHTS),
        "trainer.total_training_steps": 1 if measurement.cpu else 20,
        **({} if measurement.cpu else ON_A_GPU),
    }
    tasks = [{"secret": secret} for secret in range(NUMBERS)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        algorithm = ly.VERL(keys)
        ly.Trainer(algorithm=algorithm, n_runners=1, run_dir=run_dir, progress=False).fit(play, tasks, tasks)
        measurement.figures["seconds"] = time.perf_counter() - began
        rows = [row.metrics for row in open_run(run_dir).metrics("train")]
    measurement.figures |= {
        "rewards": [row["reward"] for row in rows],
        "apart": max(row["verl/training/rollout_probs_diff_max"] for row in rows),
        "step_seconds": [row.get("verl/timing_s/step") for row in rows],
    }


if __name__ == "__main__":
    main(__file__, __doc__, measure)
