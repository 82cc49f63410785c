"""Train a pretrained model on the tool task of `examples/real_model`, on a GPU: held-out requests solved before and after.

    python benchmarks/gpu/learning.py gemma.gguf --seeds 2
    python benchmarks/gpu/learning.py smollm2.gguf --all-weights

MODEL is a folder or a GGUF file, which is dequantised first. `unpack.py` puts it together from parts. Twelve steps of 6 x 8 rollouts, the
first four of which imitate successes, with LoRA unless all weights are trained.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, Measurement, main

sys.path.insert(0, str(ROOT / "examples" / "real_model"))


def measure(measurement: Measurement) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("XDG_CACHE_HOME", folder)  # of what a GGUF file is dequantised into
        if measurement.cpu:
            from tests.engine import tiny

            model = tiny.make(Path(folder) / "tiny")
        else:
            model = Path(measurement.options.model)
        measurement.figures |= {"model": model.name, "all_weights": measurement.options.all_weights, "runs": []}
        for seed in range(measurement.options.seeds):
            measurement.figures["runs"].append(run(measurement, model, Path(folder) / str(seed), seed))


def run(measurement: Measurement, model: Path, run_dir: Path, seed: int) -> dict[str, Any]:
    """Return the share of held-out requests that is solved before and after, and the reward of each step."""
    from agent import choose_tool
    from tasks import held_out_tasks, train_tasks

    import leyden as ly
    from leyden.training.runs import open_run

    everything = measurement.options.all_weights
    backend = ly.IsolatedBackend(
        model,
        device=measurement.device,
        max_length=512,
        seed=seed,
        lora=None if everything else {"rank": 16, "alpha": 32},
        cuda_graphs=measurement.options.graphs,
    )
    algorithm = ly.GRPO(
        backend,
        n_steps=1 if measurement.cpu else 12,
        sft_steps=0 if measurement.cpu else 4,
        tasks_per_step=2 if measurement.cpu else 6,
        rollouts_per_task=2 if measurement.cpu else 8,
        max_tokens=10,
        optim=ly.OptimParams(learning_rate=1e-5 if everything else 1e-4),
        validate_first=True,
        seed=seed,
    )
    held_out = held_out_tasks()[: 4 if measurement.cpu else None]
    began = time.perf_counter()
    trainer = ly.Trainer(algorithm=algorithm, run_dir=run_dir, progress=False)
    trainer.fit(choose_tool, train_tasks(), val_dataset=held_out)
    seconds = time.perf_counter() - began
    before, *_, after = (row.metrics["reward"] for row in open_run(run_dir).metrics("val"))
    rewards = [row.metrics["reward"] for row in open_run(run_dir).metrics("train")]
    return {"seed": seed, "before": before, "after": after, "rewards": rewards, "seconds": seconds}


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        [
            ("model", {"nargs": "?", "help": "a folder or a .gguf file (not with --cpu)"}),
            ("--seeds", {"type": int, "default": 1, "help": "runs, with seeds from 0 (default: 1)"}),
            ("--all-weights", {"action": "store_true", "help": "train all weights, and no LoRA adapter"}),
            ("--graphs", {"action": "store_true", "help": "decode with cuda_graphs=True"}),
        ],
    )
