"""Train the weather agent of one framework, exactly as its page has it, and measure it.

    python examples/frameworks/train.py openai     # a module here, by the first word of its name

The agent calls OpenAI or Anthropic. Its calls go through the gateway to a tiny model, which runs
and learns in a process of its own. At first that model often asks the tool about the wrong city.
The reward is 1 if the agent's answer has the weather of the city in the question. The command needs
two CPU cores, no key and no network.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.adapter import model_calls
from leyden.training.runs.folder import store_path

HERE = Path(__file__).parent
WEIGHTS = Path(ly.__file__).parent / "cli" / "project" / "model"  # that of `leyden init`
CITIES = (
    *("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Rome", "Delhi", "Quito"),
    *("Accra", "Sofia", "Hanoi", "Perth", "Turin", "Bergen", "Dakar", "Minsk"),
)
"""Cities that the tiny model knows."""
STEPS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """Shares of the validation rollouts."""

    reward: float
    """The mean reward."""
    right_calls: float
    """The first model call asked the tool about the city of the question."""


def train(agent: ly.LitAgent[Any], model: str, run_dir: Path | None, *, steps: int, seed: int, repeats: int) -> Path:
    """Train `agent`, which calls its model `model`, and return the run's folder.

    Each city is asked about `repeats` times before training, and as often after it.
    """
    algorithm = ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, model_name=model, seed=seed, device="cpu", max_length=512),
        n_steps=steps,
        tasks_per_step=len(CITIES),
        rollouts_per_task=8,
        minibatch_size=32,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3, betas=(0.9, 0.95)),
        timeout_seconds=120.0,
        val_every_n_steps=steps,
        validate_first=True,
        seed=seed,
    )
    tasks = [{"city": city} for city in CITIES]
    trainer = ly.Trainer(algorithm=algorithm, concurrency=64, run_dir=run_dir)
    summary = trainer.fit(agent, tasks, val_dataset=tasks * repeats)
    assert summary.run_dir is not None  # `fit` always keeps its run
    return summary.run_dir


async def measure(run_dir: Path) -> list[Measured]:
    """Return what each validation of the run found, in order."""
    async with ly.SqliteLightningStore(store_path(run_dir)) as store:
        rollouts = await store.query_rollouts(mode_in=["val"])
        spans_of = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    validations: dict[int, list[ly.Rollout]] = {}
    for rollout in rollouts:
        validations.setdefault(rollout.metadata["step"], []).append(rollout)
    return [
        Measured(
            reward=_mean([ly.find_final_reward(spans_of[rollout.rollout_id]) or 0.0 for rollout in validation]),
            right_calls=_mean(
                [first_city(spans_of[rollout.rollout_id]) == rollout.input["city"] for rollout in validation]
            ),
        )
        for _, validation in sorted(validations.items())
    ]


def first_city(spans: Sequence[ly.Span]) -> str | None:
    """Return the city of a rollout's first tool call; None if it called no tool."""
    calls = model_calls(spans)
    requested = calls[0].output_messages[0].get("tool_calls") if calls else None
    return json.loads(requested[0]["function"]["arguments"]).get("city") if requested else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(argv: Sequence[str] | None = None) -> None:
    """See `--help`."""
    names = sorted(path.stem.removesuffix("_agent") for path in HERE.glob("*_agent.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=names)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of 128 rollouts each (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=8, help="rollouts of each city, before and after (default: 8)")
    parser.add_argument("--run-dir", type=Path, help="where to keep the run; a new folder under .leyden/ by default")
    given = parser.parse_args(argv)

    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        os.environ.setdefault(variable, "unused")  # the SDKs demand one; the gateway does not pass it on
    sys.path.insert(0, str(HERE))
    module = importlib.import_module(f"{given.framework}_agent")
    started, cpu_before = time.monotonic(), sum(os.times()[:4])
    run_dir = train(
        module.agent, module.MODEL, given.run_dir, steps=given.steps, seed=given.seed, repeats=given.repeats
    )
    seconds, cpu_seconds = time.monotonic() - started, sum(os.times()[:4]) - cpu_before  # the engine's process included
    before, *_, after = asyncio.run(measure(run_dir))
    print(f"reward: {before.reward:.2f} before, {after.reward:.2f} after; {seconds:.0f} s, {cpu_seconds:.0f} s of CPU")
    print(
        f"rollouts whose first call has the right city: {before.right_calls:.0%} before, {after.right_calls:.0%} after"
    )
    print(f"run: {run_dir}")


if __name__ == "__main__":
    main()
