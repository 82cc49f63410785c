"""Teach a pretrained language model to call three tools, and measure it on held-out requests before and after.

    leyden models get gemma3 gemma3
    python examples/real_model/train.py gemma3
    python examples/real_model/train.py gemma3 --resume RUN    # continue a stopped run

The first steps imitate successes, the later ones compare rollouts (GRPO). The model runs in a process of its own. Once
the model is a folder, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent import choose_tool
from tasks import held_out_tasks, train_tasks

import leyden as ly
from leyden.training.runs import open_run

LORA = {"rank": 16, "alpha": 32}


def make_algorithm(model: Path, *, steps: int, sft_steps: int, seed: int, all_weights: bool = False) -> ly.GRPO:
    """Return the algorithm; its options are those of the page docs/how-to/real-model.md."""
    backend = ly.IsolatedBackend(model, device="cpu", max_length=512, seed=seed, lora=None if all_weights else LORA)
    return ly.GRPO(
        backend,
        n_steps=steps,
        sft_steps=sft_steps,
        tasks_per_step=12,
        rollouts_per_task=8,
        minibatch_size=48,
        max_tokens=10,
        optim=ly.OptimParams(learning_rate=1e-5 if all_weights else 2e-4),
        warmup_steps=1,
        schedule="linear",
        final_fraction=0.1,
        validate_first=True,
        seed=seed,
    )


def main(description: str, agent: ly.LitAgent[Any], tasks: Sequence[Any], held_out: Sequence[Any]) -> None:
    """Train an agent, and measure it on other tasks before and after; see `--help`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="folder of a causal language model, or a .gguf file")
    parser.add_argument("--steps", type=int, default=8, help="steps in all (default: 8)")
    parser.add_argument("--sft-steps", type=int, default=2, help="the first of them, which imitate (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling (default: 0)")
    parser.add_argument("--all-weights", action="store_true", help="train all weights, and no LoRA adapter")
    parser.add_argument("--run-dir", type=Path, help="where to keep the run (default: a new folder under .leyden/)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue the run in this folder")
    given = parser.parse_args()
    if given.resume and given.run_dir:
        parser.error("--resume RUN names the folder already; leave --run-dir out")
    run_dir = given.resume or given.run_dir or Path(".leyden") / time.strftime("tools-%Y%m%d-%H%M%S")

    algorithm = make_algorithm(
        given.model, steps=given.steps, sft_steps=given.sft_steps, seed=given.seed, all_weights=given.all_weights
    )
    trainer = ly.Trainer(algorithm=algorithm, run_dir=run_dir)
    trainer.fit(agent, tasks, val_dataset=held_out, resume=given.resume is not None)
    before, *_, after = open_run(run_dir).metrics("val")
    print(f"held-out tasks solved: {before.metrics['reward']:.0%} before, {after.metrics['reward']:.0%} after")


if __name__ == "__main__":
    main(__doc__, choose_tool, train_tasks(), held_out_tasks())
